"""A metric against the numeric variable of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from harness.report.arms import Arm
from harness.report.plots.figure import LINES, MARKERS, PALETTE, from_zero, legend_above, look, new_figure
from harness.tables import column

_LOG_FROM = 8  # values that span this factor are spaced logarithmically


def metric_vs_variable(arms: Sequence[Arm], metric: str) -> tuple[Figure, str] | None:
    """One line an engine and facet: medians, with the range over repeats as a band.

    None unless at least two arms have different numeric values and the metric is known.
    """
    lines = _lines(arms, metric)
    values = sorted({x for points in lines.values() for x, *_ in points})
    if len(values) < 2:
        return None
    definition = column("runs", metric)
    scale, unit = (2**20, "MiB") if definition.unit == "bytes" else (1, definition.unit)
    variable = next(a.variable for a in arms if a.variable)
    with look():
        figure, (ax,) = new_figure(2.9)
        for i, (label, points) in enumerate(lines.items()):
            x, median, low, high = (list(p) for p in zip(*points, strict=True))
            scaled = [[v / scale for v in part] for part in (median, low, high)]
            colour = PALETTE[i % len(PALETTE)]
            ax.plot(x, scaled[0], LINES[i % 4], marker=MARKERS[i % 6], markersize=5, color=colour, label=label)
            ax.fill_between(x, scaled[1], scaled[2], color=colour, alpha=0.2, linewidth=0)
        if values[0] > 0 and values[-1] / values[0] >= _LOG_FROM:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))  # 512, as the setting is written
            ax.minorticks_off()
        if len(values) <= 8:
            ax.set_xticks(values, [f"{v:g}" for v in values])
        from_zero(ax)
        ax.set_xlabel(variable)
        ax.set_ylabel(unit)
        if len(lines) > 1:
            legend_above(ax)
    caption = f"{metric} against {variable}: {definition.definition}."
    if any(len(a.measured) > 1 for a in arms):
        caption += " Points are medians over repeats, the band is their range."
    if left_out := [a.series for a in arms if a.number is None]:
        caption += f" Not on the axis: {', '.join(dict.fromkeys(left_out))}."
    return figure, caption


def _lines(arms: Sequence[Arm], metric: str) -> Mapping[str, list[tuple[float, float, float, float]]]:
    engines = len({a.engine for a in arms}) > 1
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for arm in arms:
        spread = arm.spread(metric)
        if arm.variable is None or arm.number is None or spread is None:
            continue
        label = " · ".join(part for part in (arm.facet, arm.engine if engines else "") if part) or arm.engine
        lines.setdefault(label, []).append((arm.number, spread.median, spread.low, spread.high))
    return {label: sorted(points) for label, points in lines.items()}
