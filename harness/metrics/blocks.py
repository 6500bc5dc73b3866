"""How requests and steps filled the KV blocks, and what stood beside them: chunks, table width, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harness.metrics.metric import RunMetric, RunView
from harness.metrics.step_log import logged


def _of_ok(run: RunView, field: str) -> list[int]:
    known = [getattr(r, field) for r, ok in zip(run.record.requests, run.observations.ok, strict=True) if ok]
    return [int(value) for value in known if value is not None]


def _chunked(run: RunView) -> int | None:
    steps = _of_ok(run, "prefill_steps")
    return sum(n > 1 for n in steps) if steps else None


def _reduced(field: str, reduce: Callable[[list[Any]], Any], of: Callable[[RunView, str], list[Any]]) -> Any:
    def compute(run: RunView) -> Any:
        values = of(run, field)
        return reduce(values) if values else None

    return compute


def _steps(run: RunView, field: str) -> list[Any]:
    return logged(run.record, field)


def _mean(values: list[Any]) -> float:
    return float(np.mean(values))


def _median(values: list[Any]) -> float:
    return float(np.median(values))


METRICS = (
    RunMetric("chunked_requests", _chunked),
    RunMetric("prefill_steps_max", _reduced("prefill_steps", max, _of_ok)),
    RunMetric("kv_blocks_p50", _reduced("kv_blocks", _median, _of_ok)),
    RunMetric("kv_blocks_max", _reduced("kv_blocks", max, _of_ok)),
    RunMetric("unused_slots_mean", _reduced("unused_slots", _mean, _steps)),
    RunMetric("unused_slots_max", _reduced("unused_slots", max, _steps)),
    RunMetric("table_pages_max", _reduced("table_pages", max, _steps)),
    RunMetric("peak_mask_bytes", _reduced("mask_bytes", max, _steps)),
)
