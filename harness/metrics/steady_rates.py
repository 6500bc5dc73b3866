"""Rates and latencies inside the steady window: null in a run that has none, never an average over what moves."""

from __future__ import annotations

from functools import partial

import numpy as np

from harness.metrics.metric import RunMetric, RunView, percentile, rate


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9


def _n(run: RunView) -> int | None:
    return None if run.window.seconds is None else int(run.window.holds(run.observations.t_submit).sum())


def _generated(run: RunView) -> float | None:
    o = run.observations
    if not o.counted[o.ok].all():  # a server left open how many tokens some request got
        return None
    inside = run.window.holds(o.chunk_time.astype(np.float64)) & o.ok[o.chunk_request]
    return rate(int(o.chunk_size[inside].sum()), run.window.seconds)


def _prompt(run: RunView) -> float | None:
    o = run.observations
    inside = run.window.holds(o.t_first) & o.ok
    return rate(sum(run.record.requests[i].prompt_tokens for i in np.flatnonzero(inside)), run.window.seconds)


def _requests(run: RunView) -> float | None:
    return rate(int((run.window.holds(run.observations.t_done) & run.observations.ok).sum()), run.window.seconds)


def _ttft(run: RunView, q: float) -> float | None:
    return percentile(run.latencies["ttft_ms"][run.window.holds(run.observations.t_submit)], q)


def _itl(run: RunView, q: float) -> float | None:
    return percentile(run.gaps.itl_ms[run.window.holds(run.gaps.t_ns.astype(np.float64))], q)


METRICS = (
    RunMetric("steady_state", lambda run: str(run.window.state)),
    RunMetric("steady_reason", lambda run: run.window.reason),
    RunMetric("steady_start_s", lambda run: _seconds(run.window.start_ns)),
    RunMetric("steady_end_s", lambda run: _seconds(run.window.end_ns)),
    RunMetric("steady_n", _n),
    RunMetric("steady_gen_tok_s", _generated),
    RunMetric("steady_prompt_tok_s", _prompt),
    RunMetric("steady_request_s", _requests),
    *(RunMetric(f"steady_ttft_p{q}_ms", partial(_ttft, q=q)) for q in (50, 95)),
    *(RunMetric(f"steady_itl_p{q}_ms", partial(_itl, q=q)) for q in (50, 99)),
)
