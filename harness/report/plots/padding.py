"""Real against padded tokens of the arms that pad."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.report.arms import Arm, Spread
from harness.report.plots.figure import INK, PALETTE, bar_names, bars_height, legend_above, look, new_figure

_PARTS = (("prompt", "prompt_tokens", "padding_prompt_tokens"), ("output", "generated_tokens", "padding_output_tokens"))


def padded_share(arm: Arm) -> list[tuple[str, Spread, Spread]]:
    """(part, real, padding) of prompts and outputs, where the arm reports padding (0 included)."""
    found = []
    for part, real_name, padding_name in _PARTS:
        real, padding = arm.spread(real_name), arm.spread(padding_name)
        if real is not None and padding is not None:
            found.append((part, real, padding))
    return found


def padding_bars(arms: Sequence[Arm]) -> tuple[Figure, str] | None:
    """Tokens computed, split into real and padding; None if no arm padded anything."""
    rows = [(arm, *entry) for arm in arms for entry in padded_share(arm) if entry[2].high > 0]
    if not rows:
        return None
    names = [f"{arm.label}: {part}" for arm, part, *_ in rows]
    with look():
        figure, (ax,) = new_figure(1.3 + bars_height(names))
        for y, (_, _, real, padding) in enumerate(rows):
            ax.barh(y, real.median, height=0.62, color=PALETTE[0], label="real" if y == 0 else None)
            ax.barh(
                y,
                padding.median,
                left=real.median,
                height=0.62,
                color="none",
                edgecolor=INK,
                hatch="////",
                linewidth=0.7,
                label="padding" if y == 0 else None,
            )
            computed = real.median + padding.median
            share = f"{100 * padding.median / computed:.0f} % padding" if computed else ""
            ax.annotate(share, (computed, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
        bar_names(ax, names)
        ax.set_xlim(0, max(real.median + padding.median for *_, real, padding in rows) * 1.5)  # room for the shares
        ax.set_xlabel("tokens computed")
        legend_above(ax)
    return figure, "Tokens computed by the arms that pad; only real tokens enter the rates. Medians over repeats."
