"""Distributions of TTFT and ITL: one curve a run, so that repeats show their spread instead of being pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from harness.report.arms import Arm
from harness.report.plots.figure import LINES, legend_above, log_scale, look, new_figure
from harness.report.read import Results

# Enough points for a smooth curve and a true tail, however many samples there are.
_QUANTILES = np.concatenate([np.linspace(0, 0.98, 197), np.linspace(0.98, 1, 41)[1:]])
_LOG_FROM = 20  # a spread this large from the 5th percentile to the longest is drawn on a logarithmic axis


def ttft_cdf(results: Results, members: Sequence[Arm], colours: Mapping[str, str]) -> tuple[Figure, str] | None:
    """Share of ok requests whose first token came within a time; None without samples."""
    return _cdf(results.tables["requests"], "ttft_ms", "time to first token (ms)", "requests", members, colours)


def itl_cdf(results: Results, members: Sequence[Arm], colours: Mapping[str, str]) -> tuple[Figure, str] | None:
    """Share of inter-token gaps up to a length; None without samples."""
    return _cdf(results.tables["itl"], "itl_ms", "gap between tokens (ms)", "gaps", members, colours)


def _cdf(
    frame: pd.DataFrame, value: str, label: str, what: str, members: Sequence[Arm], colours: Mapping[str, str]
) -> tuple[Figure, str] | None:
    samples = {run_id: group.to_numpy(dtype=np.float64) for run_id, group in _values(frame, value)}
    curves = [(i, arm, samples[r]) for i, arm in enumerate(members) for r in arm.measured["run_id"] if r in samples]
    if not curves:
        return None
    with look():
        figure, (ax,) = new_figure(3.1 + 0.05 * len(members))
        labelled: set[str] = set()
        largest, smallest = 0.0, np.inf
        for i, arm, data in curves:
            few = len(data) <= len(_QUANTILES)
            times, shares = _every_sample(data) if few else (np.quantile(data, _QUANTILES), _QUANTILES)
            ax.plot(
                times,
                shares,
                drawstyle="steps-post" if few else "default",
                color=colours[arm.series],
                linestyle=LINES[i % len(LINES)],
                linewidth=1.6 if len(arm.measured) == 1 else 1.1,
                label=None if arm.series in labelled else arm.series,
            )
            labelled.add(arm.series)
            largest, smallest = max(largest, data.max()), min(smallest, np.quantile(data, 0.05))
        ax.set_ylim(0, 1.01)
        ax.set_ylabel(f"share of {what}")
        if smallest > 0 and largest / smallest > _LOG_FROM:
            log_scale(ax, "x")
        else:
            ax.set_xlim(left=0)
        ax.set_xlabel(label)
        legend_above(ax)
    counts = sorted({len(data) for _, _, data in curves})
    n = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return figure, f"Share of {what} up to a {label.replace(' (ms)', '')}, in ms: one curve a run, {n} {what} each."


def _every_sample(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the share of samples up to a time rises, and to what."""
    ordered = np.sort(data)
    return np.concatenate([ordered[:1], ordered]), np.arange(len(data) + 1) / len(data)


def _values(frame: pd.DataFrame, value: str) -> list[tuple[str, pd.Series]]:
    known = frame[["run_id", value]].dropna()
    return [(str(run_id), group) for run_id, group in known.groupby("run_id", sort=False)[value]]
