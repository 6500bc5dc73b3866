"""What caused the slowest answers: the worst 1 % of inter-token gaps and of TTFTs, each with its step and a cause.

A gap is a stretch of time, and what the process did in it is known from the step log, the garbage collector's log and
the stamps of other requests' tokens. Each cause is given the part of the gap that it explains; the largest names the
gap if it explains at least half of what is unusual about it, else the cause is ``unknown``. With async batching steps
overlap: a step owns the time from the end of the one before it to its own end.

Tables go in (:mod:`harness.tables`), the rows of table ``tails`` come out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

WORST_SHARE = 0.01
"""Share of the gaps (and of the TTFTs) that is looked at, at least one of each."""

MOST_ROWS = 1_000
"""More tails of a kind than these are not looked at: the worst of them come first."""

ORDINARY = 1.5
"""A value up to this multiple of the median has nothing to explain, even if it is among the worst."""

_SAME_S = 0.0005
"""Moments closer than this are one: a step's end and the stamps of its tokens are read one after the other."""

FloatArray = npt.NDArray[np.float64]


class Cause(StrEnum):
    """Why a gap or a TTFT was long."""

    PREFILL = "large prefill in step"
    PREEMPTION = "preemption"
    OFFLOAD = "offload or restore"
    MARGIN = "admission held by margin"
    GRAPH_MISS = "graph miss"
    GC = "garbage collection"
    QUEUE = "queueing"
    HARNESS = "harness lag"
    BETWEEN = "between steps"
    ORDINARY = "ordinary"
    NO_LOG = "no step log"
    UNKNOWN = "unknown"


def tails(
    requests: pd.DataFrame, itl: pd.DataFrame, steps: pd.DataFrame, gc_pauses: pd.DataFrame
) -> list[dict[str, Any]]:
    """Rows of table ``tails`` of one run, without ``run_id``, worst first: TTFTs, then gaps.

    Args:
        requests, itl, steps, gc_pauses: the tables of that run.
    """
    log = _Log.read(steps, gc_pauses, requests, itl)
    return [*_first_tokens(requests, log), *_gaps(requests, itl, log)]


@dataclass(frozen=True)
class _Log:
    """Steps in the order of their ends, collections and token stamps, all in s after the start of the run."""

    step: npt.NDArray[np.int64]
    begin: FloatArray  # when the step began to own the time
    end: FloatArray
    columns: Mapping[str, FloatArray]
    typical_decode_ms: float
    typical_graph_ms: float
    uses_graphs: bool
    gc_begin: FloatArray
    gc_end: FloatArray
    stamps: FloatArray

    @classmethod
    def read(cls, steps: pd.DataFrame, pauses: pd.DataFrame, requests: pd.DataFrame, itl: pd.DataFrame) -> _Log:
        known = steps[steps["t_s"].notna() & steps["step_ms"].notna()]
        ends = _floats(known["t_s"]) + _floats(known["step_ms"]) / 1000
        order = np.argsort(ends, kind="stable")
        known, end = known.iloc[order], ends[order]
        begin = np.maximum(_floats(known["t_s"]), np.concatenate(([-np.inf], end[:-1])))
        names = ("prefill_tokens", "decode_rows", "preempted", "offloaded", "restored", "admission_held", "graph")
        columns = {name: np.nan_to_num(_floats(known[name])) for name in (*names, "waiting", "free_blocks")}
        decode = columns["prefill_tokens"] == 0
        graph = columns["graph"] > 0
        own_ms = (end - begin) * 1000
        gc_begin = _floats(pauses["t_s"])
        stamps = np.concatenate((_floats(itl["t_s"]), _floats(requests["t_first_s"])))
        return cls(
            step=known["step"].to_numpy(dtype=np.int64),
            begin=begin,
            end=end,
            columns=columns,
            typical_decode_ms=_median(own_ms[decode]),
            typical_graph_ms=_median(own_ms[decode & graph]),
            uses_graphs=bool(graph[decode].mean() > 0.5) if decode.any() else False,
            gc_begin=gc_begin,
            gc_end=gc_begin + _floats(pauses["duration_ms"]) / 1000,
            stamps=np.sort(stamps[~np.isnan(stamps)]),
        )

    def inside(self, a: float, b: float) -> slice:
        """Steps that own part of the stretch."""
        return slice(int(np.searchsorted(self.end, a, "right")), int(np.searchsorted(self.begin, b, "left")))

    def overlap_ms(self, part: slice, a: float, b: float) -> FloatArray:
        """[steps of ``part``] how much of the stretch each owns."""
        owned = np.minimum(self.end[part], b) - np.maximum(self.begin[part], a)
        return np.asarray(owned.clip(0) * 1000, dtype=np.float64)

    def collected_ms(self, a: float, b: float) -> float:
        """Time of the stretch in which the garbage collector ran."""
        return float((np.minimum(self.gc_end, b) - np.maximum(self.gc_begin, a)).clip(0).sum() * 1000)

    def unowned(self, a: float, b: float) -> dict[Cause, float]:
        """The part of a stretch in which no step ran; nothing is known of it without a log."""
        return {Cause.BETWEEN if len(self.step) else Cause.NO_LOG: (b - a) * 1000}

    def delivered(self, a: float, b: float) -> bool:
        """Whether a token of any request was stamped inside the stretch, its ends apart."""
        first, last = np.searchsorted(self.stamps, (a + 1e-6, b - 1e-6))
        return bool(last > first)


def _floats(values: pd.Series) -> FloatArray:
    return values.to_numpy(dtype=np.float64, na_value=np.nan)


def _median(values: FloatArray) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _worst(values: FloatArray) -> npt.NDArray[np.int64]:
    """Positions of the worst share, worst first."""
    n = min(MOST_ROWS, math.ceil(WORST_SHARE * len(values)))
    if n == 0:
        return np.zeros(0, np.int64)
    # The n-th largest bounds those that have to be sorted: a million gaps would take longer than all else here.
    candidates = np.flatnonzero(values >= np.partition(values, -n)[-n])
    return candidates[np.argsort(-values[candidates], kind="stable")[:n]]


def _gaps(requests: pd.DataFrame, itl: pd.DataFrame, log: _Log) -> list[dict[str, Any]]:
    gaps, times = _floats(itl["icl_ms"]), _floats(itl["t_s"])
    raw = np.flatnonzero(~(np.isnan(gaps) | np.isnan(times)))
    values = gaps[raw]
    typical = _median(values)
    again = dict(zip(requests["request_id"], requests["recomputed_tokens"].fillna(0), strict=True))
    worst = itl.iloc[raw[_worst(values)]]
    rows = []
    for request_id, index, b, value in zip(
        worst["request_id"], worst["index"], worst["t_s"], worst["icl_ms"], strict=True
    ):
        found = _explain_gap(log, b - value / 1000, b, typical, bool(again[request_id] > 0))
        rows.append(_row("itl", request_id, index, b, value, typical, found))
    return rows


@dataclass(frozen=True)
class _Explained:
    """Parts of a stretch in ms by cause, how much there is to explain, and the step that owned most of it."""

    parts: Mapping[Cause, float]
    of_ms: float
    step: int | None = None
    evidence: str | None = None


def _explain_gap(log: _Log, a: float, b: float, typical: float, recomputed: bool) -> _Explained:
    part = log.inside(a, b)
    owned = log.overlap_ms(part, a, b)
    excess = (b - a) * 1000 - typical
    parts = {Cause.GC: log.collected_ms(a, b)}
    if not len(owned):
        return _Explained(parts | log.unowned(a, b), excess)
    columns = {name: values[part] for name, values in log.columns.items()}
    over = (owned - log.typical_decode_ms).clip(0)
    # Ends strictly inside: steps that ran and gave this request nothing, if the stamps of others say so.
    inner = (log.end[part] > a + _SAME_S) & (log.end[part] < b + _SAME_S)
    missed = np.flatnonzero(inner)[:-1]
    idle = (b - a) * 1000 - owned.sum()
    last = int(np.flatnonzero(inner)[-1]) if inner.any() else None
    tail = 0.0 if last is None else max(0.0, (b - log.end[part][last]) * 1000)
    parts[Cause.BETWEEN] = max(0.0, idle - max(0.0, b - float(log.end[part][-1])) * 1000)
    parts[Cause.HARNESS] = tail
    moved = (columns["offloaded"] > 0) | (columns["restored"] > 0)
    prefill = columns["prefill_tokens"] > 0
    parts[Cause.OFFLOAD] = float(over[moved].sum())
    parts[Cause.PREFILL] = float(over[prefill & ~moved].sum())
    if log.uses_graphs:
        missing = ~prefill & (columns["graph"] == 0)
        parts[Cause.GRAPH_MISS] = float((owned - log.typical_graph_ms).clip(0)[missing & ~moved].sum())
    if len(missed):
        waited = float(owned[missed].sum())
        if not log.delivered(a, b):
            # Steps gave tokens and nobody stamped one: the consumer stood still.
            parts[Cause.HARNESS] = max(parts[Cause.HARNESS], (b - log.end[part][missed[0]]) * 1000)
        elif moved.any():
            parts[Cause.OFFLOAD] = max(parts[Cause.OFFLOAD], waited)
        elif recomputed and (columns["preempted"] > 0).any():
            parts[Cause.PREEMPTION] = waited
        else:
            parts[Cause.QUEUE] = max(0.0, waited - float(over[missed][prefill[missed]].sum()))
    return _Explained(parts, excess, *_evidence(log, part, owned))


def _first_tokens(requests: pd.DataFrame, log: _Log) -> list[dict[str, Any]]:
    answered = requests[requests["ttft_ms"].notna() & requests["t_first_s"].notna()]
    values = _floats(answered["ttft_ms"])
    typical = _median(values)
    admitted = _floats(answered["t_admit_s"])
    again = _floats(answered["recomputed_tokens"])
    rows = []
    for at in _worst(values):
        row, value = answered.iloc[at], float(values[at])
        b = float(row["t_first_s"])
        found = _explain_first(log, b - value / 1000, float(admitted[at]), b, bool(again[at] > 0))
        rows.append(_row("ttft", row["request_id"], 0, b, value, typical, found))
    return rows


def _explain_first(log: _Log, a: float, admitted: float, b: float, recomputed: bool) -> _Explained:
    """From submission over admission to the first token; an admission that the backend hides is taken as at once."""
    begun = a if math.isnan(admitted) else min(max(admitted, a), b)
    parts = {Cause.GC: log.collected_ms(a, b)}
    waiting = log.inside(a, begun)
    queued = log.overlap_ms(waiting, a, begun)
    held = log.columns["admission_held"][waiting] > 0
    parts[Cause.MARGIN] = float(queued[held].sum())
    parts[Cause.QUEUE] = (begun - a) * 1000 - parts[Cause.MARGIN]
    part = log.inside(begun, b)
    owned = log.overlap_ms(part, begun, b)
    if not len(owned):
        return _Explained(parts | log.unowned(begun, b), (b - a) * 1000, *_evidence(log, waiting, queued))
    columns = {name: values[part] for name, values in log.columns.items()}
    moved = (columns["offloaded"] > 0) | (columns["restored"] > 0)
    prefill = columns["prefill_tokens"] > 0
    parts[Cause.OFFLOAD] = float(owned[moved].sum())
    parts[Cause.PREFILL] = float(owned[prefill & ~moved].sum())
    if recomputed and (columns["preempted"] > 0).any():
        parts[Cause.PREEMPTION] = float(owned[~prefill].sum())
    ended = np.flatnonzero(log.end[part] < b + _SAME_S)
    parts[Cause.HARNESS] = max(0.0, (b - log.end[part][ended[-1]]) * 1000) if len(ended) else 0.0
    shown = (waiting, queued) if begun - a > b - begun else (part, owned)
    return _Explained(parts, (b - a) * 1000, *_evidence(log, *shown))


def _evidence(log: _Log, part: slice, owned: FloatArray) -> tuple[int | None, str | None]:
    """The step that owned most of the stretch, and what it did in words; None twice if no step did."""
    if not len(owned):
        return None, None
    at = part.start + int(owned.argmax())
    c = {name: int(values[at]) for name, values in log.columns.items()}
    words = [f"{owned.max():.1f} ms in step {log.step[at]}"]
    words += [f"{c['prefill_tokens']:,} prefill tokens"] if c["prefill_tokens"] else []
    words += [f"{c['decode_rows']} decoding"] if c["decode_rows"] else []
    words += [f"{c['waiting']} waiting"] if c["waiting"] else []
    words += [f"{c[name]} {name}" for name in ("preempted", "offloaded", "restored") if c[name]]
    words += [f"{len(owned)} steps in all"] if len(owned) > 1 else []
    return int(log.step[at]), ", ".join(words)


def _row(
    kind: str, request_id: str, index: int | None, t_s: float, value: float, typical: float, found: _Explained
) -> dict[str, Any]:
    cause, explained = max(found.parts.items(), key=lambda item: item[1])
    if value <= ORDINARY * typical:
        cause, explained = Cause.ORDINARY, math.nan
    elif explained < 0.5 * found.of_ms or explained <= 0:
        cause, explained = Cause.UNKNOWN, math.nan
    elif cause is Cause.NO_LOG:
        explained = math.nan
    return {
        "kind": kind,
        "request_id": request_id,
        "index": index,
        "t_s": t_s,
        "value_ms": value,
        "typical_ms": typical,
        "cause": str(cause),
        "explained_ms": None if math.isnan(explained) else explained,
        "step": found.step,
        "evidence": found.evidence,
    }
