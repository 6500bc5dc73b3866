"""From a paired ratio to a verdict, with every threshold stated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.analysis.paired import FEWEST_PAIRS, PairedRatio, holm
from harness.metrics.metric import HIGHER

NEVER_BETTER = "would be better, but is no reason to adopt it"
"""Begins the reason of a verdict that is withheld: of an arm with wrong answers, or with its SLO broken."""


class Verdict(StrEnum):
    """What may be said of one metric of one arm against the baseline."""

    BETTER = "better"
    WORSE = "worse"
    INDISTINGUISHABLE = "indistinguishable"
    CONFOUNDED = "confounded"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a difference is called one.

    Attributes:
        confidence: of the interval of a ratio; 1 - confidence is also the limit of Holm-corrected p values.
        fewest_pairs: with fewer pairs there is no verdict.
        smallest_effect: differences below it, as a share, do not matter to anybody.
    """

    confidence: float = 0.95
    fewest_pairs: int = FEWEST_PAIRS
    smallest_effect: float = 0.01

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence must be at least 0.5 and below 1, got {self.confidence}")
        if self.fewest_pairs < FEWEST_PAIRS:
            raise ValueError(f"fewest_pairs must be at least {FEWEST_PAIRS}, got {self.fewest_pairs}")
        if not 0 <= self.smallest_effect < 1:
            raise ValueError(f"smallest_effect must be between 0 and 1, got {self.smallest_effect}")

    def in_words(self, tests: int) -> str:
        """The rule by which a family of ``tests`` was judged, for the reader."""
        return (
            f"A difference needs at least {self.fewest_pairs} pairs, a {self.confidence:.0%} interval without 1, a "
            f"Holm-corrected p of at most {1 - self.confidence:.2g} over {tests} comparisons, a size of at least "
            f"{self.smallest_effect:.1%} and, where an arm was run against itself (A/A), one beyond that noise floor."
        )


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and why; ``verdict`` is None where none can be given. ``p_holm``: corrected, None without a test."""

    verdict: Verdict | None
    reason: str
    p_holm: float | None


def noise_floor(again: PairedRatio | None, thresholds: Thresholds) -> float | None:
    """Largest difference, as a share, that an arm shows against itself at the stated confidence; None if unknown.

    Args:
        again: an arm's second run in each block over its first (A/A).
    """
    if again is None or again.n < thresholds.fewest_pairs or again.low is None or again.high is None:
        return None
    return math.expm1(max(abs(math.log(again.low)), abs(math.log(again.high))))


def judge(
    ratios: Sequence[PairedRatio],
    better: Sequence[str],
    floors: Sequence[float | None],
    thresholds: Thresholds,
) -> list[Judgement]:
    """Judge a family of ratios together: the more are asked, the more each must show.

    Args:
        better: for each whether a higher or a lower value is better.
        floors: noise floor of each one's metric.
    """
    tested = [i for i, r in enumerate(ratios) if r.p is not None and r.n >= thresholds.fewest_pairs]
    corrected = dict(zip(tested, holm([ratios[i].p or 0.0 for i in tested]), strict=True))
    return [
        _judge(ratio, direction, floor, corrected.get(i), thresholds)
        for i, (ratio, direction, floor) in enumerate(zip(ratios, better, floors, strict=True))
    ]


def withhold(judgement: Judgement, objection: str | None) -> Judgement:
    """``judgement``, but never "better" of an arm that ``objection`` speaks against: it then has no verdict."""
    if objection is None or judgement.verdict != Verdict.BETTER:
        return judgement
    return Judgement(None, f"{NEVER_BETTER}: {objection}", judgement.p_holm)


def _judge(ratio: PairedRatio, better: str, floor: float | None, p: float | None, limits: Thresholds) -> Judgement:
    if p is None or ratio.low is None or ratio.high is None:
        pairs = f"{ratio.n} pair{'s' if ratio.n != 1 else ''}"
        return Judgement(None, f"{pairs}; a verdict needs at least {limits.fewest_pairs}", None)
    size = math.expm1(abs(math.log(ratio.ratio)))
    if ratio.low <= 1 <= ratio.high:
        return Judgement(Verdict.INDISTINGUISHABLE, f"the {limits.confidence:.0%} interval holds 1", p)
    if p > 1 - limits.confidence:
        return Judgement(Verdict.INDISTINGUISHABLE, f"p {p:.2g} after Holm's correction", p)
    if floor is not None and size <= floor:
        return Judgement(Verdict.INDISTINGUISHABLE, f"inside the A/A noise floor of {floor:.1%}", p)
    if size < limits.smallest_effect:
        return Judgement(Verdict.INDISTINGUISHABLE, f"smaller than {limits.smallest_effect:.1%}", p)
    is_better = (ratio.ratio > 1) == (better == HIGHER)
    return Judgement(Verdict.BETTER if is_better else Verdict.WORSE, f"p {p:.2g} after Holm's correction", p)
