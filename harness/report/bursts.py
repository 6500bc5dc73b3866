"""Bursts that an engine had begun to serve before all of their requests were there.

Requests due at one moment are handed over one after the other, as clients do, and an engine that runs does not wait for
the last one. Where its first step began in between, the burst's first tokens come in two groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from harness.report.arms import Arm
from harness.report.read import Results


def split_bursts(results: Results, arms: Sequence[Arm]) -> list[str]:
    """One sentence about the arms whose first step knew only a part of the requests that were due with it; [] without
    such arms, and of engines that keep no step log."""
    named = []
    for arm in arms:
        seen = [s for run_id in arm.measured["run_id"] if (s := _first_step(results, run_id)) is not None]
        if short := [(known, due) for known, due in seen if known < due]:
            fewest, due = min(short)
            runs = f" in {len(short)} of {len(seen)} runs" if len(seen) > 1 else ""
            named.append(f"{arm.label} ({'at the fewest ' if len(short) > 1 else ''}{fewest} of {due}{runs})")
    if not named:
        return []
    return [
        f"The first step began while a burst was still being handed over, and knew only a part of it: "
        f"{', '.join(named)}. The first tokens of the others came with later steps, so TTFT has two groups."
    ]


def _first_step(results: Results, run_id: str) -> tuple[int, int] | None:
    """Requests known to the first step of a run, in it or queued, and those due at its start; None if that was one, or
    if the engine does not tell."""
    due = results.of_run("requests", run_id)["t_sched_s"].dropna()
    steps = results.of_run("steps", run_id)
    together = int((due == due.min()).sum()) if len(due) else 0
    if together < 2 or steps.empty:
        return None
    first = steps.loc[steps["step"].idxmin()]
    if pd.isna(first["running"]) or pd.isna(first["waiting"]):
        return None
    return int(first["running"]) + int(first["waiting"]), together
