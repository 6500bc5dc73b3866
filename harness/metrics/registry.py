"""Every metric by name. The definitions are the columns of :mod:`harness.tables`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from harness.metrics import (
    blocks,
    goodput,
    memory,
    offload,
    outcomes,
    queue,
    request_latency,
    run_latency,
    steady_rates,
    throughput,
)
from harness.metrics.metric import RequestMetric, RunMetric

M = TypeVar("M", RequestMetric, RunMetric)


def _register(metrics: Sequence[M]) -> dict[str, M]:
    registry: dict[str, M] = {}
    for metric in metrics:
        if metric.name in registry:
            raise ValueError(f"metric {metric.name!r} is defined twice; a metric has one definition")
        metric.column  # noqa: B018 - KeyError here, at import, if the tables do not define it
        registry[metric.name] = metric
    return registry


REQUEST_METRICS: dict[str, RequestMetric] = _register(request_latency.METRICS)

RUN_METRICS: dict[str, RunMetric] = _register(
    (
        *outcomes.METRICS,
        *throughput.METRICS,
        *steady_rates.METRICS,
        *goodput.METRICS,
        *run_latency.METRICS,
        *memory.METRICS,
        *queue.METRICS,
        *blocks.METRICS,
        *offload.METRICS,
    )
)
