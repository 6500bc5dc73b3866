"""The manifest of a result directory: one JSON line for every state a job went through, appended as it happens."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

FILE = "manifest.jsonl"
MULTIRUN_FILE = "multirun.yaml"  # beside it: the composed config of a sweep's last command, as Hydra writes it


@dataclass(frozen=True, slots=True)
class JobState:
    """A job at one moment.

    Attributes:
        job: directory of the job, relative to the manifest ("." for a single run).
        config_hash: hash over everything that can change its measurement.
        overrides: command-line overrides of this job.
        state: planned, running, ok, failed, timeout or interrupted.
        time: UTC, ISO 8601.
        error: one line, if it did not end well.
        block, position: where in the order of a sweep it runs; None if it is in no block.
    """

    job: str
    config_hash: str
    overrides: tuple[str, ...]
    state: str
    time: str
    error: str | None = None
    block: int | None = None
    position: int | None = None


def now() -> str:
    """UTC in ISO 8601 with seconds, for people; measurements use the monotonic clock."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def append(directory: Path, state: JobState) -> None:
    """Add a line; one ``write`` on a file opened for appending, so that parallel jobs do not mix their lines.

    Raises:
        OSError: it could not be written, or only in part (a full disk).
    """
    line = (json.dumps(asdict(state)) + "\n").encode()
    descriptor = os.open(directory / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a line was cut off: this one must not be lost with it
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / FILE))
    finally:
        os.close(descriptor)


def latest(directory: Path) -> list[JobState]:
    """The last state of each job, in the order in which the jobs first appeared; [] without a manifest."""
    states: dict[str, JobState] = {}
    for state in _states(directory):
        states[state.job] = state
    return list(states.values())


def _states(directory: Path) -> Iterator[JobState]:
    """Every line, in order."""
    path = directory / FILE
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:  # a line cut off by a full disk or a crash: its job is read from its other lines
            continue
        fields["overrides"] = tuple(fields["overrides"])
        yield JobState(**fields)


def begun_with(directory: Path) -> frozenset[str]:
    """Config hashes of the jobs that were planned before the first of them ran; later ones were added by a resume."""
    planned = takewhile(lambda state: state.state == "planned", _states(directory))
    return frozenset(state.config_hash for state in planned)


def durations(directory: Path) -> list[tuple[JobState, float]]:
    """Jobs that ended well with the seconds from their last start to their end; [] without a manifest."""
    started: dict[str, JobState] = {}
    found = []
    for state in _states(directory):
        if state.state == "running":
            started[state.job] = state
        elif state.state == "ok" and state.job in started:
            began, ended = (datetime.fromisoformat(s.time) for s in (started[state.job], state))
            found.append((state, (ended - began).total_seconds()))
    return found


def tally(states: Sequence[JobState]) -> str:
    """Jobs by how they ended, in words: ``1 of 4 measured, 1 interrupted, 2 not started``."""
    words = {"timeout": "out of time", "planned": "not started", "running": "ended without a word"}
    counts = Counter(s.state for s in states if s.state != "ok")
    parts = [f"{sum(s.state == 'ok' for s in states)} of {len(states)} measured"]
    order = ("failed", "timeout", "interrupted", "running", "planned")
    return ", ".join([*parts, *(f"{counts[state]} {words.get(state, state)}" for state in order if counts[state])])


def failures(states: Sequence[JobState]) -> list[JobState]:
    """Those that began and are not ok; "running" counts, since nobody runs any more when this is asked."""
    return [s for s in states if s.state not in ("ok", "planned")]
