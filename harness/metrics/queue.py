"""Queue, cache and step counts of a run: the backend's counter if it has one, else its step log, else null."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from harness.metrics.metric import RunMetric, RunView
from harness.metrics.step_log import logged


def _counter(run: RunView, name: str) -> int | None:
    value = run.record.counters.get(name)
    return None if value is None else int(value)


def _logged(run: RunView, field: str, reduce: Callable[[list[Any]], int]) -> int | None:
    values = logged(run.record, field)
    return int(reduce(values)) if values else None


def _counted_or_logged(run: RunView, name: str, field: str, reduce: Callable[[list[Any]], int]) -> int | None:
    counted = _counter(run, name)
    return _logged(run, field, reduce) if counted is None else counted


def _steps(run: RunView) -> int | None:
    counted = _counter(run, "steps")
    return (len(run.record.steps) or None) if counted is None else counted


METRICS = (
    RunMetric("steps", _steps),
    RunMetric("offloads", partial(_counter, name="offloads")),
    RunMetric("soft_resets", partial(_counter, name="soft_resets")),
    RunMetric("kv_blocks_total", partial(_counter, name="kv_blocks_total")),
    *(
        RunMetric(name, partial(_counted_or_logged, name=name, field=field, reduce=reduce))
        for name, field, reduce in (
            ("preemptions", "preempted", sum),
            ("graph_replays", "graph", sum),
            ("kv_blocks_free_min", "free_blocks", min),
            ("running_max", "running", max),
            ("waiting_max", "waiting", max),
            ("held_steps", "admission_held", sum),
        )
    ),
)
