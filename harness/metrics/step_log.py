"""Columns of a run's step log, whether it came as mappings or as a frame."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.record import RunRecord


def logged(record: RunRecord, field: str) -> list[Any]:
    """What the steps say of ``field``, those that say nothing left out."""
    steps = record.steps
    if isinstance(steps, pd.DataFrame):
        return steps[field].dropna().tolist() if field in steps else []
    return [step[field] for step in steps if step.get(field) is not None]


def held_spans(record: RunRecord, origin_ns: int) -> npt.NDArray[np.float64] | None:
    """Start and end, in ns after ``origin_ns``, of each step in which the safety margin kept prefills out: up to the
    start of the next one. None if the log does not tell of all steps when they began and whether it did."""
    held, begun = logged(record, "admission_held"), logged(record, "t_ns")
    if not held or len(held) != len(record.steps) or len(begun) != len(held):
        return None
    starts = np.array(begun, dtype=np.int64) - origin_ns
    last = logged(record, "step_ms")
    end = starts[-1] + round(last[-1] * 1e6) if last else starts[-1]
    spans = np.stack((starts, np.append(starts[1:], end)), axis=1).astype(np.float64)
    return spans[np.array(held, dtype=bool)]
