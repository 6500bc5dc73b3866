"""The rate of arrivals that a run was planned with, where its arrival process says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from harness.metrics.observations import Observations
from harness.record import RunRecord
from workloads.arrivals import ARRIVALS, RateProfile
from workloads.config import make_arrival

Expected = Callable[[float], float]
"""Mean number of requests due in the first so many seconds of a run."""

_FARTHEST = 4.0
"""Standard deviations between the requests of a run and the mean of its process, beyond which it was not its plan."""


def planned_arrivals(record: RunRecord, o: Observations) -> Expected | None:
    """What a run's process expects, of one whose rate changes by itself (:class:`workloads.arrivals.RateProfile`); None
    of any other, and of requests that did not come by it: turns of sessions, or a workload replayed at another rate."""
    spec = record.environment.get("workload.spec")
    arrival = spec.get("arrival") if isinstance(spec, Mapping) else None
    if not isinstance(arrival, Mapping) or not issubclass(ARRIVALS.get(str(arrival.get("kind")), object), RateProfile):
        return None
    process = make_arrival(arrival)
    assert isinstance(process, RateProfile)
    n = len(o.t_sched)
    if not o.started or not n or math.isnan(last := float(o.t_sched.max())):
        return None
    # On the clock of the process arrivals are a Poisson process of rate 1: the n-th is at n, give or take its root.
    return process.expected if abs(process.expected(last / 1e9) - n) <= _FARTHEST * math.sqrt(n) else None
