"""KV blocks that went to host memory and came back: how much, and how long coming back took."""

from __future__ import annotations

from functools import partial

from harness.metrics.metric import RunMetric, RunView, rate
from harness.metrics.step_log import logged


def _restores(run: RunView) -> int | None:
    counted = run.record.counters.get("restores")
    return None if counted is None else int(counted)


def _bytes(run: RunView, field: str) -> int | None:
    values = logged(run.record, field)
    return int(sum(values)) if values else None


def _times_ms(run: RunView) -> list[float]:
    return [float(value) for value in logged(run.record, "restore_ms")]


def _mean_ms(run: RunView) -> float | None:
    times = _times_ms(run)
    return sum(times) / len(times) if times else None


def _max_ms(run: RunView) -> float | None:
    return max(_times_ms(run), default=None)


def _gb_s(run: RunView) -> float | None:
    """Of the steps whose time was taken only: a step that was not collected has bytes and no time."""
    restored, steps = _bytes(run, "restored_bytes"), logged(run.record, "restored_bytes")
    times = _times_ms(run)
    if restored is None or len(times) != sum(value > 0 for value in steps):
        return None
    return rate(restored / 1e9, sum(times) / 1000)


METRICS = (
    RunMetric("restores", _restores),
    RunMetric("offloaded_bytes", partial(_bytes, field="offloaded_bytes")),
    RunMetric("restored_bytes", partial(_bytes, field="restored_bytes")),
    RunMetric("restore_mean_ms", _mean_ms),
    RunMetric("restore_max_ms", _max_ms),
    RunMetric("restore_gb_s", _gb_s),
)
