"""The figures' arithmetic by hand; that they hold on a quiet machine is shown by ``python -m harness.bench``."""

from __future__ import annotations

import json

import pytest

from harness.backends.null import NullSettings
from harness.calibration import REQUESTS, TOKENS, calibrate, judge, overhead_us_per_token, run_null
from harness.clock import FakeClock, RealClock
from harness.deliveries import TokenChunk
from harness.driver import drive
from harness.metrics import compute_tables
from harness.record import Outcome, RequestRecord, RunRecord
from harness.recorder import Recorder
from harness.tables import TABLES
from workloads.workload import ScheduledRequest, Workload

MS = 1_000_000


def test_errors_by_hand():
    """Two requests on a schedule of 50 + 5k and 20 + k ms: TTFT 0.2 and 0.4 late, gaps off by 0.1, 0.1 and 0.3."""
    times = {0: (50.2, 70.3, 90.2), 1: (55.4, 76.1)}
    requests = [
        RequestRecord(
            f"r{k}", 1, len(at), t_sched_ns=k * 10 * MS, t_submit_ns=k * 11 * MS, t_done_ns=200 * MS,
            chunks=[TokenChunk(k * 11 * MS + round(ms * MS), (0,)) for ms in at], outcome=Outcome.OK_LENGTH,
        )
        for k, at in times.items()
    ]  # fmt: skip
    record = RunRecord({"run_id": "c", "engine": "null"}, requests, t_start_ns=0, t_end_ns=200 * MS)
    found = judge(record, NullSettings(50, 5, 20, 1), overhead_us=3.0)
    assert found.tokens == 5
    assert found.ttft_error_p50_ms == pytest.approx(0.3)
    assert found.itl_error_p50_ms == pytest.approx(0.1)
    assert found.itl_error_p99_ms == pytest.approx(0.1 + 0.98 * 0.2)
    assert (found.last_lag_ms, found.sched_lag_p99_ms) == (pytest.approx(1.0), pytest.approx(0.99))
    assert found.gen_tok_s == pytest.approx(5 / 0.04)
    assert found.overhead_us_per_token == 3.0


def test_ten_thousand_arrivals_do_not_drift(fakes):
    """Every sleep 0.4 ms too long: the last of 10,000 requests is sent 0.4 ms late, not 4 s."""
    clock = FakeClock(overshoot_ns=400_000)
    w = fakes.workload([k / 1000 for k in range(10_000)], tokens=1)
    recorder = Recorder(w)
    drive(w, fakes.InstantBackend(clock.now_ns), recorder, clock, timeout_s=60)
    last = recorder.records()[-1]
    assert clock.sleeps == 9_999
    assert 0 <= last.t_submit_ns - last.t_sched_ns <= 1 * MS
    assert last.t_sched_ns == 9_999 * MS


def test_a_real_calibration_fills_the_table():
    found = calibrate(RealClock())
    assert found.tokens == REQUESTS * TOKENS
    assert found.overhead_us_per_token > 0
    record = RunRecord({"run_id": "r", "engine": "ours"}, calibration=found.as_dict())
    table = compute_tables(record)["calibration"]
    assert table.iloc[0].drop("run_id").to_dict() == pytest.approx(found.as_dict())
    assert list(TABLES["calibration"].dtypes) == ["run_id", *found.as_dict()]
    assert compute_tables(RunRecord({"run_id": "r", "engine": "ours"}))["calibration"].empty


def test_recording_costs_are_of_this_thread_only():
    assert 0 < overhead_us_per_token(2000) < 1000


def test_a_run_that_cannot_end_says_so(monkeypatch):
    monkeypatch.setattr("harness.calibration._TIMEOUT_S", 0.1)
    requests = (ScheduledRequest("r", 0.0, (1,), 2),)
    with pytest.raises(RuntimeError, match="did not end within"):
        run_null(Workload("w", requests), NullSettings(ttft_ms=60_000.0), RealClock())


def test_tables_of_a_null_run_return_the_schedule():
    """Deliveries keep to absolute times, so the last of a request is never early, however late the others were."""
    settings = NullSettings(ttft_ms=30, ttft_step_ms=2, itl_ms=10, itl_step_ms=1)
    requests = tuple(ScheduledRequest(f"r{k}", 0.0, (1,), 6) for k in range(3))
    tables = compute_tables(run_null(Workload("w", requests), settings, RealClock()))
    own = tables["requests"]
    assert (own["ttft_ms"].to_numpy() >= [30, 32, 34]).all()
    assert (own["e2e_ms"].to_numpy() >= [30 + 50, 32 + 55, 34 + 60]).all()
    assert json.loads(tables["runs"].iloc[0].outcomes) == {"ok_length": 3}
