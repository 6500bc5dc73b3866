"""How much larger one arm is than another, from runs that stand side by side in blocks.

The replicate is the run: one ratio a block. Their geometric mean is the estimate; its interval is an *expanded
percentile bootstrap* over blocks of the mean log ratio: resampled blocks, with the percentiles moved outwards so that
the interval is as wide as Student's t makes it for so few blocks (plain percentiles are too narrow by
sqrt((n - 1) / n) and take the spread for known). It cannot leave the range of the pairs, which holds the middle of
their distribution with a probability of 1 - 2^(1 - n) only: 75 % for three pairs, 88 % for four. So there is none below
:data:`FEWEST_PAIRS`. The p value is that of the paired t test on the log ratios.

Source: Hesterberg, What Teachers Should Know About the Bootstrap, The American Statistician 69 (2015), section 4.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from harness.analysis.student import two_sided_p, two_sided_quantile

FloatArray = NDArray[np.float64]

FEWEST_PAIRS = 5
"""With fewer pairs their range is all that can be told of how sure a ratio is."""
RESAMPLES = 10_000
RESAMPLING_SEED = 20_231_116
"""Fixed, so that the same tables give the same report."""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """One metric of one arm over that of another, pair by pair.

    Attributes:
        n: pairs.
        ratio: geometric mean of the pairs' ratios.
        smallest, largest: range of the pairs' ratios.
        low, high: the interval; None for fewer than :data:`FEWEST_PAIRS`.
        p: of "the two arms are equal"; None for fewer than two pairs.
    """

    n: int
    ratio: float
    smallest: float
    largest: float
    low: float | None
    high: float | None
    p: float | None


def paired_ratio(values: Sequence[float], to: Sequence[float], confidence: float = 0.95) -> PairedRatio:
    """``values`` over ``to``, paired by index.

    Raises:
        ValueError: no pairs, unequal lengths, or a value that is not above 0 (it has no ratio).
    """
    if len(values) != len(to) or not len(values):
        raise ValueError(f"pairs are needed, got {len(values)} values and {len(to)} to compare them with")
    own, other = np.asarray(values, dtype=np.float64), np.asarray(to, dtype=np.float64)
    if not (np.isfinite(own).all() and np.isfinite(other).all() and (own > 0).all() and (other > 0).all()):
        raise ValueError("a ratio needs finite values above 0")
    logs = np.log(own) - np.log(other)
    low, high = _interval(logs, confidence) if len(logs) >= FEWEST_PAIRS else (None, None)
    return PairedRatio(
        n=len(logs),
        ratio=math.exp(logs.mean()),
        smallest=math.exp(logs.min()),
        largest=math.exp(logs.max()),
        low=None if low is None else math.exp(low),
        high=None if high is None else math.exp(high),
        p=_p(logs) if len(logs) > 1 else None,
    )


def _interval(logs: FloatArray, confidence: float) -> tuple[float, float]:
    tail = _expanded_tail(len(logs), confidence)
    means = _weights(len(logs)) @ logs
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)


@lru_cache(maxsize=64)
def _expanded_tail(n: int, confidence: float) -> float:
    """Share of the resamples on each side that lies outside the interval."""
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * two_sided_quantile(1 - confidence, n - 1))


@lru_cache(maxsize=16)
def _weights(n: int) -> FloatArray:
    """[resamples, n]: share of each block in each resample."""
    drawn = np.random.default_rng(RESAMPLING_SEED).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return drawn / n


def _p(logs: FloatArray) -> float:
    mean, spread = float(logs.mean()), float(logs.std(ddof=1))
    # Equal up to rounding in every block: no spread to test against, and then the mean decides by itself.
    if spread <= 1e-12 * max(1.0, abs(mean)):
        return 1.0 if abs(mean) <= 1e-12 else 0.0
    return two_sided_p(mean / (spread / math.sqrt(len(logs))), len(logs) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for having asked so many questions, in the order given.

    The k-th smallest of m is multiplied by m - k (k from 0) and never below one before it.
    Source: Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics 6 (1979).
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected
