"""Latencies of single requests. Null unless the request ended ok; the clock stamps themselves are kept for all."""

from __future__ import annotations

import numpy as np

from harness.metrics.inter_token import Gaps
from harness.metrics.metric import RequestMetric
from harness.metrics.observations import FloatArray, Observations


def _ok_ms(o: Observations, later: FloatArray, earlier: FloatArray) -> FloatArray:
    return np.where(o.ok, (later - earlier) / 1e6, np.nan)


def _sched_lag(o: Observations, _: Gaps) -> FloatArray:
    # The sender's property, not the engine's: known for every request that was sent, however it ended.
    return (o.t_submit - o.t_sched) / 1e6


def _ttft(o: Observations, _: Gaps) -> FloatArray:
    return _ok_ms(o, o.t_first, o.t_submit)


def _ttft_sched(o: Observations, _: Gaps) -> FloatArray:
    return _ok_ms(o, o.t_first, o.t_sched)


def _queue(o: Observations, _: Gaps) -> FloatArray:
    return _ok_ms(o, o.t_admit, o.t_submit)


def _prefill_delay(o: Observations, _: Gaps) -> FloatArray:
    if o.held is None:
        return np.full(len(o.ok), np.nan)
    starts, ends = o.held[:, 0], o.held[:, 1]
    before = np.concatenate(([0.0], np.cumsum(ends - starts)))  # ns held in the spans before each

    def held_until(t: FloatArray) -> FloatArray:
        k = np.searchsorted(starts, t, side="right")
        inside = np.where(k > 0, np.maximum(0.0, ends[k - 1] - t), 0.0) if len(ends) else 0.0
        return before[k] - inside

    known = o.ok & ~np.isnan(o.t_admit)
    return np.where(known, (held_until(o.t_admit) - held_until(o.t_submit)) / 1e6, np.nan)


def _prefill(o: Observations, _: Gaps) -> FloatArray:
    return _ok_ms(o, o.t_first, o.t_admit)


def _e2e(o: Observations, _: Gaps) -> FloatArray:
    return _ok_ms(o, o.t_last, o.t_submit)


def _tpot(o: Observations, gaps: Gaps) -> FloatArray:
    # One delivery, however many tokens, holds no time between tokens: null, not 0.
    deliveries = np.bincount(o.chunk_request, minlength=len(o.ok))
    known = o.ok & (deliveries > 1) & o.counted & (o.n_tokens > 1)
    result = np.full(len(o.ok), np.nan)
    result[known] = (o.t_last[known] - o.t_first[known]) / (o.n_tokens[known] - 1) / 1e6
    return result


def _itl_mean(o: Observations, gaps: Gaps) -> FloatArray:
    known = ~np.isnan(gaps.itl_ms)
    count = np.bincount(gaps.request[known], minlength=len(o.ok))
    total = np.bincount(gaps.request[known], weights=gaps.itl_ms[known], minlength=len(o.ok))
    return np.divide(total, count, out=np.full(len(o.ok), np.nan), where=count > 0)


def _itl_max(o: Observations, gaps: Gaps) -> FloatArray:
    largest = np.full(len(o.ok), -np.inf)
    known = ~np.isnan(gaps.itl_ms)
    np.maximum.at(largest, gaps.request[known], gaps.itl_ms[known])
    return np.where(np.isinf(largest), np.nan, largest)


METRICS = (
    RequestMetric("sched_lag_ms", _sched_lag),
    RequestMetric("ttft_ms", _ttft),
    RequestMetric("ttft_sched_ms", _ttft_sched),
    RequestMetric("queue_ms", _queue),
    RequestMetric("prefill_ms", _prefill),
    RequestMetric("prefill_delay_ms", _prefill_delay),
    RequestMetric("tpot_ms", _tpot),
    RequestMetric("itl_mean_ms", _itl_mean),
    RequestMetric("itl_max_ms", _itl_max),
    RequestMetric("e2e_ms", _e2e),
)
