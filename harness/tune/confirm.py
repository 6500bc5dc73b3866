"""The candidate against the baseline on the engine itself, with repeats, until the gain is sure or inside the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.analysis.student import two_sided_quantile
from harness.capacity.search import TOLERANCE
from harness.tune.space import Retreat, changes, retreat

MIN_PAIRS = 3
"""Pairs before anything is concluded."""

OUT_OF_MEMORY = ("oom_load", "oom_prefill", "oom_decode", "cache_exhausted")


@dataclass(frozen=True)
class Measured:
    """One run on the engine.

    Attributes:
        value: what is maximised, None if the run gave none.
        slo_met: whether it kept the SLO.
        shortage: how memory ran out or was short (an outcome, or "offload surge"), None if it did not.
        error: why it failed, None if it did not.
    """

    value: float | None
    slo_met: bool
    shortage: str | None = None
    error: str | None = None


Measure = Callable[[Mapping[str, Any], int], Measured]
"""Runs settings (what differs from the baseline) as a repeat."""


@dataclass
class Confirmation:
    """What the engine said.

    Attributes:
        verdict: better, indistinguishable, worse, breaks_slo or failed.
        settings: what was confirmed in the end, after any retreats; the baseline's values unless better.
        ratios: candidate / baseline by pair, of the last settings; noise: baseline / baseline likewise.
        low, high: 95 % interval of the mean ratio.
        retreats: variables that went back to the baseline.
        reason: in a sentence.
    """

    verdict: str
    settings: dict[str, Any]
    ratios: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    low: float | None = None
    high: float | None = None
    retreats: list[Retreat] = field(default_factory=list)
    reason: str = ""


def confirm(
    candidate: Mapping[str, Any], base: Mapping[str, Any], order: Sequence[str], measure: Measure, repeats: int
) -> Confirmation:
    """Measure baseline, candidate and baseline again, up to ``repeats`` times.

    It stops when the interval of the gain is clear of the noise floor (how far the baseline is from itself) and of what
    the search leaves open, or lies within the larger of them. If memory runs out, the variable that was changed last
    goes back to the baseline and the rest is begun anew (M-fail-02).

    Args:
        order: names of the variables in the order in which they were changed.
    """
    settings, retreats = dict(candidate), list[Retreat]()
    while True:
        found, shortage = _pairs(settings, base, measure, repeats)
        found.retreats = retreats
        if shortage is None:
            return found
        back = retreat(settings, base, order)
        if back is None:
            found.verdict, found.settings = "failed", dict(base)
            found.reason = f"the baseline itself runs out of memory ({shortage})"
            return found
        retreats = [*retreats, back]
        settings = back.settings
        if not changes(settings, base):
            reason = f"every change ran out of memory; the last was {back.variable}={back.given_up} ({shortage})"
            return Confirmation("failed", dict(base), retreats=retreats, reason=reason)


def _pairs(
    settings: dict[str, Any], base: Mapping[str, Any], measure: Measure, repeats: int
) -> tuple[Confirmation, str | None]:
    """Pairs of runs of one setting, and how memory ran out, if it did."""
    changed = changes(settings, base)
    found = Confirmation("indistinguishable", dict(base))
    if not changed:
        found.reason = "the baseline is the best that the simulator found: nothing to confirm"
        return found, None
    for repeat in range(repeats):
        runs = [measure(which, repeat) for which in ({}, changed, {})]
        if short := runs[1].shortage:
            return found, short
        if broken := next((r.error or "no value" for r in runs if r.value is None), None):
            found.verdict, found.reason = "failed", f"a run failed: {broken}"
            return found, None
        if not runs[1].slo_met:
            found.verdict, found.reason = "breaks_slo", "measured, it does not keep the SLO"
            return found, None
        first, value, second = (float(r.value or 0.0) for r in runs)
        middle = math.sqrt(first * second)
        if middle <= 0 or value <= 0:
            found.verdict, found.reason = "failed", "a run answered nothing within the SLO: no ratio can be taken"
            return found, None
        found.ratios.append(value / middle)
        found.noise.append(second / first)
        if len(found.ratios) >= MIN_PAIRS and _decided(found, settings, base):
            return found, None
    _conclude(found, settings, base)
    return found, None


def _decided(found: Confirmation, settings: dict[str, Any], base: Mapping[str, Any]) -> bool:
    floor = least_difference(found)
    _conclude(found, settings, base)
    inside = found.low is not None and found.high is not None and -floor < found.low and found.high < floor
    return found.verdict in ("better", "worse") or inside


def _conclude(found: Confirmation, settings: dict[str, Any], base: Mapping[str, Any]) -> None:
    """Interval and verdict from the pairs so far."""
    floor, least = noise_floor(found), least_difference(found)
    logs = [math.log(r) for r in found.ratios]
    mean = statistics.fmean(logs)
    if len(logs) > 1:
        half = two_sided_quantile(0.05, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        found.low, found.high = math.exp(mean - half) - 1, math.exp(mean + half) - 1
    gain = math.exp(mean) - 1
    shown = f"{gain:+.1%} over {len(logs)} pairs, noise floor {floor:.1%}"
    if found.low is None or found.high is None:
        found.reason = f"{shown}: one pair decides nothing"
        return
    shown = f"{gain:+.1%} (95 % interval {found.low:+.1%} to {found.high:+.1%}), noise floor {floor:.1%}"
    if found.low > 0 and gain > least:
        found.verdict, found.settings = "better", dict(settings)
    elif found.high < 0 and -gain > least:
        found.verdict = "worse"
    else:
        found.verdict = "indistinguishable"
        if floor < abs(gain) <= least:
            shown = f"{shown}; less than {least:.0%} is no reason to change anything"
    found.reason = shown


def noise_floor(found: Confirmation) -> float:
    """Largest difference of the baseline to itself, as a share."""
    return max((abs(r - 1) for r in found.noise), default=0.0)


def least_difference(found: Confirmation) -> float:
    """Below it nothing is concluded: the noise floor, at least what cannot be told apart in the search either."""
    return max(TOLERANCE, noise_floor(found))
