"""Throughput of the arms of one facet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from harness.report.arms import Arm, baseline_of, ratio
from harness.report.plots.figure import INK, bar_names, bars_height, look, new_figure
from harness.report.quantity import number, times


def throughput_bars(members: Sequence[Arm], colours: Mapping[str, str]) -> tuple[Figure, str] | None:
    """One bar an arm with its range over repeats and its ratio to the baseline; None if no run ended well."""
    drawn = [(arm, spread) for arm in members if (spread := arm.spread("gen_tok_s"))]
    if not drawn:
        return None
    baseline = baseline_of(members)
    with look():
        figure, (ax,) = new_figure(1.0 + bars_height([arm.series for arm, _ in drawn]))
        for y, (arm, spread) in enumerate(drawn):
            ax.barh(y, spread.median, height=0.62, color=colours[arm.series])
            if spread.n > 1:
                low, high = spread.median - spread.low, spread.high - spread.median
                ax.errorbar(spread.median, y, xerr=[[low], [high]], color=INK, capsize=3, linewidth=1)
            text = number(spread.median)
            against = ratio(arm, baseline, "gen_tok_s") if baseline and arm is not baseline else None
            text += f"  ({times(against.mean)})" if against else ""
            ax.annotate(text, (spread.high, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
        bar_names(ax, [arm.series for arm, _ in drawn])
        ax.set_xlim(0, max(spread.high for _, spread in drawn) * 1.4)  # room for the numbers
        ax.set_xlabel("generated tokens/s")
    caption = "Generated tokens per second; padding is not counted."
    if any(spread.n > 1 for _, spread in drawn):
        caption += " Bars are medians over repeats, whiskers their range."
    if baseline:
        caption += f" In brackets: ratio to {baseline.series}."
    return figure, caption
