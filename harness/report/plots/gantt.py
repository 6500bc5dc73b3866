"""The requests of one run over time."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.plots.figure import INK, PALETTE, legend_above, look, new_figure, time_axis
from harness.report.plots.time_frame import TimeFrame

_REQUESTS = 240  # more requests than this are drawn as every k-th
_BLUE, _RED = PALETTE[0], PALETTE[1]


def request_gantt(requests: pd.DataFrame, frame: TimeFrame | None = None) -> tuple[Figure, str] | None:
    """One row a request: from submission to first token (thin) and to its end (thick); None without times.

    Args:
        requests: the ``requests`` table of one run.
        frame: axes in common with other runs; None: its own.
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
        figure, (ax,) = new_figure(3.4)
        thick = max(1.0, min(6.0, 200 / len(rows)))
        started = ~np.isnan(first)
        waited = np.where(started, first, end)
        known = ~np.isnan(waited)
        ax.hlines(y[known], submit[known], waited[known], color=INK, alpha=0.45, linewidth=max(0.6, thick / 3))
        for chosen, colour in ((ok & started, _BLUE), (~ok & started, _RED)):
            ax.hlines(y[chosen], first[chosen], end[chosen], color=colour, linewidth=thick)
        if (~ok).any():
            at = np.where(np.isnan(done), np.where(np.isnan(end), submit, end), done)
            ax.plot(at[~ok], y[~ok], "x", color=_RED, markersize=5)
        ax.set_ylim(len(rows) - 0.2, -0.8)
        time_axis(ax, None if frame is None else frame.until_s)
        ax.set_ylabel("requests" if every == 1 else f"every {every}th request")
        handles = [
            Line2D([], [], color=INK, alpha=0.45, label="waiting"),
            Line2D([], [], color=_BLUE, lw=3, label="tokens"),
        ]
        if (~ok).any():
            handles.append(Line2D([], [], color=_RED, marker="x", linestyle="", label="not ok"))
        legend_above(ax, handles)
    return figure, "Requests in order of submission: waiting for the first token, then receiving tokens."
