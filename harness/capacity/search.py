"""The largest rate under an SLO: bracket it, then bisect, with the same requests at every rate.

A search looks many times, and one false verdict would decide it. So neither verdict rests on a trial too short for it:
a rate that keeps the limits is tried again with more requests until the trial would show a pile-up, and a rate that
keeps them but falls behind likewise; if it still does, a trial of twice as many requests, whose second half is new,
has to agree (at a rate that lasts a swing of the number in flight is over by then).
"""

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
from harness.capacity.progress import Tell, tell_nothing
from harness.record import RunRecord
from harness.simulate import EngineSetup, StepTimeModel, simulate
from harness.slo import Slo

LOWEST, HIGHEST = 1e-3, 1e6
"""Rates in requests/s between which a capacity is looked for."""

MOST = 4
"""A trial grows to at most so many times the requests that were asked for."""

TOLERANCE = 0.02
"""Bisection ends when the bracket is so narrow, as a share of the rate."""

NEARBY, AGAIN = 1.1, 1.05
"""Factors of the first step of a bracket where another seed's capacity is known, or this seed's with fewer requests."""

RUNS = 8
"""Runs that a search of one seed takes, more or less: for the time to go."""


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
        confirmed: whether a rate that only falls behind was seen to do so in two trials, of which this is the longer;
            None = nothing of that kind was to be confirmed.
    """

    rate: float
    seed: int
    values: Mapping[str, Any]
    met: bool
    record: RunRecord
    judged: Judged | None = None
    confirmed: bool | None = None

    @property
    def falls_behind(self) -> bool:
        return self.judged is not None and self.judged.falls_behind

    @property
    def only_behind(self) -> bool:
        """Whether nothing but falling behind speaks against the rate."""
        return self.falls_behind and not self.values["slo_broken"] and not (self.judged and self.judged.failed)

    @property
    def why_not(self) -> str | None:
        """What speaks against the rate, in words; None if nothing does."""
        reasons = [str(self.values["slo_broken"])] if self.values["slo_broken"] else []
        if self.judged is not None and self.judged.failed:
            reasons.append("requests failed")
        if self.judged is not None and self.judged.falls_behind:
            reasons.append(f"falls behind: {self.judged.backlog}")
        return "; ".join(reasons) or None

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
    def deciding(self) -> Point:
        """What the seed with the lowest capacity could not carry."""
        return self.broken[self.by_seed.index(min(self.by_seed))]

    @property
    def short(self) -> bool:
        """Whether a run at the capacity was cut short by the bound on the length of a trial."""
        return not all(p.long_enough for p in self.kept)

    @property
    def unconfirmed(self) -> bool:
        """Whether a seed's capacity rests on falling behind in one trial, for lack of requests for a longer one."""
        return any(p.confirmed is False for p in self.broken)


Runner = Callable[[float, int], Point]


def find_capacity(
    load: Load,
    setup: EngineSetup,
    model: StepTimeModel,
    slo: Slo,
    *,
    requests: int,
    seeds: Sequence[int],
    start: float | None = None,
    most: int | None = None,
    tell: Tell = tell_nothing,
) -> Capacity:
    """The largest rate at which ``setup`` keeps ``slo``.

    Args:
        requests: of each run to begin with. A run that breaks no limit but is too short to show whether its rate lasts
            (:mod:`harness.capacity.judge`) is repeated with more of them, up to ``most``, and so are the runs after it.
        seeds: one search each.
        start: a rate to begin at, requests/s; None = half of what ends a second when all requests come at once.
        most: requests of a run at the most, but for one that confirms another; None = :data:`MOST` times ``requests``.
        tell: told of each run before it begins, with its requests and those of the runs to be expected after it.

    Raises:
        NothingMeets: not even one request at a time keeps it.
        ValueError: the SLO limits no percentile of a run.
    """
    if not slo.run_limits:
        raise ValueError("no SLO for a capacity: give limits of a run, e.g. slo.ttft_p95_ms=500 slo.itl_p99_ms=50")
    trials = Trials(load, setup, model, slo, tuple(seeds), requests, MOST * requests if most is None else most, tell)
    factor = 1.2
    if start is None:
        start, factor = trials.guess(), 2.0
    found = search(trials.run, seeds, start, trials.length_of, factor)
    return replace(found, requests=max(trials.length_of(seed) for seed in seeds))


class Trials:
    """Runs rates, with trials as long as a verdict takes: arguments as of :func:`find_capacity`, and ``drawn``, trials
    by seed to begin with."""

    def __init__(
        self,
        load: Load,
        setup: EngineSetup,
        model: StepTimeModel,
        slo: Slo,
        seeds: tuple[int, ...],
        requests: int,
        most: int,
        tell: Tell = tell_nothing,
        drawn: Mapping[int, Trial] | None = None,
    ) -> None:
        self._load, self._setup, self._model, self._slo, self._tell = load, setup, model, slo, tell
        self._seeds, self._length, self._most = seeds, requests, most
        self._trials = dict(drawn or {})
        self._known: dict[tuple[float, int, int], Point] = {}  # by rate, seed and requests
        self._runs = dict.fromkeys(seeds, 0)

    def length_of(self, seed: int) -> int:
        """Requests of the latest trial of a seed; 0 before the first."""
        return len(self._trials[seed].requests) if seed in self._trials else 0

    def guess(self) -> float:
        """A rate to begin at: half of what ends a second when the requests of the first seed come at once."""
        trial = self._load.trial(self._length, self._seeds[0])
        record = simulate(trial.at(HIGHEST), self._setup, self._model)
        seconds = (record.t_end_ns or 0) / 1e9
        return len(trial.requests) / seconds / 2 if seconds else 1.0

    def run(self, rate: float, seed: int) -> Point:
        """Simulate a rate until the trial is long enough for its verdict, or as long as it may be."""
        if self.length_of(seed) < self._length:
            self._trials[seed] = self._load.trial(self._length, seed)
        while True:
            trial = self._trials[seed]
            key = (rate, seed, len(trial.requests))
            if key in self._known:
                return self._known[key]
            point = self._simulate(trial, rate, seed)
            lasting = point.met or point.only_behind
            if lasting and point.judged and not point.long_enough and self._grow(seed, point.judged.wanted):
                continue
            self._known[key] = self._confirm(trial, point) if point.only_behind else point
            return self._known[key]

    def _confirm(self, trial: Trial, point: Point) -> Point:
        """The verdict of two trials on a rate that only falls behind: the longer one, unless there is none."""
        longer = self._load.trial(2 * len(trial.requests), point.seed)
        if len(longer.requests) < 1.5 * len(trial.requests):
            return replace(point, confirmed=False)
        again = self._simulate(longer, point.rate, point.seed)
        return replace(again, confirmed=True) if again.only_behind else again

    def _grow(self, seed: int, wanted: int) -> bool:
        """Make the trials longer, if they may be and there are more requests."""
        if self._length >= self._most:
            return False
        # A little more than it takes, so that the next higher rate does not need a longer one again.
        self._length = min(self._most, max(math.ceil(1.25 * self._length), math.ceil(1.25 * wanted)))
        longer = self._load.trial(self._length, seed)
        if len(longer.requests) <= len(self._trials[seed].requests):
            self._length = self._most
            return False
        self._trials[seed] = longer
        return True

    def _simulate(self, trial: Trial, rate: float, seed: int) -> Point:
        count, at = len(trial.requests), self._seeds.index(seed)
        self._runs[seed] += 1
        left = max(1, RUNS - self._runs[seed]) + RUNS * (len(self._seeds) - at - 1)
        what = f"{count} requests at {rate:.3g}/s (seed {at + 1} of {len(self._seeds)})"
        self._tell(f"simulating {what}", count, left * self._length)
        return run_at(trial, rate, seed, self._setup, self._model, self._slo)


def run_at(trial: Trial, rate: float, seed: int, setup: EngineSetup, model: StepTimeModel, slo: Slo | None) -> Point:
    """Simulate one rate."""
    record = simulate(trial.at(rate), setup, model, np.random.default_rng(seed), slo=slo)
    judged = judge(record)
    met = bool(judged.values["slo_met"]) and not judged.failed and not judged.falls_behind
    return Point(rate, seed, judged.values, met, record, judged)


def search(
    run: Runner,
    seeds: Sequence[int],
    start: float,
    length: Callable[[int], int] = lambda seed: 0,
    factor: float = 2.0,
) -> Capacity:
    """Bracket and bisect for each seed; the bracket of one seed is where the next begins.

    Args:
        length: of the trial of a seed. If it has grown during a search, that is made again near where it ended: rates
            are compared with the same requests.
        factor: of the first step of the first seed's bracket.

    Raises:
        NothingMeets: as :func:`find_capacity`.
    """
    points: list[Point] = []

    def tried(rate: float, seed: int) -> Point:
        point = run(rate, seed)
        if not any(point is other for other in points):
            points.append(point)
        return point

    kept, broken, near = [], [], start
    for seed in seeds:
        before = -1
        while length(seed) != before:
            good, bad = _bracket(tried, seed, near, factor)
            before = length(seed)
            while bad.rate / good.rate > 1 + TOLERANCE:
                middle = tried(math.sqrt(good.rate * bad.rate), seed)
                good, bad = (middle, bad) if middle.met else (good, middle)
            near, factor = good.rate, AGAIN
        kept.append(good)
        broken.append(bad)
        near, factor = good.rate, NEARBY
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
            raise ValueError(
                f"the SLO is kept even when all {len(good.record.requests)} requests of a trial come at once: plan "
                "with a longer workload, or tighten it"
            )
        point = run(rate, seed)
        good, bad = (point, None) if point.met else (good, point)
        factor *= 1.5 if factor < 4 else 1
    return good, bad
