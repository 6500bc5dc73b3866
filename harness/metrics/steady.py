"""The steady part of a run: MSER-5 finds where the filling of the queue ends, CUSUM whether it then stands still.

Timeline of a run with staged arrivals::

    requests in flight        _______________
                          ___|               |___
                    _____|                       |____
    time            |  filling  |   window   |  draining |
                    first due   MSER-5       last due

MSER looks at the ranks of the TTFTs (their order statistics), not at the values: a queue that is long for a moment
late in a run would otherwise pull the cut to itself. The window begins where the first kept request was sent, but not
before 95 % of the requests that came first can be over (until then the load can only grow, however constant the TTFT),
and ends with the last one sent: after it the run only drains. Inside it as many must end as are sent, up to noise, and
the rate of arrivals must neither have a trend nor swing: one that rises and falls again has the same mean moment and
as many requests at the end as at the start, and only the counts in stretches show it. A run too short to show it is
judged by its plan (:mod:`harness.metrics.planned_arrivals`), where its process says what rate it has when.
A run whose load never stands still gets a label instead of a window, and no number of it is an average over one.

Sources: White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69 (1997), for
MSER; batches of five after Spratt (1998). Page, "Continuous inspection schemes", Biometrika 41 (1954), for CUSUM; its
limit is that of the Brownian bridge (Kolmogorov). Cox and Lewis, "The Statistical Analysis of Series of Events" (1966),
section 3.3, for Laplace's test of a trend. Fisher, "Statistical Methods for Research Workers" (1925), for the analysis
of variance; Paulson, "An approximate normalization of the analysis of variance distribution", Annals of Mathematical
Statistics 13 (1942), for its ratio in standard deviations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from harness.metrics.arrival_rate import (
    BINS,
    DEVIATIONS,
    LEAST_CHANGE,
    dispersion,
    planned_swing,
    rate_swing,
    rate_trend,
)
from harness.metrics.observations import FloatArray, Observations
from harness.metrics.planned_arrivals import Expected

BATCH = 5
"""Requests averaged before MSER looks at them (MSER-5)."""

FEWEST_REQUESTS = 50
"""Fewer sent requests say nothing about a steady state: ten batches are the least MSER-5 can judge."""

CUSUM_LIMIT = 1.63
"""Largest normalised cumulative sum that chance alone exceeds once in a hundred windows (Kolmogorov, 1 %)."""

FILLED = 95
"""Percentile of the requests' lives after which a run counts as filled."""

DEVIATIONS_OF_A_PART = 1.0
"""The same inside a run whose arrivals have a trend or swing as a whole."""

GROWTH = 1.5
"""A load or TTFT that ends above this multiple of what it was before the middle is a queue that grows: saturated."""


class SteadyState(StrEnum):
    """What the load of a run did."""

    STEADY = "steady"
    SATURATED = "saturated"
    NON_STATIONARY = "non_stationary"
    BURST = "burst"
    TOO_SHORT = "too_short"


@dataclass(frozen=True, slots=True)
class Window:
    """The verdict about a run and, if it is steady, its window in ns after the start of the run, else the reason."""

    state: SteadyState
    start_ns: float | None = None
    end_ns: float | None = None
    reason: str | None = None

    @property
    def seconds(self) -> float | None:
        """Length in s; None without a window."""
        return None if self.start_ns is None or self.end_ns is None else (self.end_ns - self.start_ns) / 1e9

    def holds(self, times_ns: FloatArray) -> np.ndarray:
        """Which of the times lie in it (none without a window)."""
        if self.start_ns is None or self.end_ns is None:
            return np.zeros(len(times_ns), dtype=np.bool_)
        return (times_ns >= self.start_ns) & (times_ns < self.end_ns)


@dataclass(frozen=True, slots=True)
class Growth:
    """Requests sent and ended in a stretch of a run, whose difference is the change of the number in flight.

    Attributes:
        seconds: length of the stretch.
        noise: standard deviation of that difference while the load stands still: the numbers in flight at two moments
            far apart, each with the variance of its mean (Poisson) times the dispersion of the arrivals.
    """

    sent: int
    ended: int
    seconds: float
    noise: float

    @property
    def beyond_noise(self) -> bool:
        return self.sent - self.ended > DEVIATIONS * self.noise

    def moves(self, deviations: float) -> bool:
        """Whether it grows or falls by more than so many deviations."""
        return abs(self.sent - self.ended) > deviations * self.noise

    def __str__(self) -> str:
        return f"{self.sent / self.seconds:.3g} requests/s were sent and {self.ended / self.seconds:.3g}/s ended"


def life_ns(o: Observations, q: float) -> float:
    """Percentile ``q`` of the time from submission to end, ns; infinite if nothing ended."""
    lives = (o.t_done - o.t_submit)[~np.isnan(o.t_done - o.t_submit)]
    return float(np.percentile(lives, q)) if len(lives) else np.inf


def growth(o: Observations, start_ns: float, end_ns: float) -> Growth:
    """Whether more requests were sent than ended in a stretch, and how much of that is noise.

    The number in flight that noise is told from is the mean over the half of the stretch's length that leads up to its
    start and the quarter behind it, at least one: one that grows to the end of the stretch does not excuse itself.
    """
    sent, done = np.sort(o.t_submit[~np.isnan(o.t_submit)]), o.t_done[~np.isnan(o.t_done)]
    quarter = (end_ns - start_ns) / 4
    level = float(in_flight(o, max(float(sent[0]), start_ns - 2 * quarter), start_ns + quarter, bins=1)[0])
    arrived, ended = (int(((times >= start_ns) & (times < end_ns)).sum()) for times in (sent, done))
    noise = float(np.sqrt(2 * max(1.0, level) * dispersion(o)))
    return Growth(arrived, ended, seconds=(end_ns - start_ns) / 1e9, noise=noise)


def mser(series: FloatArray) -> int | None:
    """How many leading values to leave out so that the mean of the others is most certain.

    Args:
        series: [n] in order of time, no NaN.

    Returns:
        a multiple of :data:`BATCH`; None if the best cut lies beyond half of the series, which then never settled, or
        if there are fewer than four batches.
    """
    n = len(series) // BATCH
    if n < 4:
        return None
    means = series[: n * BATCH].reshape(n, BATCH).mean(axis=1)
    kept = np.arange(n, 1, -1)  # batches left after cutting 0, 1, … of them
    totals = np.cumsum(means[::-1])[::-1][: n - 1]
    squares = np.cumsum(means[::-1] ** 2)[::-1][: n - 1]
    # The last cuts keep so few batches that they look certain by chance: MSER's usual guard is the first half.
    error = np.maximum(squares - totals**2 / kept, 0.0) / kept.astype(np.float64) ** 2
    usable = error[: max(n - BATCH, n // 2 + 1)]
    cut = int(np.argmin(usable))
    return cut * BATCH if cut <= n // 2 else None


def in_flight(o: Observations, start_ns: float, end_ns: float, bins: int = BINS) -> FloatArray:
    """[bins] mean number of requests sent and not ended in each equal part of the stretch."""
    edges = np.linspace(start_ns, end_ns, bins + 1)
    sent = ~np.isnan(o.t_submit)
    begins = o.t_submit[sent]
    ends = np.where(np.isnan(o.t_done[sent]), np.inf, o.t_done[sent])

    def integral(times: FloatArray) -> FloatArray:
        """At each edge, the sum over events before it of the time since."""
        ordered = np.sort(times[np.isfinite(times)])
        before = np.searchsorted(ordered, edges)
        sums = np.concatenate(([0.0], np.cumsum(ordered)))
        result: FloatArray = before * edges - sums[before]
        return result

    return np.asarray(np.diff(integral(begins) - integral(ends)) / np.diff(edges), dtype=np.float64)


def change_point(series: FloatArray) -> int | None:
    """Where the mean of a series changes most, if it changes by more than chance and by more than a fifth.

    The neighbours of a queue's length resemble each other, so the sum is normalised by the long-run deviation of an
    AR(1) process fitted to the series without its line (a trend would hide itself in the deviation).

    Args:
        series: [n] in order of time.

    Returns:
        index of the first value after the change; None if the series stands still.
    """
    n = len(series)
    sums = np.cumsum(series - series.mean())[:-1]
    at = int(np.argmax(np.abs(sums))) + 1
    before, after = series[:at].mean(), series[at:].mean()
    if abs(after - before) <= LEAST_CHANGE * max(before, after):
        return None
    x = np.arange(n)
    rest = series - np.polyval(np.polyfit(x, series, 1), x)
    variance = float(rest.var())
    if variance == 0:
        return at
    # Never quite 1: a random walk has no deviation to compare with.
    memory = min(0.9, max(0.0, float((rest[1:] * rest[:-1]).mean()) / variance))
    deviation = np.sqrt(variance * (1 + memory) / (1 - memory))
    return at if np.abs(sums).max() / (deviation * np.sqrt(n)) > CUSUM_LIMIT else None


def steady_window(o: Observations, planned: Expected | None = None) -> Window:
    """The steady part of a run, or why it has none.

    Only requests that were sent count; those that got no first token take part in the load and not in MSER's series.
    If the load changes once, the longer side is taken when it holds at least half of the time and stands still.

    Args:
        planned: arrivals that the run's process expects in its first so many seconds; None = a constant rate, or what
            the process does is not known.
    """
    sent = np.sort(o.t_submit[~np.isnan(o.t_submit)])
    if not o.started or len(sent) < 2:
        return _too_short("fewer than two requests were sent, or when the run began is not known")
    last_end = np.nanmax(np.concatenate((o.t_done, o.t_last, sent)))
    # Everything sent before a tenth of the run has passed: it only ever fills and drains.
    if sent[-1] - sent[0] < 0.1 * (last_end - sent[0]):
        return Window(SteadyState.BURST, reason="all requests were sent within a tenth of the run")
    order = np.argsort(o.t_submit, kind="stable")
    lives = (o.t_done - o.t_submit)[order[: max(1, len(sent) // 4)]]
    # While the first requests are not over, the load can only grow: that is no queue.
    filling = 2 * float(np.nanmedian(lives)) if not np.isnan(lives).all() else np.inf
    if len(sent) < FEWEST_REQUESTS:
        return _too_short(f"{len(sent)} requests were sent, fewer than {FEWEST_REQUESTS}")
    if sent[-1] - sent[0] < filling:
        return _too_short("the requests were sent within two of their lives")
    waits = o.t_first - o.t_submit
    answered = order[~np.isnan(waits[order])]
    cut = mser(_ranks(waits[answered]))
    end = float(sent[-1])
    state = _unsteady(o, float(sent[0]), end, waits[answered])
    if cut is None:
        return Window(state, reason="the times to the first token never settle")
    life = life_ns(o, FILLED)
    filled = sent[np.searchsorted(sent, min(sent[0] + life, end))]
    start = max(float(o.t_submit[answered[cut]]), float(filled))
    if end - start < life:
        if state is SteadyState.SATURATED:
            return Window(state, reason="the queue or the wait in it goes on growing")
        return _too_short(f"after it was filled ({life / 1e9:.3g} s), requests came for {(end - start) / 1e9:.3g} s")
    at = change_point(in_flight(o, start, end))
    window = Window(SteadyState.STEADY, start, end) if at is None else _longer_side(o, start, end, at)
    if window is None or window.start_ns is None or window.end_ns is None:
        return Window(state, reason="the number of requests in flight changes")
    # Of a run whose arrivals climb or swing as a whole a part looks even by chance: it must not show the least of it,
    # unless the plan says of the part itself what it does.
    moves = planned is None and any(test(o, float(sent[0]), end) for test in (rate_trend, rate_swing))
    limits = (DEVIATIONS_OF_A_PART, 0.0) if moves else (DEVIATIONS, LEAST_CHANGE)
    bounds = (window.start_ns, window.end_ns)
    if moved := (
        (None if planned is None else planned_swing(planned, *bounds))
        or rate_trend(o, *bounds, *limits)
        or rate_swing(o, *bounds, *limits)
    ):
        state = _unsteady(o, float(sent[0]), end, waits[answered], more_sent=True)
        return Window(state, reason=f"the rate of arrivals changes within the window: {moved}")
    change = growth(o, window.start_ns, window.end_ns)
    if change.moves(limits[0]):
        how = "grows" if change.sent > change.ended else "falls"
        return _too_short(f"the number of requests in flight still {how}: {change}")
    return window


def _too_short(reason: str) -> Window:
    return Window(SteadyState.TOO_SHORT, reason=reason)


def _ranks(values: FloatArray) -> FloatArray:
    """Mean ranks; values closer than a hundredth of the median share theirs, or constant waits would seem to move."""
    if not len(values):
        return values
    coarse = np.round(values / max(1.0, 0.01 * float(np.median(values))))
    _, place, count = np.unique(coarse, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count + 1) / 2)[place], dtype=np.float64)


def _longer_side(o: Observations, start: float, end: float, at: int) -> Window | None:
    """The longer part beside a change, if it is at least half of the stretch and stands still."""
    edges = np.linspace(start, end, BINS + 1)
    first, last = max(pairwise((0, at, BINS)), key=lambda part: part[1] - part[0])
    if last - first < BINS // 2:
        return None
    inner_start, inner_end = float(edges[first]), float(edges[last])
    if change_point(in_flight(o, inner_start, inner_end)) is not None:
        return None
    return Window(SteadyState.STEADY, inner_start, inner_end)


def _unsteady(o: Observations, start: float, end: float, waits: FloatArray, more_sent: bool = False) -> SteadyState:
    """Saturated if the load or the TTFT goes on growing after the first half, else non-stationary; where more is sent
    the load grows without a queue, and only the TTFT tells."""
    load = ((in_flight(o, start, end), np.mean),)
    for series, reduce in (*(() if more_sent else load), (waits, np.median)):
        quarter = len(series) // 4
        if quarter and reduce(series[-quarter:]) > GROWTH * reduce(series[quarter : 2 * quarter]):
            return SteadyState.SATURATED
    return SteadyState.NON_STATIONARY
