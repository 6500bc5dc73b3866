"""Pictures of a workload before it is run: rate over time, lengths, prefix reuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from harness.report.plots.figure import PALETTE, Plot, from_zero, legend_above, log_scale, look, new_figure, save
from workloads.describe import Description
from workloads.workload import Workload

_BINS = 60


def workload_plots(workload: Workload, described: Description, directory: Path) -> list[Plot]:
    """Draw what there is to see and save each picture as png and svg into ``directory``."""
    drawn = {
        "rate": _rate(workload, described),
        "lengths": _lengths(workload),
        "prefix_reuse": _prefix_reuse(described.prefix_reuse),
    }
    return [
        save(figure, directory, name, caption) for name, found in drawn.items() if found for figure, caption in [found]
    ]


def _rate(workload: Workload, described: Description) -> tuple[Figure, str] | None:
    """Requests and prompt tokens a second over time; None where due times are not known beforehand, or all one."""
    if described.rate_request_s is None:
        return None
    due = np.array([r.due_s for r in workload.requests])
    tokens = np.array([len(r.prompt_ids) for r in workload.requests])
    bins = max(1, min(_BINS, len(due) // 4))
    edges = np.linspace(due[0], due[-1], bins + 1)
    width = edges[1] - edges[0]
    with look():
        figure, (requests_ax, tokens_ax) = new_figure(4.2, rows=2)
        for ax, weights, colour, label in (
            (requests_ax, None, PALETTE[0], "requests / s"),
            (tokens_ax, tokens, PALETTE[2], "prompt tokens / s"),
        ):
            counts, _ = np.histogram(due, edges, weights=weights)
            ax.stairs(counts / width, edges, fill=True, color=colour, alpha=0.35)
            ax.stairs(counts / width, edges, color=colour)
            from_zero(ax)
            ax.set_ylabel(label)
        requests_ax.axhline(described.rate_request_s, color=PALETTE[1], linestyle="--", label="mean")
        legend_above(requests_ax)
        tokens_ax.set_xlabel("s after the start")
    return figure, f"Requests and prompt tokens a second over time, in steps of {width:.3g} s."


def _lengths(workload: Workload) -> tuple[Figure, str]:
    """Histograms of prompt and answer lengths on a common logarithmic axis."""
    series = {
        "prompt": [len(r.prompt_ids) for r in workload.requests],
        "answer": [r.max_new_tokens for r in workload.requests],
    }
    low, high = min(map(min, series.values())), max(map(max, series.values()))
    edges = np.geomspace(low * 0.9, high * 1.1, 1 + max(8, min(40, len(workload) // 2)))
    with look():
        figure, axes = new_figure(4.2, rows=2)
        for ax, (label, lengths), colour in zip(axes, series.items(), PALETTE, strict=False):
            counts, _ = np.histogram(lengths, edges)
            ax.stairs(counts, edges, fill=True, color=colour, alpha=0.35)
            ax.stairs(counts, edges, color=colour)
            for value, style, name in zip(np.percentile(lengths, (50, 95)), ("--", ":"), ("p50", "p95"), strict=True):
                ax.axvline(value, color=colour, linestyle=style, label=f"{label}: {name} {value:,.0f}")
            from_zero(ax)
            ax.set_ylabel("requests")
            log_scale(ax, "x")
            legend_above(ax)
        axes[-1].set_xlabel("tokens")
        axes[-1].set_xticks(_ticks(low, high))
        axes[-1].xaxis.set_major_formatter("{x:,.0f}")
        axes[-1].minorticks_off()
    return (
        figure,
        "Requests by length of the prompt and of the answer asked for; lines at the median and the 95th percentile.",
    )


def _prefix_reuse(shares: Mapping[int, float]) -> tuple[Figure, str]:
    """A bar a block size."""
    with look():
        figure, (ax,) = new_figure(2.4)
        names = [f"{size} tokens" for size in shares]
        bars = ax.bar(names, [100 * share for share in shares.values()], width=0.5, color=PALETTE[0])
        ax.bar_label(bars, fmt="%.1f %%", padding=2)
        ax.set_ylim(0, 110)
        ax.set_ylabel("% of prompt tokens")
        ax.set_xlabel("block size")
    return figure, "Share of prompt tokens that a prefix cache without limit would serve, by block size."


def _ticks(low: float, high: float) -> Sequence[float]:
    """1, 2, 5 times powers of ten between two lengths, every second or third of them where there are many."""
    steps = [m * 10**e for e in range(8) for m in (1, 2, 5) if low * 0.9 <= m * 10**e <= high * 1.1]
    return steps[:: 1 + len(steps) // 9] or [low]
