"""Latencies and throughput against the offered rate, and throughput against latency."""

from __future__ import annotations

import json
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.report.arms import Arm
from harness.report.plots.figure import (
    INK,
    LINES,
    MARKERS,
    PALETTE,
    annotate_apart,
    from_zero,
    legend_above,
    log_scale,
    look,
    new_figure,
)

_LATENCIES = (("ttft_sched", "TTFT", (50, 95)), ("itl", "ITL", (50, 99)))
_LOG_FROM = 20  # latencies that span this factor are drawn on a logarithmic axis


def latency_vs_rate(arms: Sequence[Arm]) -> tuple[Figure, str] | None:
    """TTFT, ITL and throughput against the offered rate with the SLO's limits; None unless two rates are known.

    Args:
        arms: of one facet and one engine.
    """
    points = sorted(((rate.median, a) for a in arms if (rate := a.spread("offered_request_s"))), key=lambda p: p[0])
    if len({rate for rate, _ in points}) < 2:
        return None
    limits = _limits(arms)
    with look():
        figure, axes = new_figure(6.0, rows=3)
        for ax, (column, name, percentiles) in zip(axes, _LATENCIES, strict=False):
            _latency(ax, points, column, name, percentiles, limits)
        _throughput(axes[2], points)
    caption = (
        "Against the offered rate: time to first token (from the due time), gaps between tokens, requests answered. "
        "Points are medians over repeats, bands their range."
    )
    return figure, caption + (" Dotted: the SLO's limits." if limits else "")


def _latency(
    ax: Axes,
    points: Sequence[tuple[float, Arm]],
    column: str,
    name: str,
    percentiles: Sequence[int],
    limits: dict[str, float],
) -> None:
    seen: list[float] = []
    for i, percentile in enumerate(percentiles):
        known = [(rate, s) for rate, arm in points if (s := arm.spread(f"{column}_p{percentile}_ms"))]
        x, median = [rate for rate, _ in known], [s.median for _, s in known]
        label = f"p{percentile}"
        ax.plot(x, median, LINES[i], marker=MARKERS[i], markersize=4, color=PALETTE[i], label=label)
        ax.fill_between(
            x, [s.low for _, s in known], [s.high for _, s in known], color=PALETTE[i], alpha=0.2, linewidth=0
        )
        seen += median
        limit = limits.get(f"{name.lower()}_p{percentile}_ms")
        if limit is not None:
            ax.axhline(limit, linestyle=":", color=PALETTE[i], linewidth=1.6, label=f"SLO p{percentile} {limit:g} ms")
            seen.append(limit)
    if seen and min(seen) > 0 and max(seen) / min(seen) > _LOG_FROM:
        log_scale(ax, "y")
    else:
        from_zero(ax)
    ax.set_ylabel(f"{name} (ms)")
    legend_above(ax)


def _throughput(ax: Axes, points: Sequence[tuple[float, Arm]]) -> None:
    known = [(rate, s) for rate, arm in points if (s := arm.spread("request_s"))]
    x = [rate for rate, _ in known]
    ax.plot(x, x, ":", color=INK, alpha=0.7, label="as offered")
    ax.plot(x, [s.median for _, s in known], "-", marker="o", markersize=4, color=PALETTE[2], label="answered")
    ax.fill_between(x, [s.low for _, s in known], [s.high for _, s in known], color=PALETTE[2], alpha=0.2, linewidth=0)
    from_zero(ax)
    ax.set_xlim(left=0)
    ax.set_xlabel("offered requests/s")
    ax.set_ylabel("requests/s")
    legend_above(ax)


def _limits(arms: Sequence[Arm]) -> dict[str, float]:
    texts = [text for a in arms for text in a.measured["slo"].dropna()]
    known = json.loads(texts[0]) if texts else {}
    return {name: float(value) for name, value in known.items() if name != "name"}


def pareto(arms: Sequence[Arm]) -> tuple[Figure, str] | None:
    """Throughput against TTFT p95, one point an arm; arms that no other beats in both are joined.

    None for fewer than two arms with both.
    """
    known = [(s.median, r.median, a) for a in arms if (s := a.spread("ttft_p95_ms")) and (r := a.spread("gen_tok_s"))]
    if len(known) < 2:
        return None
    front = pareto_front([(ms, rate) for ms, rate, _ in known])
    with look():
        figure, (ax,) = new_figure(3.0)
        line = sorted((known[k][:2] for k in front), key=lambda p: p[0])
        ax.plot([p[0] for p in line], [p[1] for p in line], "-", color=INK, alpha=0.5, linewidth=1)
        for k, (ms, rate, _) in enumerate(known):
            face = PALETTE[0] if k in front else "none"
            ax.plot(ms, rate, MARKERS[0], color=PALETTE[0], markerfacecolor=face, markersize=6)
        from_zero(ax)
        ax.set_xlim(0, max(ms for ms, *_ in known) * 1.35)  # room for the names
        ax.set_xlabel("TTFT p95 (ms)")
        ax.set_ylabel("generated tokens/s")
        first = sorted(range(len(known)), key=lambda k: k not in front)  # those must have their names
        unnamed = annotate_apart(ax, [(known[k][2].series, known[k][:2]) for k in first])
    caption = (
        "Throughput against latency, medians over repeats: up and to the left is better. Filled and joined: no other "
        "arm is better in both."
    )
    return figure, caption + (f" Without room for a name: {', '.join(unnamed)}." if unnamed else "")


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of (latency, rate) points that no other point beats: none is as fast and as high, and better in one."""
    return {
        i
        for i, (ms, rate) in enumerate(points)
        if not any(m <= ms and r >= rate and (m, r) != (ms, rate) for m, r in points)
    }
