"""What was asked for: lengths of prompts and caps, and how many prompts took more than one step (M-s2-01)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.report.arms import Arm
from harness.report.page import section, text_table
from harness.report.quantity import UNKNOWN, number
from harness.report.read import Results

_LENGTHS = {"prompt_tokens": "prompts", "max_new_tokens": "caps"}


def requests_section(results: Results, arms: Sequence[Arm]) -> str:
    """p50, p95 and maximum of the lengths of each workload, and its chunked prompts by arm; "" without requests."""
    table = results.tables["requests"]
    lengths: dict[str, list[str]] = {}
    chunks = []
    for arm in arms:
        if arm.runs.empty or arm.is_replica:
            continue
        own = table[table["run_id"] == arm.runs["run_id"].iloc[0]]
        if own.empty:
            continue
        name = str(arm.runs["workload"].iloc[0])
        cells = [str(len(own)), *(_summary(own[column].dropna().to_numpy(dtype=np.float64)) for column in _LENGTHS)]
        if cells not in lengths.values():  # the arms of a comparison get the same requests
            lengths[name if name not in lengths else f"{name} ({arm.label})"] = cells
        chunked, most = arm.spread("chunked_requests"), arm.spread("prefill_steps_max")
        if chunked is not None and most is not None:
            chunks.append([arm.label, number(chunked.median), number(most.high)])
    if not lengths:
        return ""
    header = ["workload", "requests", *(f"{name}: p50, p95, max [tokens]" for name in _LENGTHS.values())]
    return section(
        "Requests",
        text_table(header, [[name, *cells] for name, cells in lengths.items()]),
        "<p>Prompts that took more than one step (chunked prefill), as far as the engine tells; of each request in "
        "<code>requests</code>, column <code>prefill_steps</code>.</p>"
        + text_table(["arm", "chunked prompts", "most steps of one"], chunks)
        if chunks
        else "",
    )


def _summary(values: np.ndarray) -> str:
    if not len(values):
        return UNKNOWN
    p50, p95 = np.percentile(values, (50, 95))
    return f"{number(float(p50))}, {number(float(p95))}, {number(float(values.max()))}"
