"""The memory ledger as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from harness.report.plots.figure import INK, PALETTE, bar_names, bars_height, legend_above, look, new_figure
from harness.report.quantity import memory

_OTHER = "other"
_VISIBLE = 0.01  # of the longest bar: a part that is smaller in every arm has no colour of its own


def ledger_bars(ledgers: Mapping[str, Mapping[str, int]], peaks: Mapping[str, int]) -> tuple[Figure, str] | None:
    """One bar an arm, one part a line of its ledger, with the measured peak as a mark; None without lines.

    Args:
        ledgers: by arm, bytes by line.
        peaks: by arm, bytes that the allocator held at its peak, where that is known.
    """
    if not any(ledgers.values()):
        return None
    largest_of: dict[str, int] = {}
    for ledger in ledgers.values():
        for name, part in ledger.items():
            largest_of[name] = max(largest_of.get(name, 0), part)
    longest = max(sum(ledger.values()) for ledger in ledgers.values())
    seen = [n for n in sorted(largest_of, key=lambda name: -largest_of[name]) if largest_of[n] >= _VISIBLE * longest]
    parts = seen[: len(PALETTE) - 1]
    rest = [sum(v for n, v in ledger.items() if n not in parts) for ledger in ledgers.values()]
    names = [*parts, *([_OTHER] if max(rest) >= _VISIBLE * longest else [])]
    scale, unit = (2**30, "GiB") if max(longest, *peaks.values(), 0) >= 2**30 else (2**20, "MiB")
    with look():
        figure, (ax,) = new_figure(1.3 + bars_height([*ledgers]))
        for y, (ledger, other) in enumerate(zip(ledgers.values(), rest, strict=True)):
            left = 0.0
            for k, name in enumerate(names):
                size = (other if name == _OTHER else ledger.get(name, 0)) / scale
                label = name.removesuffix("_bytes").replace("_", " ")
                ax.barh(y, size, left=left, height=0.62, color=PALETTE[k], label=None if y else label)
                left += size
            ax.annotate(
                memory(sum(ledger.values())),
                (left, y),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        marks = [(peaks[arm] / scale, y) for y, arm in enumerate(ledgers) if arm in peaks]
        if marks:
            ax.plot(
                [m[0] for m in marks], [m[1] for m in marks], "|", color=INK, markersize=16, label="allocated at peak"
            )
        bar_names(ax, [*ledgers])
        ax.set_xlim(0, max(longest, *peaks.values(), 0) / scale * 1.28)  # room for the sums
        ax.set_xlabel(unit)
        legend_above(ax)
    small = [n.removesuffix("_bytes").replace("_", " ") for n in largest_of if n not in parts]
    caption = "Lines of the engine's memory ledger with their sum, first repeat of each arm."
    if marks:
        caption += " Mark: what the allocator held at its peak."
    if small:
        caption += f" {'Other' if _OTHER in names else 'Too small to be seen'}: {', '.join(small)}."
    return figure, caption
