"""The SLO applied to a run: which requests were good, how many a second, and whether the run kept its limits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from harness.metrics.metric import HIGHER, RunMetric, RunView, percentile, rate
from harness.metrics.observations import BoolArray, FloatArray, Observations
from harness.record import Outcome
from harness.slo import Slo

# Limit of a request, and the request metric that it limits.
_REQUEST_LIMITS = {"ttft_ms": "ttft_sched_ms", "itl_ms": "itl_max_ms", "tpot_ms": "tpot_ms", "e2e_ms": "e2e_ms"}


def good_requests(o: Observations, latencies: Mapping[str, FloatArray], slo: Slo) -> BoolArray:
    """[requests] which ended ok within every limit of the SLO on one request.

    A limit on what a request does not have (the gaps of a request with one token) is kept.
    """
    good = o.ok.copy()
    for name, limit in slo.request_limits.items():
        values = latencies[_REQUEST_LIMITS[name]]
        good &= np.isnan(values) | (values <= limit)
    return good


def _n_good(run: RunView) -> int | None:
    slo = run.record.slo
    if slo is None or not slo.request_limits:
        return None
    return int(good_requests(run.observations, run.latencies, slo).sum())


def _goodput(run: RunView) -> float | None:
    good = _n_good(run)
    return None if good is None else rate(good, run.wall_s)


def _measured(run: RunView, limit: str) -> float | None:
    """The percentile that ``limit`` (``ttft_p95_ms``) limits. A failed request never answered: it counts as infinite,
    so that an engine that drops its slow requests does not look fast."""
    name, q = limit.removesuffix("_ms").split("_p")
    if name == "itl":
        return percentile(run.gaps.itl_ms, float(q))
    o = run.observations
    known = run.latencies[{"ttft": "ttft_sched_ms", "e2e": "e2e_ms"}[name]]
    cancelled = sum(outcome == str(Outcome.CANCELLED) for outcome in o.outcomes)
    failed = len(o.ok) - int(o.ok.sum()) - cancelled
    if not failed:
        return percentile(known, float(q))
    values = np.concatenate((known[~np.isnan(known)], np.full(failed, np.inf)))
    return float(np.percentile(values, float(q), method="higher"))  # between a number and infinity there is nothing


def _broken(run: RunView) -> str | None:
    """The limits of the run that were not kept, with what was measured; "" if all were, None without limits."""
    slo = run.record.slo
    if slo is None or not slo.run_limits or not run.observations.ok.any():
        return None
    broken = []
    for name, limit in slo.run_limits.items():
        value = _measured(run, name)
        if value is not None and value > limit:
            broken.append(f"{name} {'never' if np.isinf(value) else f'{value:.4g}'} > {limit:g}")
    return ", ".join(broken)


def _met(run: RunView) -> bool | None:
    broken = _broken(run)
    return None if broken is None else not broken


METRICS = (
    RunMetric("slo", lambda run: None if run.record.slo is None else run.record.slo.as_json()),
    RunMetric("slo_met", _met),
    RunMetric("slo_broken", lambda run: _broken(run) or None),
    RunMetric("n_good", _n_good),
    RunMetric("goodput_request_s", _goodput, HIGHER),
)
