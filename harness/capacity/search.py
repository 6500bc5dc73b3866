"""The largest rate under an SLO: bracket it, then bisect, with the same requests at every rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.analysis.student import two_sided_quantile
from harness.capacity.judge import Judged, judge
from harness.capacity.load import Load, Trial
from harness.capacity.progress import Say, say_nothing
from harness.record import RunRecord
from harness.simulate import EngineSetup, StepTimeModel, simulate
from harness.slo import Slo

LOWEST, HIGHEST = 1e-3, 1e6
"""Rates in requests/s between which a capacity is looked for."""

MOST = 4
"""A trial grows to at most so many times the requests that were asked for."""

TOLERANCE = 0.02
"""Bisection ends when the bracket is so narrow, as a share of the rate."""


class NothingMeets(ValueError):
    """An SLO that no rate keeps: even requests that come one by one are too slow."""


@dataclass(frozen=True)
class Point:
    """One simulated run at one rate.

    Attributes:
        values: its row of ``runs``, by column, of the requests that came after it had filled.
        met: whether it kept the SLO, answered every request and kept up with its arrivals.
        record: the run itself.
        judged: what it shows beside.
    """

    rate: float
    seed: int
    values: Mapping[str, Any]
    met: bool
    record: RunRecord
    judged: Judged | None = None

    @property
    def falls_behind(self) -> bool:
        return self.judged is not None and self.judged.falls_behind

    @property
    def long_enough(self) -> bool:
        """Whether the run is so long that what it shows lasts."""
        return self.judged is None or self.judged.wanted <= len(self.record.requests)


@dataclass(frozen=True)
class Capacity:
    """The largest rate under the SLO.

    Attributes:
        rate: mean over the seeds of the highest rate that kept the SLO, requests/s.
        low, high: 95 % interval over the seeds (Student's t), what bisection leaves open included; None of one seed.
        by_seed: what each seed found.
        kept, broken: of each seed, the highest run that kept the SLO and the lowest that did not.
        points: every run, in order.
        requests: of the longest trial.
    """

    rate: float
    low: float | None
    high: float | None
    by_seed: tuple[float, ...]
    kept: tuple[Point, ...]
    broken: tuple[Point, ...]
    points: tuple[Point, ...]
    requests: int = 0

    @property
    def sure(self) -> float:
        """Rate to count GPUs by: the lower end of the interval, or what the worst seed found if that is less. 0 if the
        seeds differ so much that the interval reaches down to nothing."""
        worst = min(self.by_seed)
        return worst if self.low is None else min(self.low, worst)

    @property
    def short(self) -> bool:
        """Whether a run at the capacity was cut short by the bound on the length of a trial."""
        return not all(p.long_enough for p in self.kept)


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
    most: int | None = None,
    say: Say = say_nothing,
) -> Capacity:
    """The largest rate at which ``setup`` keeps ``slo``.

    Args:
        requests: of each run to begin with. A run that keeps the SLO but is too short to show that it lasts
            (:mod:`harness.capacity.judge`) is repeated with more of them, up to ``most``, and so are the runs after it.
        seeds: one search each.
        start: a rate to begin at, requests/s.
        most: requests of a run at the most; None = :data:`MOST` times ``requests``.
        say: told of each run before it begins.

    Raises:
        NothingMeets: not even one request at a time keeps it.
        ValueError: the SLO limits no percentile of a run.
    """
    if not slo.run_limits:
        raise ValueError("no SLO for a capacity: give limits of a run, e.g. slo.ttft_p95_ms=500 slo.itl_p99_ms=50")
    bound = MOST * requests if most is None else most
    length, trials = requests, dict[int, Trial]()

    def run(rate: float, seed: int) -> Point:
        nonlocal length
        while True:
            if seed not in trials:
                trials[seed] = load.trial(length, seed)
            trial = trials[seed]
            count = len(trial.requests)
            say(f"simulating {count} requests at {rate:.3g}/s (seed {list(seeds).index(seed) + 1} of {len(seeds)})")
            point = run_at(trial, rate, seed, setup, model, slo)
            if not point.met or point.long_enough or point.judged is None or length >= bound:
                return point
            # A little more than it takes, so that the next higher rate does not need a longer one again.
            length = min(bound, max(math.ceil(1.25 * length), math.ceil(1.25 * point.judged.wanted)))
            longer = load.trial(length, seed)
            if len(longer.requests) <= count:  # there are no more
                length = bound
                return point
            trials[seed] = longer

    found = search(run, seeds, start, lambda seed: len(trials[seed].requests) if seed in trials else 0)
    return replace(found, requests=max(len(trial.requests) for trial in trials.values()))


def run_at(trial: Trial, rate: float, seed: int, setup: EngineSetup, model: StepTimeModel, slo: Slo | None) -> Point:
    """Simulate one rate."""
    record = simulate(trial.at(rate), setup, model, np.random.default_rng(seed), slo=slo)
    judged = judge(record)
    met = bool(judged.values["slo_met"]) and not judged.failed and not judged.falls_behind
    return Point(rate, seed, judged.values, met, record, judged)


def search(run: Runner, seeds: Sequence[int], start: float, length: Callable[[int], int] = lambda seed: 0) -> Capacity:
    """Bracket and bisect for each seed; the bracket of one seed is where the next begins.

    Args:
        length: of the trial of a seed. If it has grown during a search, that is made again near where it ended: rates
            are compared with the same requests.

    Raises:
        NothingMeets: as :func:`find_capacity`.
    """
    points: list[Point] = []

    def tried(rate: float, seed: int) -> Point:
        points.append(run(rate, seed))
        return points[-1]

    kept, broken, near = [], [], start
    for seed in seeds:
        before, factor = -1, 2.0 if near == 1.0 else 1.2
        while length(seed) != before:
            good, bad = _bracket(tried, seed, near, factor)
            before = length(seed)
            while bad.rate / good.rate > 1 + TOLERANCE:
                middle = tried(math.sqrt(good.rate * bad.rate), seed)
                good, bad = (middle, bad) if middle.met else (good, middle)
            near, factor = good.rate, 1.05
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


def _bracket(run: Runner, seed: int, start: float, first: float) -> tuple[Point, Point]:
    """A rate that keeps the SLO and a higher one that does not, by growing steps from ``start``; ``first`` is the
    factor of the first."""
    point = run(start, seed)
    good, bad = (point, None) if point.met else (None, point)
    factor = first
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
    factor = first
    while bad is None:
        rate = good.rate * factor
        if rate > HIGHEST:
            raise ValueError(f"the SLO is kept at {good.rate:g} requests/s: it limits nothing here; tighten it")
        point = run(rate, seed)
        good, bad = (point, None) if point.met else (good, point)
        factor *= 1.5 if factor < 4 else 1
    return good, bad
