r"""Whether requests pile up in a trial, beyond what a backlog that stays bounded shows.

A rate lasts if the number of requests in the system stays bounded. Two things tell:

- **The queue.** What runs is bounded by places and memory; only those that wait for admission can grow without end. So
  requests sent are compared with requests admitted, from the filling on. Below the capacity hardly anybody waits, and
  there is little noise.
- **All in the system**, sent against ended, for what the queue does not show yet. Their number rises to its level and
  swings around it, and near the capacity both take many stays, since whoever comes makes everybody's steps longer::

    requests in flight            ___/\__/\_     lasts
                          ____----      \/
                     __---
                    /             the second half is judged: the rise is over, or most of it
    time            |    filling     |      judged     |

Beyond the capacity the difference grows with the length of the stretch; the rise and the swings do not. The noise to
tell it from is what independent requests would show (Poisson); for all in the system, who slow each other down, it is
how far their number is seen to swing around its line, if that is more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from harness.metrics.arrival_rate import DEVIATIONS
from harness.metrics.observations import Observations
from harness.metrics.steady import Growth, growth, in_flight

LEAST = 0.02
"""Share of the arrivals that may pile up and still counts as kept up with: what bisection leaves open."""

PILED = 0.1
"""A share of the arrivals that piles up counts against a rate even where it may be noise."""

BINS = 32
"""Equal stretches over which a number of requests is averaged to see how far it swings."""


@dataclass(frozen=True)
class Backlog:
    """What piles up in a trial.

    Attributes:
        queue: requests sent and admitted between the filling and the last request.
        system: requests sent and ended in the second half of the time in which they came.
    """

    queue: Growth
    system: Growth

    @property
    def grows(self) -> bool:
        """Whether more come than the engine can take in or bring to their end."""
        return piles_up(self.queue) or piles_up(self.system)

    def __str__(self) -> str:
        change, verb = (self.queue, "admitted") if piles_up(self.queue) else (self.system, "ended")
        sent, taken = change.sent / change.seconds, change.ended / change.seconds
        return f"{sent:.3g} requests/s sent, {taken:.3g}/s {verb} over {change.seconds:.3g} s"


def backlog(o: Observations, filled_ns: float, last_ns: float) -> Backlog:
    """Of a trial that has filled at ``filled_ns`` and whose last request comes at ``last_ns``."""
    waiting = replace(o, t_done=np.where(np.isnan(o.t_admit), o.t_done, o.t_admit))
    middle = (float(np.nanmin(o.t_sched)) + last_ns) / 2
    return Backlog(growth(waiting, filled_ns, last_ns), _swinging(o, middle, last_ns))


def _swinging(o: Observations, start_ns: float, end_ns: float) -> Growth:
    """Requests that enter and leave in a stretch, with the larger of both noises of their difference."""
    change = growth(o, start_ns, end_ns)
    x, series = np.arange(BINS), in_flight(o, start_ns, end_ns, BINS)
    rest = series - np.polyval(np.polyfit(x, series, 1), x)
    swing = math.sqrt(2 * float((rest**2).sum()) / (BINS - 2))
    return replace(change, noise=max(change.noise, swing))


def piles_up(change: Growth) -> bool:
    """Whether fewer leave than enter. A trial too short to tell is not given the benefit of the doubt where much piles
    up."""
    piled = change.sent - change.ended
    sure = piled > max(DEVIATIONS * change.noise, LEAST * change.sent)
    return sure or piled > max(change.noise, PILED * change.sent)
