"""The step log of one run over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.report.plots.figure import INK, PALETTE, from_zero, legend_above, log_scale, look, new_figure, time_axis
from harness.report.plots.time_frame import TimeFrame, has, time_frame, timed

_BINS = 600  # more steps than this are drawn as the extremes of so many bins
_BLUE, _RED, _GREEN = PALETTE[0], PALETTE[1], PALETTE[2]


def step_timeline(steps: pd.DataFrame, frame: TimeFrame | None = None) -> tuple[Figure, str] | None:
    """Running and waiting requests, free KV blocks and step time of one run; None without a log of timed steps.

    Args:
        steps: the ``steps`` table of one run.
        frame: axes in common with other runs; None: its own.
    """
    rows = timed(steps)
    if frame is None:
        frame = time_frame([(rows, _NO_REQUESTS)])
    if rows.empty or not any(has(rows, panel) for panel in frame.panels):
        return None
    per_bin = max(1, -(-len(rows) // _BINS))
    bins = np.arange(len(rows)) // per_bin
    with look():
        figure, axes = new_figure(0.5 + 1.3 * len(frame.panels), rows=len(frame.panels))
        for ax, panel in zip(axes, frame.panels, strict=True):
            if has(rows, panel):
                _DRAW[panel](ax, rows, bins, frame)
            else:
                _nothing(ax)
            ax.set_ylabel(_LABELS[panel])
        for ax, panel in zip(axes, frame.panels, strict=True):
            if has(rows, panel):
                legend_above(ax)
        time_axis(axes[-1], frame.until_s)
    caption = "Step log: requests running and waiting, free KV blocks, time of each step."
    if per_bin > 1:
        caption += (
            f" {len(rows):,} steps; each point is the extreme of {per_bin} steps (fewest free blocks, most else)."
        )
    return figure, caption


_NO_REQUESTS = pd.DataFrame({name: pd.Series(dtype="Float64") for name in ("t_submit_s", "t_last_s", "t_done_s")})
_LABELS = {"requests": "requests", "free_blocks": "free blocks", "step_ms": "step (ms)"}


def _binned(rows: pd.DataFrame, name: str, bins: np.ndarray, extreme: str = "max") -> tuple[np.ndarray, np.ndarray]:
    frame = pd.DataFrame({"t": rows["t_s"].to_numpy(float), "v": rows[name].to_numpy(float, na_value=np.nan)})
    reduced = frame.groupby(bins).agg({"t": "first", "v": extreme})
    return reduced["t"].to_numpy(), reduced["v"].to_numpy()


def _queue(ax: Axes, rows: pd.DataFrame, bins: np.ndarray, frame: TimeFrame) -> None:
    for name, colour, line in (("running", _BLUE, "-"), ("waiting", _RED, "--")):
        if rows[name].notna().any():
            t, v = _binned(rows, name, bins)
            ax.step(t, v, line, where="post", color=colour, linewidth=1.2, label=name)
    ax.set_ylim(0, max((frame.most_requests or 0) * 1.08, 1))


def _blocks(ax: Axes, rows: pd.DataFrame, bins: np.ndarray, frame: TimeFrame) -> None:
    t, v = _binned(rows, "free_blocks", bins, "min")
    ax.step(t, v, where="post", color=_GREEN, linewidth=1.2)
    from_zero(ax)


def _duration(ax: Axes, rows: pd.DataFrame, bins: np.ndarray, frame: TimeFrame) -> None:
    kinds = (("decode", _BLUE, "o"), ("mixed", _RED, "^"), ("prefill", _GREEN, "s"), (None, INK, "."))
    for kind, colour, marker in kinds:
        chosen = rows["kind"].isna() if kind is None else (rows["kind"] == kind).fillna(False)
        chosen = chosen.to_numpy(dtype=bool)
        if chosen.any():
            t, v = _binned(rows[chosen], "step_ms", bins[chosen])
            # not clipped: the first step begins at the edge
            ax.plot(
                t, v, marker, color=colour, markersize=3, markeredgewidth=0, alpha=0.8, label=kind or "step",
                clip_on=False,
            )  # fmt: skip
    assert frame.step_ms is not None  # the panel is in the frame
    shortest, longest = frame.step_ms
    if frame.log_steps:
        log_scale(ax, "y", (1,) if longest / shortest > 100 else (1, 3))
        ax.set_ylim(shortest / 1.4, longest * 1.4)
    else:
        ax.set_ylim(0, max(longest * 1.08, 1e-9))


def _nothing(ax: Axes) -> None:
    ax.set_yticks([])
    ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center", alpha=0.6)


_DRAW: Mapping[str, Callable[[Axes, pd.DataFrame, np.ndarray, TimeFrame], None]] = {
    "requests": _queue,
    "free_blocks": _blocks,
    "step_ms": _duration,
}
