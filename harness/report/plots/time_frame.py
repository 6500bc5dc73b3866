"""What pictures of several runs over time have in common, so that they can be laid beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

_SHARED_UP_TO = 5  # times the shortest run: beyond, a common time axis would leave nothing to see of it
_LOG_FROM = 20  # a step so many times as long as the median one would press the others to the axis
PANELS = ("requests", "free_blocks", "step_ms")
_COLUMNS = {"requests": ("running", "waiting"), "free_blocks": ("free_blocks",), "step_ms": ("step_ms",)}


@dataclass(frozen=True)
class TimeFrame:
    """Axes of a group of runs.

    Attributes:
        until_s: end of the time axis; None: each run has its own.
        panels: of :data:`PANELS`, those that any run of the group has values for.
        most_requests: the largest number of requests running or waiting; None if unknown.
        step_ms: range of the steps' times; None if unknown.
        log_steps: whether the steps' times are drawn on a logarithmic axis.
    """

    until_s: float | None
    panels: tuple[str, ...]
    most_requests: float | None
    step_ms: tuple[float, float] | None
    log_steps: bool


def time_frame(runs: Sequence[tuple[pd.DataFrame, pd.DataFrame]]) -> TimeFrame:
    """The axes of some runs.

    Args:
        runs: of each its rows of the ``steps`` and of the ``requests`` table.
    """
    steps = [timed(rows) for rows, _ in runs]
    ends = [end for rows, (_, requests) in zip(steps, runs, strict=True) if (end := _end(rows, requests)) > 0]
    panels = tuple(p for p in PANELS if any(rows[c].notna().any() for rows in steps for c in _COLUMNS[p]))
    waiting = _values(steps, "running", "waiting")
    times = _values(steps, "step_ms")
    shared = bool(ends) and max(ends) <= _SHARED_UP_TO * min(ends)
    return TimeFrame(
        until_s=max(ends) * 1.03 if shared else None,
        panels=panels,
        most_requests=float(waiting.max()) if len(waiting) else None,
        step_ms=(float(times.min()), float(times.max())) if len(times) else None,
        log_steps=bool(len(times)) and times.min() > 0 and times.max() / np.median(times) > _LOG_FROM,
    )


def timed(steps: pd.DataFrame) -> pd.DataFrame:
    """Steps whose time is known, in its order."""
    return steps[steps["t_s"].notna()].sort_values("t_s")


def has(steps: pd.DataFrame, panel: str) -> bool:
    """Whether a run's log has values for a panel."""
    return any(steps[name].notna().any() for name in _COLUMNS[panel])


def _end(steps: pd.DataFrame, requests: pd.DataFrame) -> float:
    known = [requests[name].dropna() for name in ("t_submit_s", "t_last_s", "t_done_s")] + [steps["t_s"]]
    return max((float(values.max()) for values in known if len(values)), default=0.0)


def _values(steps: Sequence[pd.DataFrame], *names: str) -> np.ndarray:
    found = [rows[name].dropna().to_numpy(dtype=np.float64) for rows in steps for name in names]
    return np.concatenate(found) if found else np.array([])
