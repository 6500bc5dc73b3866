"""What stands in the way of a higher rate, and whether a run's numbers agree with each other."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.capacity.search import Point

BUSY = 0.95
"""Share of the time from which the device counts as busy all the time."""

OFTEN = 0.05
"""Share of the steps from which something counts as happening often."""


@dataclass(frozen=True)
class Binding:
    """What binds.

    Attributes:
        name: ``ttft``, ``itl``, ``kv_memory``, ``max_requests`` or ``compute``.
        reason: what shows it.
        cuttable: whether prompts in long steps are what binds, which a smaller ``max_batch_tokens`` would cut.
    """

    name: str
    reason: str
    cuttable: bool = False


@dataclass(frozen=True)
class LittlesLaw:
    """Requests in the system from two sides: the step log's, and rate x time of stay. They agree within a few percent
    if the run is consistent (Little 1961)."""

    logged: float
    predicted: float

    @property
    def difference(self) -> float:
        """Relative, signed."""
        return self.logged / self.predicted - 1 if self.predicted else 0.0


def binding_constraint(point: Point) -> Binding:
    """What the run just above the capacity ran into.

    Memory first (preemptions, or requests that wait while blocks are short), then places, then a device that is busy
    all the time while requests wait for it; if none of them, the limit itself: it is the time of the work, not the
    waiting for it.
    """
    steps = _steps(point)
    broken = point.why_not or "no limit is broken"
    waits = float((steps["waiting"] > 0).mean())
    preempted = int(steps["preempted"].sum())
    held = float(steps["admission_held"].mean())
    total = point.values["kv_blocks_total"]
    low = float(steps["free_blocks"].min()) / total if total else 1.0
    if preempted or (waits > OFTEN and (held > OFTEN or low < 0.02)):
        what = f"{preempted} preemptions" if preempted else f"{held:.0%} of the steps admit nobody for lack of blocks"
        return Binding("kv_memory", f"{what}; at the least {low:.1%} of the KV blocks were free ({broken})")
    limit = next((c.value for c in point.record.config if c.field == "max_requests_per_batch"), None)
    full = float((steps["running"] >= limit).mean()) if limit else 0.0
    if waits > OFTEN and full > OFTEN:
        return Binding("max_requests", f"{full:.0%} of the steps have all {limit} places taken ({broken})")
    busy = busy_share(point)
    first = re.match(r"(ttft|itl|e2e)", broken)
    name = first[1] if first and first[1] != "e2e" else "compute"
    # Whoever decodes keeps the device busy, at a low load too: it is short of time only if requests wait for it.
    if busy >= BUSY and (waits > OFTEN or name == "compute" or point.falls_behind):
        return Binding("compute", f"a step ran {busy:.0%} of the time and requests waited for it ({broken})")
    if name == "itl":
        tokens = _prompt_tokens_of_long_steps(steps)
        if not tokens:
            return Binding(name, f"{broken}, and its longest steps hold no prompt: decoding itself takes too long")
        return Binding(name, f"{broken}, and its longest steps hold {tokens:,} prompt tokens", cuttable=True)
    return Binding(name, f"{broken}, though few wait (a step ran {busy:.0%} of the time): single steps take too long")


def _prompt_tokens_of_long_steps(steps: pd.DataFrame) -> int:
    """Prompt tokens of the steps that make the longest gaps (median)."""
    end = steps["t_ns"].to_numpy() / 1e6 + steps["step_ms"].to_numpy()
    gap = np.diff(end, prepend=end[:1])
    long = steps[gap >= np.quantile(gap, 0.99)]
    return int(long["prefill_tokens"].median())


def busy_share(point: Point) -> float:
    """Share of the time until the last request came in which a step ran."""
    steps = _steps(point)
    due = [r.t_sched_ns for r in point.record.requests if r.t_sched_ns is not None]
    first, last = min(due) / 1e9, max(due) / 1e9
    start = steps["t_ns"].to_numpy() / 1e9
    end = start + steps["step_ms"].to_numpy() / 1000
    begin = np.maximum(start, np.concatenate(([-np.inf], end[:-1])))
    owned = (np.minimum(end, last) - np.maximum(begin, first)).clip(0).sum()
    return float(owned / (last - first)) if last > first else 1.0


def littles_law(point: Point) -> LittlesLaw:
    """Mean number of requests that run or wait: by the step log over time, and by throughput x mean time of stay."""
    steps, record = _steps(point), point.record
    ended = [r for r in record.requests if r.t_done_ns is not None and r.t_submit_ns is not None and r.outcome.ok]
    if not ended or steps.empty:
        return LittlesLaw(0.0, 0.0)
    span = max(r.t_done_ns or 0 for r in ended) / 1e9
    stay = sum((r.t_done_ns or 0) - (r.t_submit_ns or 0) for r in ended) / 1e9
    start = steps["t_ns"].to_numpy() / 1e9
    end = np.minimum(np.concatenate((start[1:], [span])), start + steps["step_ms"].to_numpy() / 1000)
    inside = (steps["running"] + steps["waiting"]).to_numpy()
    return LittlesLaw(float(((end - start).clip(0) * inside).sum() / span), stay / span)


def _steps(point: Point) -> pd.DataFrame:
    steps = point.record.steps
    if not isinstance(steps, pd.DataFrame):
        raise TypeError("a simulated run has its step log as a frame")
    return steps
