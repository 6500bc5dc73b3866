"""What the harness itself adds: what came back of a known schedule, right before the first run of each process."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from harness.report.arms import Arm
from harness.report.page import section, text_table
from harness.report.quantity import UNKNOWN, number
from harness.report.read import Results
from harness.report.validity import CALIBRATION_LIMITS
from harness.tables import column

_COLUMNS = (
    "ttft_error_p50_ms",
    "ttft_error_p99_ms",
    "itl_error_p50_ms",
    "itl_error_p99_ms",
    "sched_lag_p99_ms",
    "last_lag_ms",
    "overhead_us_per_token",
)


def calibration_section(results: Results, arms: Sequence[Arm]) -> str:
    """The worst of each error over the runs of each arm, beside what the harness promises; "" if nothing was
    calibrated."""
    table = results.tables["calibration"]
    rows = []
    for arm in arms:
        own = table[table["run_id"].isin(arm.runs["run_id"])]
        if len(own):
            rows.append([arm.label, str(len(own)), *(_worst(own[name], name) for name in _COLUMNS)])
    if not rows:
        return ""
    limits = ["bound", "", *(_bound(name) for name in _COLUMNS)]
    header = ["arm", "runs", *(f"{_title(name)} [{column('calibration', name).unit}]" for name in _COLUMNS)]
    schedule = table.iloc[0]
    rate, tokens = number(float(schedule["gen_tok_s"])), number(float(schedule["tokens"]))
    return section(
        "Calibration",
        f"<p>Right before the first run of each process a backend without a model delivered {tokens} tokens at {rate} "
        "tokens/s on a schedule known exactly, through the same sender and recorder in the same process. What was "
        "measured less what was scheduled is the error of the harness on that machine at that moment: a latency that "
        "differs between two arms by less shows nothing, and beyond a bound (marked) small differences of that arm are "
        "doubtful. The lag of the last request shows whether lateness adds up. Worst run of each arm.</p>",
        text_table(header, [limits, *rows]),
    )


def _worst(values: pd.Series, name: str) -> str:
    worst = values.max()
    if pd.isna(worst):
        return UNKNOWN
    beyond = name in CALIBRATION_LIMITS and worst > CALIBRATION_LIMITS[name][0]
    return number(float(worst)) + (" beyond" if beyond else "")


def _bound(name: str) -> str:
    return f"{CALIBRATION_LIMITS[name][0]:g}" if name in CALIBRATION_LIMITS else "none"


def _title(name: str) -> str:
    return name.removesuffix("_ms").replace("us_per_token", "per token").replace("_", " ")
