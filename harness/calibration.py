"""What the harness itself adds to a measurement, found by measuring a known schedule.

A short run of the ``null`` backend goes through the same sender and recorder, in the same process, right before the
measured run: what comes back beside what was asked for is the harness's error on that machine at that moment.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import numpy as np

from harness.backends.null import NullBackend, NullSettings
from harness.clock import Clock
from harness.driver import drive
from harness.interruption import Interrupted
from harness.metrics.inter_token import pool_gaps
from harness.metrics.observations import observe
from harness.record import RunRecord
from harness.recorder import Recorder
from workloads.workload import ScheduledRequest, Workload

TOKENS_PER_SECOND = 2000
REQUESTS = 50
TOKENS = 20
_ITL_MS = 1000 * REQUESTS / TOKENS_PER_SECOND
_SETTINGS = NullSettings(ttft_ms=25.0, ttft_step_ms=0.0, itl_ms=_ITL_MS, itl_step_ms=0.0)
_TIMEOUT_S = 30.0
_OVERHEAD_EVENTS = 20_000


@dataclass(frozen=True)
class Calibration:
    """Errors of a run whose every time is known; a column each in the ``calibration`` table.

    Attributes:
        tokens, gen_tok_s: how many tokens were delivered and at what rate.
        ttft_error_p50_ms, ttft_error_p99_ms: measured minus scheduled time to first token, absolute.
        itl_error_p50_ms, itl_error_p99_ms: the same of the gaps between tokens.
        sched_lag_p99_ms, last_lag_ms: how late the sender was; the last request shows whether lateness adds up.
        overhead_us_per_token: processor time of recording one token.
    """

    tokens: int
    gen_tok_s: float
    ttft_error_p50_ms: float
    ttft_error_p99_ms: float
    itl_error_p50_ms: float
    itl_error_p99_ms: float
    sched_lag_p99_ms: float
    last_lag_ms: float
    overhead_us_per_token: float

    def as_dict(self) -> dict[str, float]:
        """Columns of the ``calibration`` table."""
        return asdict(self)


def calibrate(clock: Clock) -> Calibration:
    """Measure :data:`REQUESTS` requests of :data:`TOKENS` tokens at 2,000 tokens/s (about half a second).

    Raises:
        RuntimeError: the run did not come to its end within 30 s.
    """
    gap_s = _ITL_MS / 1000 / REQUESTS  # so that deliveries are spread evenly
    requests = tuple(ScheduledRequest(f"calibration-{k}", k * gap_s, (0,), TOKENS) for k in range(REQUESTS))
    record = run_null(Workload("calibration", requests), _SETTINGS, clock)
    return judge(record, _SETTINGS, overhead_us_per_token())


def run_null(workload: Workload, settings: NullSettings, clock: Clock) -> RunRecord:
    """Drive ``workload`` against a null backend; RuntimeError if it did not end in time."""
    recorder, backend = Recorder(workload), NullBackend(settings)
    last_s = max((r.due_s for r in workload.requests), default=0.0)
    try:
        result = drive(workload, backend, recorder, clock, last_s + _TIMEOUT_S)
    finally:
        backend.stop()
    recorder.check()
    if result.interrupted is not None:
        raise Interrupted(result.interrupted)
    if result.timed_out:
        raise RuntimeError(f"the calibration run did not end within {last_s + _TIMEOUT_S:g} s")
    identity = {"run_id": workload.name, "engine": NullBackend.name}
    return RunRecord(identity, recorder.records(), t_start_ns=result.t_start_ns, t_end_ns=result.t_end_ns)


def judge(record: RunRecord, settings: NullSettings, overhead_us: float) -> Calibration:
    """Compare what was measured with ``settings``, which made it (request k of the record was the k-th submitted)."""
    o = observe(record)
    gaps = pool_gaps(o)
    n = len(record.requests)
    first = np.array([settings.first_ms(k) for k in range(n)])
    gap = np.array([settings.gap_ms(k) for k in range(n)]) / settings.tokens_per_delivery
    ttft_error = np.abs((o.t_first - o.t_submit) / 1e6 - first)
    itl_error = np.abs(gaps.itl_ms - gap[gaps.request])
    lag = (o.t_submit - o.t_sched) / 1e6
    tokens = int(o.n_tokens.sum())
    return Calibration(
        tokens=tokens,
        gen_tok_s=tokens / float(o.t_last.max() - o.t_first.min()) * 1e9,
        ttft_error_p50_ms=float(np.percentile(ttft_error, 50)),
        ttft_error_p99_ms=float(np.percentile(ttft_error, 99)),
        itl_error_p50_ms=float(np.percentile(itl_error, 50)),
        itl_error_p99_ms=float(np.percentile(itl_error, 99)),
        sched_lag_p99_ms=float(np.percentile(lag, 99)),
        last_lag_ms=float(lag[-1]),
        overhead_us_per_token=overhead_us,
    )


def overhead_us_per_token(events: int = _OVERHEAD_EVENTS) -> float:
    """Processor time in µs of this thread to record one token: the sink's call with everything it does."""
    recorder = Recorder(Workload("overhead", (ScheduledRequest("r", 0.0, (0,), events),)))
    began = time.thread_time_ns()
    for _ in range(events):
        recorder.on_tokens("r", (0,), time.perf_counter_ns())
    return (time.thread_time_ns() - began) / events / 1000
