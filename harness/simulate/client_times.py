"""What measured runs tell of their clients: how long sending, waking an idle engine and delivering took, in ms."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from harness.metrics.observations import FloatArray
from harness.report.read import Results

ENOUGH = 5
"""Fewer times than that tell nothing."""


def delivery_ms(results: Results, run_ids: Iterable[str]) -> tuple[float, float]:
    """From the end of a step to the first tokens it brought, as the client saw them: constant, and by row of the step.

    Of few or of always equally large steps nothing is said about rows.
    """
    delays, rows = [np.empty(0)], [np.empty(0)]
    for run_id in run_ids:
        steps = results.of_run("steps", run_id).dropna(subset=["t_s", "step_ms"])
        first = floats(results.of_run("requests", run_id)["t_first_s"].dropna())
        ends = floats(steps["t_s"]) + floats(steps["step_ms"]) / 1000
        order = np.argsort(ends)
        at = np.searchsorted(ends[order], first, "right") - 1
        brought = order[at[at >= 0]]
        delays.append((first[at >= 0] - ends[brought]) * 1000)
        rows.append((floats(steps["decode_rows"]) + floats(steps["prefill_rows"]))[brought])
    known, size = np.concatenate(delays), np.concatenate(rows)
    if not len(known):
        return 0.0, 0.0
    middle = float(np.median(size))
    small, large = known[size <= middle], known[size > middle]
    if len(small) < ENOUGH or len(large) < ENOUGH:
        return float(np.median(known)), 0.0
    # Through the medians of both halves: a late token here and there (another thread ran) does not count.
    apart = float(np.median(size[size > middle]) - np.median(size[size <= middle]))
    by_row = max(0.0, float(np.median(large) - np.median(small)) / apart)
    return max(0.0, float(np.median(known - by_row * size))), by_row


def longest_prompt(results: Results, run_ids: Iterable[str]) -> int | None:
    """Tokens of the longest prompt that was served; None if no table tells."""
    lengths = [results.of_run("requests", run_id)["prompt_tokens"].max() for run_id in run_ids]
    return max((int(tokens) for tokens in lengths if not pd.isna(tokens)), default=None)


def send_ms(results: Results, run_ids: Iterable[str]) -> float:
    """Median time that sending one request takes the client, from submissions in a row that were all overdue."""
    waits: list[FloatArray] = []
    for run_id in run_ids:
        sent = results.of_run("requests", run_id).dropna(subset=["t_submit_s", "t_sched_s"]).sort_values("t_submit_s")
        due, at = floats(sent["t_sched_s"]), floats(sent["t_submit_s"])
        waits.append(np.diff(at)[due[1:] < at[:-1]] * 1000)
    known = np.concatenate(waits) if waits else np.empty(0)
    return float(np.median(known)) if len(known) >= ENOUGH else 0.0


def wake_ms(results: Results, run_ids: Iterable[str], sending_ms: float) -> float:
    """Median time from a request that was sent to an idle engine (sending it takes ``sending_ms``) to its step."""
    waits: list[float] = []
    for run_id in run_ids:
        steps = results.of_run("steps", run_id).dropna(subset=["t_s", "step_ms"]).sort_values("t_s")
        sent = np.sort(floats(results.of_run("requests", run_id)["t_submit_s"].dropna()))
        begun = floats(steps["t_s"])
        ended = np.concatenate(([-np.inf], np.maximum.accumulate(begun + floats(steps["step_ms"]) / 1000)[:-1]))
        first = np.searchsorted(sent, ended, "right")
        # Nobody decodes, and whoever was sent since the last step ended had been waited for.
        idle = (floats(steps["decode_rows"]) == 0) & (first < len(sent)) & (ended < begun)
        came = sent[np.minimum(first, len(sent) - 1)] if len(sent) else begun
        waits += [float(w) * 1000 for w in (begun - came)[idle & (came <= begun)]]
    return max(0.0, float(np.median(waits)) - sending_ms) if waits else 0.0


def floats(values: pd.Series) -> FloatArray:
    """A column as numbers; NaN where it has none."""
    return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64)
