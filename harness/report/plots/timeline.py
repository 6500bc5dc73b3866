"""One run over time: the engine's step log, or its requests where there is none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.plots.figure import INK, PALETTE, from_zero, legend_above, log_scale, look, new_figure

_BINS = 600  # more steps than this are drawn as the extremes of so many bins
_LOG_FROM = 20  # a step so many times as long as the median one would press the others to the axis
_REQUESTS = 240  # more requests than this are drawn as every k-th
_BLUE, _RED, _GREEN = PALETTE[0], PALETTE[1], PALETTE[2]


def step_timeline(steps: pd.DataFrame) -> tuple[Figure, str] | None:
    """Running and waiting requests, free KV blocks and step time of one run; None without a log of timed steps.

    Args:
        steps: the ``steps`` table of one run.
    """
    rows = steps[steps["t_s"].notna()].sort_values("t_s")
    panels = [draw for draw, names in _PANELS if any(rows[name].notna().any() for name in names)]
    if rows.empty or not panels:
        return None
    per_bin = max(1, -(-len(rows) // _BINS))
    bins = np.arange(len(rows)) // per_bin
    with look():
        figure, axes = new_figure(0.5 + 1.35 * len(panels), rows=len(panels))
        for ax, panel in zip(axes, panels, strict=True):
            panel(ax, rows, bins)
        axes[-1].set_xlabel("seconds after the start of the run")
        axes[-1].set_xlim(left=0)
    caption = "Step log of one run: requests running and waiting, free KV blocks, time of each step."
    if per_bin > 1:
        caption += (
            f" {len(rows):,} steps; each point is the extreme of {per_bin} steps (fewest free blocks, most else)."
        )
    return figure, caption


def _binned(rows: pd.DataFrame, name: str, bins: np.ndarray, extreme: str = "max") -> tuple[np.ndarray, np.ndarray]:
    frame = pd.DataFrame({"t": rows["t_s"].to_numpy(float), "v": rows[name].to_numpy(float, na_value=np.nan)})
    reduced = frame.groupby(bins).agg({"t": "first", "v": extreme})
    return reduced["t"].to_numpy(), reduced["v"].to_numpy()


def _queue(ax: Axes, rows: pd.DataFrame, bins: np.ndarray) -> None:
    for name, colour, line in (("running", _BLUE, "-"), ("waiting", _RED, "--")):
        if rows[name].notna().any():
            t, v = _binned(rows, name, bins)
            ax.step(t, v, line, where="post", color=colour, linewidth=1.2, label=name)
    from_zero(ax)
    ax.set_ylabel("requests")
    legend_above(ax)


def _blocks(ax: Axes, rows: pd.DataFrame, bins: np.ndarray) -> None:
    t, v = _binned(rows, "free_blocks", bins, "min")
    ax.step(t, v, where="post", color=_GREEN, linewidth=1.2)
    from_zero(ax)
    ax.set_ylabel("free blocks")


def _duration(ax: Axes, rows: pd.DataFrame, bins: np.ndarray) -> None:
    kinds = (("decode", _BLUE, "o"), ("mixed", _RED, "^"), ("prefill", _GREEN, "s"), (None, INK, "."))
    for kind, colour, marker in kinds:
        chosen = rows["kind"].isna() if kind is None else (rows["kind"] == kind).fillna(False)
        chosen = chosen.to_numpy(dtype=bool)
        if chosen.any():
            t, v = _binned(rows[chosen], "step_ms", bins[chosen])
            ax.plot(t, v, marker, color=colour, markersize=2.6, markeredgewidth=0, alpha=0.8, label=kind or "step")
    known = rows["step_ms"].dropna()
    if known.min() > 0 and known.max() / known.median() > _LOG_FROM:
        log_scale(ax, "y")
    else:
        from_zero(ax)
    ax.set_ylabel("step (ms)")
    legend_above(ax)


# What each panel draws; a panel is left out where none of its columns is known.
_PANELS: tuple[tuple[Callable[[Axes, pd.DataFrame, np.ndarray], None], tuple[str, ...]], ...] = (
    (_queue, ("running", "waiting")),
    (_blocks, ("free_blocks",)),
    (_duration, ("step_ms",)),
)


def request_gantt(requests: pd.DataFrame) -> tuple[Figure, str] | None:
    """One row a request: from submission to first token (thin) and to its end (thick); None without times.

    Args:
        requests: the ``requests`` table of one run.
    """
    rows = requests[requests["t_submit_s"].notna()].sort_values("t_submit_s", kind="stable")
    if rows.empty:
        return None
    every = max(1, -(-len(rows) // _REQUESTS))
    rows = rows.iloc[::every]
    submit, first, last, done = (
        rows[name].to_numpy(float, na_value=np.nan) for name in ("t_submit_s", "t_first_s", "t_last_s", "t_done_s")
    )
    ok = rows["outcome"].isin(["ok_eos", "ok_length"]).to_numpy(dtype=bool)
    y = np.arange(len(rows))
    end = np.where(np.isnan(last), done, last)
    with look():
        figure, (ax,) = new_figure(min(4.4, 1.4 + 0.06 * len(rows)))
        thick = max(1.0, min(4.0, 160 / len(rows)))
        started = ~np.isnan(first)
        waited = np.where(started, first, end)
        known = ~np.isnan(waited)
        ax.hlines(y[known], submit[known], waited[known], color=INK, alpha=0.45, linewidth=max(0.6, thick / 3))
        for chosen, colour in ((ok & started, _BLUE), (~ok & started, _RED)):
            ax.hlines(y[chosen], first[chosen], end[chosen], color=colour, linewidth=thick)
        if (~ok).any():
            at = np.where(np.isnan(done), np.where(np.isnan(end), submit, end), done)
            ax.plot(at[~ok], y[~ok], "x", color=_RED, markersize=5)
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        ax.set_xlabel("seconds after the start of the run")
        ax.set_ylabel("requests" if every == 1 else f"every {every}th request")
        handles = [
            Line2D([], [], color=INK, alpha=0.45, label="waiting"),
            Line2D([], [], color=_BLUE, lw=3, label="tokens"),
        ]
        if (~ok).any():
            handles.append(Line2D([], [], color=_RED, marker="x", linestyle="", label="not ok"))
        legend_above(ax, handles)
    return figure, "Requests of one run in order of submission: waiting for the first token, then receiving tokens."
