"""How the requests of a run ended, counted by cause."""

from __future__ import annotations

import json
from collections import Counter

from harness.metrics.metric import RunMetric, RunView
from harness.record import Outcome


def _n_requests(run: RunView) -> int | None:
    # A run that failed before its requests were recorded may still know how many there were to be.
    stated = run.record.identity.get("n_requests")
    if stated is not None:
        return int(stated)
    return len(run.observations.ok) or None


def _count(run: RunView, outcome: Outcome) -> int:
    return run.observations.outcomes.count(str(outcome))


def _n_ok(run: RunView) -> int:
    return int(run.observations.ok.sum())


def _n_failed(run: RunView) -> int:
    others = _n_ok(run) + _count(run, Outcome.CANCELLED) + _count(run, Outcome.UNFINISHED)
    return len(run.observations.ok) - others


METRICS = (
    RunMetric("n_requests", _n_requests),
    RunMetric("n_ok", _n_ok),
    RunMetric("n_failed", _n_failed),
    RunMetric("n_timed_out", lambda run: _count(run, Outcome.TIMEOUT)),
    RunMetric("n_cancelled", lambda run: _count(run, Outcome.CANCELLED)),
    RunMetric("n_unfinished", lambda run: _count(run, Outcome.UNFINISHED)),
    RunMetric("outcomes", lambda run: json.dumps(Counter(run.observations.outcomes), sort_keys=True)),
)
