"""The memory ledger as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from harness.report.plots.figure import INK, PALETTE, legend_above, look, new_figure

_OTHER = "other"


def ledger_bars(ledgers: Mapping[str, Mapping[str, int]], peaks: Mapping[str, int]) -> tuple[Figure, str] | None:
    """One bar an arm, one part a line of its ledger, with the measured peak as a mark; None without lines.

    Args:
        ledgers: by arm, bytes by line.
        peaks: by arm, bytes that the allocator held at its peak, where that is known.
    """
    if not any(ledgers.values()):
        return None
    totals: dict[str, int] = {}
    for ledger in ledgers.values():
        for name, size in ledger.items():
            totals[name] = max(totals.get(name, 0), size)
    largest = sorted(totals, key=lambda name: -totals[name])[: len(PALETTE) - 1]
    names = [*largest, *([_OTHER] if len(totals) > len(largest) else [])]
    with look():
        figure, (ax,) = new_figure(1.4 + 0.34 * len(ledgers))
        for y, ledger in enumerate(ledgers.values()):
            left = 0.0
            for k, name in enumerate(names):
                size = sum(v for n, v in ledger.items() if n not in largest) if name == _OTHER else ledger.get(name, 0)
                label = name.removesuffix("_bytes").replace("_", " ")
                ax.barh(y, size / 2**30, left=left, height=0.62, color=PALETTE[k], label=None if y else label)
                left += size / 2**30
        marks = [(peaks[arm] / 2**30, y) for y, arm in enumerate(ledgers) if arm in peaks]
        if marks:
            ax.plot(
                [m[0] for m in marks], [m[1] for m in marks], "|", color=INK, markersize=16, label="allocated at peak"
            )
        ax.set_yticks(range(len(ledgers)), list(ledgers))
        ax.set_ylim(len(ledgers) - 0.4, -0.6)
        ax.grid(False, axis="y")
        ax.set_xlim(left=0)
        ax.set_xlabel("GiB")
        legend_above(ax)
    return figure, "Lines of the engine's memory ledger, first repeat of each arm." + (
        " Mark: what the allocator held at its peak." if marks else ""
    )
