"""The noise of real runs (``residuals.csv``, ``h200.csv``) from the committed results beside this folder.

usage: python results/reference/noise/residuals.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
LATENCIES = "ttft_p50_ms ttft_p95_ms ttft_p99_ms tpot_p50_ms e2e_p50_ms e2e_p95_ms itl_p50_ms itl_p95_ms itl_p99_ms"
METRICS = ["gen_tok_s", *LATENCIES.split()]
CPU = HERE.parent / "cpu" / "quickstart" / "runs.csv"
H200 = ("peers", "stages")
"""Folders of ``h200`` that are told; in ``qwen3-4b`` one engine ran, so nothing tells its noise from its prompts."""
FEWEST = 3
"""Runs of an arm, or it is left out."""
CELL = ["model", "workload"]
"""What an arm is compared within."""


def residuals(runs: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """How far each run lies from where its arm is, as logarithms; a row a run, in their order.

    The mean of n runs takes 1/n of the variance with it, so they are scaled by sqrt(n / (n - 1)). Where the runs of an
    arm had requests of their own, the same for all k arms, what those did is taken out likewise.
    """
    kept = runs[(runs["status"] == "ok") & runs[list(metrics)].notna().all(axis=1)]
    kept = kept[kept.groupby([*CELL, "arm"])["run_id"].transform("size") >= FEWEST]
    logs = np.log(kept[list(metrics)].astype(float))
    cell, arm, requests = ([kept[name] for name in names] for names in (CELL, [*CELL, "arm"], [*CELL, "workload_hash"]))
    n = kept.groupby([*CELL, "arm"])["run_id"].transform("size")
    found = (logs - logs.groupby(arm).transform("mean")).mul(np.sqrt(n / (n - 1)), axis=0)
    k = kept.groupby(CELL)["arm"].transform("nunique")
    apart = (kept.groupby([*CELL, "arm"])["workload_hash"].transform("nunique") > 1) & (k > 1)
    crossed = (found - found.groupby(requests).transform("mean") + found.groupby(cell).transform("mean")).mul(
        np.sqrt(k / (k - 1).where(k > 1)), axis=0
    )
    # + 0.0: no "-0.0" in a file
    return found.where(~apart, crossed).round(6) + 0.0


def h200() -> pd.DataFrame:
    """Every sweep of :data:`H200`, one below the other."""
    parts = []
    for path in sorted(path for name in H200 for path in (HERE.parent / "h200" / name).rglob("runs.parquet")):
        runs = pd.read_parquet(path)
        rows = residuals(runs, METRICS)
        names = runs.loc[rows.index, ["run_id", *CELL, "engine", "arm"]]
        names.insert(0, "sweep", path.parent.relative_to(HERE.parent / "h200").as_posix())
        parts.append(pd.concat([names, rows], axis=1))
    return pd.concat(parts, ignore_index=True)


def cpu() -> pd.DataFrame:
    runs = pd.read_csv(CPU)
    rows = residuals(runs, [*METRICS, "peak_rss_bytes"])
    return pd.concat([runs.loc[rows.index, ["arm"]], rows], axis=1)


if __name__ == "__main__":
    for name, table in (("residuals", cpu()), ("h200", h200())):
        table.to_csv(HERE / f"{name}.csv", index=False)
        print(f"{name}.csv: {len(table)} runs")
