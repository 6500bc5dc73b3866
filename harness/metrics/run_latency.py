"""Percentiles and means over the ok requests (or the pooled gaps) of one run."""

from __future__ import annotations

from functools import partial

import numpy as np

from harness.metrics.metric import LOWER, RunMetric, RunView, mean, percentile


def _request_percentile(run: RunView, metric: str, q: float) -> float | None:
    return percentile(run.latencies[metric], q)


def _gap_percentile(run: RunView, q: float) -> float | None:
    return percentile(run.gaps.itl_ms, q)


def _delivery_percentile(run: RunView, q: float) -> float | None:
    return percentile(run.gaps.icl_ms, q)


_REQUEST_PERCENTILES = {
    "ttft": (50, 95, 99),
    "ttft_sched": (50, 95, 99),
    "tpot": (50, 95),
    "e2e": (50, 95, 99),
    "queue": (50, 95),
    "prefill": (50, 95),
    "prefill_delay": (50, 95),
    "sched_lag": (99,),
}


# What arms are judged by. The others follow from these (each more verdict makes all of them less certain).
_JUDGED = {"ttft": (50, 95, 99), "tpot": (50,), "e2e": (50, 95), "queue": (50,)}


def _better(name: str, q: int) -> str | None:
    return LOWER if q in _JUDGED.get(name, ()) else None


METRICS = (
    RunMetric("ttft_mean_ms", lambda run: mean(run.latencies["ttft_ms"])),
    *(
        RunMetric(f"{name}_p{q}_ms", partial(_request_percentile, metric=f"{name}_ms", q=q), _better(name, q))
        for name, qs in _REQUEST_PERCENTILES.items()
        for q in qs
    ),
    RunMetric("itl_n", lambda run: int((~np.isnan(run.gaps.itl_ms)).sum())),
    RunMetric("itl_mean_ms", lambda run: mean(run.gaps.itl_ms)),
    *(RunMetric(f"itl_p{q}_ms", partial(_gap_percentile, q=q), LOWER) for q in (50, 95, 99)),
    *(RunMetric(f"icl_p{q}_ms", partial(_delivery_percentile, q=q)) for q in (50, 99)),
)
