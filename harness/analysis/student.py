"""Student's t for whole degrees of freedom, by its finite series: exact, and no library is needed for it.

Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
"""

from __future__ import annotations

import math


def two_sided_p(t: float, degrees: int) -> float:
    """Probability of a value at least as far from 0 as ``t``.

    Raises:
        ValueError: fewer than one degree of freedom.
    """
    if degrees < 1:
        raise ValueError(f"Student's t has at least one degree of freedom, got {degrees}")
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(degrees))
    cos_squared = math.cos(angle) ** 2
    odd = degrees % 2
    # Terms of 1 + (1/2) cos^2 + (1*3)/(2*4) cos^4 + ... for even degrees, 1 + (2/3) cos^2 + ... for odd ones.
    term, series = 1.0, 1.0
    for k in range(1, (degrees - odd) // 2):
        term *= (2 * k if odd else 2 * k - 1) / (2 * k + 1 if odd else 2 * k) * cos_squared
        series += term
    if not odd:
        within = math.sin(angle) * series
    elif degrees == 1:
        within = 2 * angle / math.pi
    else:
        within = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * series)
    return max(0.0, 1.0 - within)


def two_sided_quantile(p: float, degrees: int) -> float:
    """The positive value with :func:`two_sided_p` equal to ``p``, by bisection.

    Raises:
        ValueError: ``p`` is not between 0 and 1, or fewer than one degree of freedom.
    """
    if not 0 < p < 1:
        raise ValueError(f"a probability between 0 and 1 is needed, got {p}")
    low, high = 0.0, 1.0
    while two_sided_p(high, degrees) > p:
        low, high = high, high * 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, degrees) > p else (low, middle)
    return (low + high) / 2
