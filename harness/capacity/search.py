"""The largest rate under an SLO: bracket it, then bisect, with the same requests at every rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.analysis.student import two_sided_quantile
from harness.capacity.load import Load, Trial
from harness.capacity.progress import Say, say_nothing
from harness.metrics import run_values
from harness.record import RunRecord
from harness.simulate import EngineSetup, StepTimeModel, simulate
from harness.slo import Slo

LOWEST, HIGHEST = 1e-3, 1e6
"""Rates in requests/s between which a capacity is looked for."""

TOLERANCE = 0.02
"""Bisection ends when the bracket is so narrow, as a share of the rate."""


class NothingMeets(ValueError):
    """An SLO that no rate keeps: even requests that come one by one are too slow."""


@dataclass(frozen=True)
class Point:
    """One simulated run at one rate.

    Attributes:
        values: its row of ``runs``, by column.
        met: whether it kept the SLO, answered every request and kept up with its arrivals.
        record: the run itself.
    """

    rate: float
    seed: int
    values: dict[str, Any]
    met: bool
    record: RunRecord


@dataclass(frozen=True)
class Capacity:
    """The largest rate under the SLO.

    Attributes:
        rate: mean over the seeds of the highest rate that kept the SLO, requests/s.
        low, high: 95 % interval over the seeds (Student's t), what bisection leaves open included; None of one seed.
        by_seed: what each seed found.
        kept, broken: of each seed, the highest run that kept the SLO and the lowest that did not.
        points: every run, in order.
    """

    rate: float
    low: float | None
    high: float | None
    by_seed: tuple[float, ...]
    kept: tuple[Point, ...]
    broken: tuple[Point, ...]
    points: tuple[Point, ...]

    @property
    def sure(self) -> float:
        """Rate to count GPUs by: the lower end of the interval, or what the worst seed found if that is more. Of few
        seeds that differ much, the interval reaches below anything that was seen."""
        worst = min(self.by_seed)
        return worst if self.low is None else max(self.low, worst)


Runner = Callable[[float, int], Point]


def find_capacity(
    load: Load,
    setup: EngineSetup,
    model: StepTimeModel,
    slo: Slo,
    *,
    requests: int,
    seeds: Sequence[int],
    start: float = 1.0,
    say: Say = say_nothing,
) -> Capacity:
    """The largest rate at which ``setup`` keeps ``slo``.

    Args:
        requests: of each run; more make queues that grow too slowly to see rarer.
        seeds: one search each.
        start: a rate to begin at, requests/s.
        say: told of each run before it begins.

    Raises:
        NothingMeets: not even one request at a time keeps it.
        ValueError: the SLO limits no percentile of a run.
    """
    if not slo.run_limits:
        raise ValueError("no SLO for a capacity: give limits of a run, e.g. slo.ttft_p95_ms=500 slo.itl_p99_ms=50")
    trials = {seed: load.trial(requests, seed) for seed in seeds}

    def run(rate: float, seed: int) -> Point:
        say(f"simulating {requests} requests at {rate:.3g}/s (seed {list(seeds).index(seed) + 1} of {len(seeds)})")
        return run_at(trials[seed], rate, seed, setup, model, slo)

    return search(run, seeds, start)


def run_at(trial: Trial, rate: float, seed: int, setup: EngineSetup, model: StepTimeModel, slo: Slo | None) -> Point:
    """Simulate one rate."""
    record = simulate(trial.at(rate), setup, model, np.random.default_rng(seed), slo=slo)
    values = run_values(record)
    met = bool(values["slo_met"]) and not values["n_failed"] and not falls_behind(record)
    return Point(rate, seed, values, met, record)


def falls_behind(record: RunRecord) -> bool:
    """Whether requests still wait when the last one has come: the second half of them was begun later and later.

    Told from the wait for a place: its median over the last quarter of the requests is above a tenth of the time that
    they were sent in, and more than twice that of the quarter before the middle.
    """
    waits = [
        (r.t_admit_ns - r.t_sched_ns) / 1e9
        for r in record.requests
        if r.t_admit_ns is not None and r.t_sched_ns is not None
    ]
    if len(waits) < 40:
        return False
    quarter = len(waits) // 4
    due = [r.t_sched_ns for r in record.requests if r.t_sched_ns is not None]
    sent_s = (max(due) - min(due)) / 1e9
    last, before = statistics.median(waits[-quarter:]), statistics.median(waits[quarter : 2 * quarter])
    return last > 0.1 * sent_s and last > 2 * before


def search(run: Runner, seeds: Sequence[int], start: float) -> Capacity:
    """Bracket and bisect for each seed; the bracket of one seed is where the next begins.

    Raises:
        NothingMeets: as :func:`find_capacity`.
    """
    points: list[Point] = []

    def tried(rate: float, seed: int) -> Point:
        points.append(run(rate, seed))
        return points[-1]

    kept, broken, near = [], [], start
    for seed in seeds:
        good, bad = _bracket(tried, seed, near)
        while bad.rate / good.rate > 1 + TOLERANCE:
            middle = tried(math.sqrt(good.rate * bad.rate), seed)
            good, bad = (middle, bad) if middle.met else (good, middle)
        kept.append(good)
        broken.append(bad)
        near = good.rate
    rates = tuple(p.rate for p in kept)
    mean = statistics.fmean(rates)
    low = high = None
    if len(rates) > 1:
        half = two_sided_quantile(0.05, len(rates) - 1) * statistics.stdev(rates) / math.sqrt(len(rates))
        low, high = max(0.0, mean - half), statistics.fmean(p.rate for p in broken) + half
    return Capacity(mean, low, high, rates, tuple(kept), tuple(broken), tuple(points))


def _bracket(run: Runner, seed: int, start: float) -> tuple[Point, Point]:
    """A rate that keeps the SLO and a higher one that does not, by steps of 2 that begin small around ``start``."""
    point = run(start, seed)
    good, bad = (point, None) if point.met else (None, point)
    factor = 1.2 if start != 1.0 else 2.0
    while good is None:
        assert bad is not None
        rate = bad.rate / factor
        if rate < LOWEST:
            raise NothingMeets(
                f"no rate keeps the SLO: requests that come one by one already give {bad.values['slo_broken']}"
            )
        point = run(rate, seed)
        good, bad = (point, bad) if point.met else (None, point)
        factor *= 2 if factor < 32 else 1
    factor = 1.2 if start != 1.0 else 2.0
    while bad is None:
        rate = good.rate * factor
        if rate > HIGHEST:
            raise ValueError(f"the SLO is kept at {good.rate:g} requests/s: it limits nothing here; tighten it")
        point = run(rate, seed)
        good, bad = (point, None) if point.met else (good, point)
        factor *= 1.5 if factor < 4 else 1
    return good, bad
