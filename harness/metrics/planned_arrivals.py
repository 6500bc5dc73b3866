"""The rate of arrivals that a run was planned with, where its arrival process says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from harness.metrics.observations import Observations
from harness.record import RunRecord
from workloads.arrivals import ARRIVALS, RateProfile
from workloads.config import make_arrival

Expected = Callable[[float], float]
"""Mean number of requests due in the first so many seconds of a run."""

_FARTHEST = 4.0
"""Standard deviations between the requests of a run and the mean of its process, beyond which it was not its plan."""

_STEPS = 32
"""Steps of a moving average of the planned rate."""


def planned_arrivals(record: RunRecord, o: Observations) -> Expected | None:
    """What a run's process expects, of one whose rate changes by itself (:class:`workloads.arrivals.RateProfile`); None
    of any other, and of requests that did not come by it: turns of sessions, or a workload replayed at another rate. A
    process recorded with other settings than it has today is not known either."""
    spec = record.environment.get("workload.spec")
    arrival = spec.get("arrival") if isinstance(spec, Mapping) else None
    if not isinstance(arrival, Mapping) or not issubclass(ARRIVALS.get(str(arrival.get("kind")), object), RateProfile):
        return None
    try:
        process = make_arrival(arrival)
    except (ValueError, TypeError, OverflowError):
        return None
    assert isinstance(process, RateProfile)
    n = len(o.t_sched)
    if not o.started or not n or math.isnan(last := float(o.t_sched.max())):
        return None
    # On the clock of the process arrivals are a Poisson process of rate 1: the n-th is at n, give or take its root.
    return process.expected if abs(process.expected(last / 1e9) - n) <= _FARTHEST * math.sqrt(n) else None


def wave(expected: Expected, start_s: float, end_s: float, over_s: float) -> tuple[tuple[float, float], ...]:
    """Lowest and highest planned rate within a stretch of a run, each as requests/s and the moment in s.

    Rates are averages with triangular weights, falling to nothing ``over_s`` beside the moment: two moving averages one
    after the other. One alone lets a period through or not by how its length divides ``over_s``; of two, a swing much
    shorter than ``over_s`` is gone whatever its phase, and a longer one stays (a rate that is all on or off for equal
    times moves by a fifth from a period of 1.3 ``over_s`` on).

    Args:
        over_s: at most half of the stretch.
    """
    step = over_s / _STEPS
    steps = int((end_s - start_s) / step + 1e-6)
    rates = np.diff([expected(start_s + step * k) for k in range(steps + 1)]) / step
    box = np.ones(_STEPS) / _STEPS
    means = np.convolve(rates, np.convolve(box, box), "valid")
    lowest, highest = int(means.argmin()), int(means.argmax())
    return tuple((float(means[k]), start_s + over_s + step * (k - 0.5)) for k in (lowest, highest))
