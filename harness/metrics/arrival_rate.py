"""Whether the rate of arrivals changes within a stretch of a run: by what was sent, and by what was planned."""

from __future__ import annotations

import numpy as np

from harness.metrics.observations import FloatArray, Observations
from harness.metrics.planned_arrivals import Expected, wave

STRETCHES = 8
"""Equal stretches of the window whose rates of arrivals are compared, each of as many pieces: 64 in all. Fewer hide a
swing in pieces that hold half of it, and a wave of two stretches altogether."""

LEAST_CHANGE = 0.2
"""A change of the mean load below a fifth is none that matters, however significant."""

DEVIATIONS = 2.5
"""Standard deviations of what a rate or a load that stands still shows, beyond which it changes."""

BINS = 64
"""Equal stretches over which the requests in flight are averaged, and the most in which arrivals are counted."""


def dispersion(o: Observations) -> float:
    """Variance over mean of the arrivals in stretches of a mean life, at least the 1 of a Poisson process.

    Bursts within a life are what the number in flight holds of them. The line through the counts is taken out: a rate
    that climbs is no noise, and would hide its own growth.
    """
    sent = np.sort(o.t_submit[~np.isnan(o.t_submit)])
    lives = (o.t_done - o.t_submit)[~np.isnan(o.t_done - o.t_submit)]
    span = float(sent[-1] - sent[0])
    bins = int(np.clip(span / float(lives.mean()) if len(lives) and lives.mean() > 0 else BINS, 8, BINS))
    counts = np.histogram(sent, bins)[0]
    x = np.arange(bins)
    rest = counts - np.polyval(np.polyfit(x, counts, 1), x)
    return max(1.0, float((rest**2).sum() / (bins - 2) / counts.mean()))


def rate_trend(
    o: Observations, start_ns: float, end_ns: float, deviations: float = DEVIATIONS, least: float = LEAST_CHANGE
) -> str | None:
    """How the rate of arrivals climbs or falls through a stretch, in words; None if it does not.

    Laplace's test: the mean moment of the arrivals lies beside the middle by more ``deviations`` than chance has it,
    with the dispersion of these arrivals; and one half of the stretch gets fewer than the other, by more than the share
    ``least``.
    """
    sent = o.t_submit[(o.t_submit >= start_ns) & (o.t_submit < end_ns)]
    if len(sent) < 2:
        return None
    at = (sent - start_ns) / (end_ns - start_ns)
    beside = abs(float(at.mean()) - 0.5) * np.sqrt(12 * len(at) / dispersion(o))
    halves = np.histogram(at, 2, (0.0, 1.0))[0]
    if beside <= deviations or abs(int(halves[1]) - int(halves[0])) <= least * halves.max():
        return None
    first, second = halves / ((end_ns - start_ns) / 2e9)
    return f"{first:.3g} requests/s were sent in the first half of it and {second:.3g}/s in the second"


def rate_swing(
    o: Observations, start_ns: float, end_ns: float, deviations: float = DEVIATIONS, least: float = LEAST_CHANGE
) -> str | None:
    """How the rate of arrivals differs between the stretches of a window, in words; None if it does not.

    One-way analysis of variance: the counts of :data:`STRETCHES` stretches vary by more ``deviations`` than the
    counts in their short pieces, whose variance (at least a Poisson process's) holds bursts and waves that are short
    beside a stretch; and the lowest rate lies below the highest by more than the share ``least``.
    """
    pieces = np.histogram(o.t_submit, STRETCHES * STRETCHES, (start_ns, end_ns))[0].astype(np.float64)
    return _swing(pieces, end_ns - start_ns, deviations, least, least_variance=float(pieces.mean()), said="were sent")


def planned_swing(expected: Expected, start_ns: float, end_ns: float) -> str | None:
    """The same of the arrivals that were planned, which have no noise: what is known to change needs no proof.

    What varies inside the stretches is no noise there but the plan itself, so it excuses nothing: averaged over a
    stretch the planned rate must stay within the share :data:`LEAST_CHANGE` (:func:`wave`). Only a step at the very
    edge of the window, which such averages hardly reach, is told by the variances.

    Args:
        expected: mean number of requests due in the first so many seconds.
    """
    edges = np.linspace(start_ns, end_ns, STRETCHES * STRETCHES + 1) / 1e9
    pieces = np.diff([expected(float(t)) for t in edges])
    # A rate without any change inside a stretch has no variance there to compare with.
    least_variance = 1e-12 * float(pieces.mean()) ** 2
    said = "were planned"
    if moved := _swing(pieces, end_ns - start_ns, DEVIATIONS, LEAST_CHANGE, least_variance, said):
        return moved
    (low, low_at), (high, high_at) = wave(expected, start_ns / 1e9, end_ns / 1e9, (end_ns - start_ns) / 1e9 / STRETCHES)
    if high - low <= LEAST_CHANGE * high:
        return None
    return f"{low:.3g} requests/s {said} around second {low_at:.4g} of the run and {high:.3g}/s around {high_at:.4g}"


def _swing(
    pieces: FloatArray, length_ns: float, deviations: float, least: float, least_variance: float, said: str
) -> str | None:
    """How the stretches of a window differ by their pieces' counts, in words; None if they do not."""
    pieces = pieces.reshape(STRETCHES, STRETCHES)
    counts = pieces.sum(axis=1)
    lowest, highest = int(counts.argmin()), int(counts.argmax())
    if counts[highest] - counts[lowest] <= least * counts[highest]:
        return None
    within = max(float(pieces.var(axis=1, ddof=1).mean()), least_variance)
    ratio = float(counts.var(ddof=1)) / STRETCHES / within
    # Paulson: the cube root of the ratio, with 7 and 56 degrees of freedom, as a standard normal deviation.
    between, inside = 2 / (9 * (STRETCHES - 1)), 2 / (9 * STRETCHES * (STRETCHES - 1))
    beyond = ((1 - inside) * np.cbrt(ratio) - (1 - between)) / np.sqrt(between + inside * np.cbrt(ratio) ** 2)
    if beyond <= deviations:
        return None
    low, high = counts[[lowest, highest]] / (length_ns / 1e9 / STRETCHES)
    return f"{low:.3g} requests/s {said} in part {lowest + 1} of its {STRETCHES} and {high:.3g}/s in part {highest + 1}"
