"""What a running measurement has observed so far, on disk: a process that is killed takes nothing of it along.

One file in the run's folder, appended to a few times a second: frames of a length, a line of JSON and the new entries
of the delivery columns as they are in memory. A frame that was cut off is passed over, so whatever moment the process
dies at, what came before is whole. The file is gone once the tables are written.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from harness.deliveries import COLUMNS, split
from harness.record import ConfigValue, Outcome, RequestRecord, RunRecord
from harness.recorder import Changes, with_deliveries

FILE = ".journal"
_LENGTH = struct.Struct("<Q")
_OBSERVED = tuple(f.name for f in fields(RequestRecord) if f.name != "chunks")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a run before it is measured; the fields of :class:`RunRecord` with these names."""

    identity: Mapping[str, Any]
    load_s: float | None
    warmup_s: float | None
    config: Sequence[ConfigValue]
    environment: Mapping[str, Any]
    calibration: Mapping[str, float] | None


class Journal:
    """Appends to the journal of a run in ``directory``; an earlier one there is replaced.

    Raises:
        OSError: the disk refuses, from here or from :meth:`add`.
    """

    def __init__(self, directory: Path, known: Known, requests: Sequence[RequestRecord]) -> None:
        self._path = directory / FILE
        self._file = self._path.open("wb", buffering=0)
        self._write({**asdict(known), "requests": [[k, _observed(r)] for k, r in enumerate(requests)]}, {})

    def add(self, changes: Changes, t_start_ns: int | None, telemetry: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Append what is new.

        Args:
            telemetry: new samples, each with its time in ``perf_counter_ns``.
        """
        self._write(
            {
                "t_start_ns": t_start_ns,
                "requests": [[k, _observed(record)] for k, record in changes.requests],
                "telemetry": list(telemetry),
            },
            changes.columns,
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, facts: Mapping[str, Any], columns: Mapping[str, bytes]) -> None:
        head = {**facts, "columns": {name: len(data) for name, data in columns.items()}}
        frame = b"".join([json.dumps(head, default=str).encode(), b"\n", *columns.values()])
        data = _LENGTH.pack(len(frame)) + frame
        if self._file.write(data) != len(data):  # a frame behind a torn one would be read as its rest
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))


def recover(directory: Path) -> RunRecord | None:
    """What the journal in ``directory`` holds; None if there is none, or nothing of it is whole.

    Requests without an end are UNFINISHED. The run ends with the last thing that was observed.
    """
    try:
        data = (directory / FILE).read_bytes()
    except FileNotFoundError:
        return None
    frames = list(_frames(data))
    if not frames:
        return None
    known = frames[0][0]
    records: dict[int, RequestRecord] = {}
    columns: dict[str, list[bytes]] = {name: [] for name in COLUMNS}
    t_start_ns: int | None = None
    telemetry: list[tuple[int, dict[str, Any]]] = []
    for head, own in frames:
        records |= {k: _record(values) for k, values in head["requests"]}
        t_start_ns = head.get("t_start_ns") or t_start_ns
        telemetry += head.get("telemetry", [])
        for name, part in own.items():
            columns[name].append(part)
    arrays = {name: np.frombuffer(b"".join(columns[name]), dtype) for name, dtype in COLUMNS.items()}
    requests = with_deliveries([records[k] for k in sorted(records)], split(len(records), arrays))
    return RunRecord(
        identity=dict(known["identity"]),
        requests=requests,
        t_start_ns=t_start_ns,
        t_end_ns=_last_ns(requests),
        load_s=known["load_s"],
        warmup_s=known["warmup_s"],
        config=[ConfigValue(**row) for row in known["config"]],
        environment=dict(known["environment"]),
        calibration=known["calibration"],
        telemetry=[{"t_s": (t - t_start_ns) / 1e9, **row} for t, row in telemetry if t_start_ns and t >= t_start_ns],
    )


def discard(directory: Path) -> None:
    """Remove the journal, if there is one."""
    (directory / FILE).unlink(missing_ok=True)


def _frames(data: bytes) -> Iterator[tuple[dict[str, Any], dict[str, bytes]]]:
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):  # cut off
            return
        line, _, rest = data[at : at + length].partition(b"\n")
        head, columns, start = json.loads(line), {}, 0
        for name, size in head["columns"].items():
            columns[name] = rest[start : start + size]
            start += size
        yield head, columns
        at += length


def _observed(record: RequestRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _OBSERVED}


def _record(values: Mapping[str, Any]) -> RequestRecord:
    return RequestRecord(**{**values, "outcome": Outcome(values["outcome"])})


def _last_ns(requests: Sequence[RequestRecord]) -> int | None:
    seen = [t for r in requests for t in (r.t_submit_ns, r.t_admit_ns, r.t_done_ns) if t is not None]
    seen += [r.chunks[-1].time_ns for r in requests if len(r.chunks)]
    return max(seen, default=None)
