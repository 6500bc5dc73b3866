"""What a metric is: a column of the tables bound to the one function that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from harness.metrics.inter_token import Gaps
from harness.metrics.observations import FloatArray, Observations
from harness.metrics.steady import Window
from harness.record import RunRecord
from harness.tables import Column, column

Scalar = int | float | str | bool | None

HIGHER, LOWER = "higher", "lower"


@dataclass(frozen=True)
class RunView:
    """What run-level metrics are computed from.

    Attributes:
        latencies: request-level metrics by name, [requests] in their unit, NaN = null.
        window: the steady part of the run, or why it has none.
    """

    record: RunRecord
    observations: Observations
    gaps: Gaps
    latencies: Mapping[str, FloatArray]
    window: Window

    @property
    def wall_s(self) -> float | None:
        """Start of the schedule to the last terminal output; None if one of the two was not reached."""
        if self.record.t_start_ns is None or self.record.t_end_ns is None:
            return None
        return (self.record.t_end_ns - self.record.t_start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class RequestMetric:
    """A column of ``requests`` computed from the observations: [requests] in the column's unit, NaN = null."""

    name: str
    compute: Callable[[Observations, Gaps], FloatArray]

    @property
    def column(self) -> Column:
        return column("requests", self.name)


@dataclass(frozen=True, slots=True)
class RunMetric:
    """A column of ``runs``: one value in the column's unit, None = null.

    ``better`` is :data:`HIGHER` or :data:`LOWER` for the metrics that arms are judged by; None for those that describe
    a run, or that follow from another judged one (with the same tokens, ``request_s`` from ``gen_tok_s``).
    """

    name: str
    compute: Callable[[RunView], Scalar]
    better: str | None = None

    @property
    def column(self) -> Column:
        return column("runs", self.name)


def percentile(values: FloatArray, q: float) -> float | None:
    """``q``-th percentile (0 to 100) of the values that are not NaN, linear interpolation; None if there are none."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, q)) if known.size else None


def mean(values: FloatArray) -> float | None:
    """Mean of the values that are not NaN; None if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def rate(amount: float, seconds: float | None) -> float | None:
    """``amount / seconds``; None if the time is unknown or 0."""
    return amount / seconds if seconds else None
