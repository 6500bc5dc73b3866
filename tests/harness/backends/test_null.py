from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from harness.backends import BACKENDS, create, needs_weights
from harness.backends.null import NullBackend, NullSettings
from harness.calibration import run_null
from harness.clock import RealClock
from harness.record import Outcome
from workloads.workload import ScheduledRequest, Workload


def workload(n, tokens, due_s=0.0):
    return Workload("known", tuple(ScheduledRequest(f"r{k}", k * due_s, (1,), tokens) for k in range(n)))


def test_the_schedule_repeats_after_eight_requests():
    settings = NullSettings(ttft_ms=50, ttft_step_ms=5, itl_ms=20, itl_step_ms=1)
    assert [settings.first_ms(k) for k in (0, 1, 7, 8, 9)] == [50, 55, 85, 50, 55]
    assert [settings.gap_ms(k) for k in (0, 1, 7, 8)] == [20, 21, 27, 20]


def test_nothing_comes_before_its_time_and_lateness_does_not_add_up():
    """What a clock guarantees on any machine: no delivery is early, and the k-th is due k gaps after the first."""
    settings = NullSettings(ttft_ms=4, ttft_step_ms=2, itl_ms=3, itl_step_ms=1)
    record = run_null(workload(10, tokens=5), settings, RealClock())
    assert [r.outcome for r in record.requests] == [Outcome.OK_LENGTH] * 10
    for k, r in enumerate(record.requests):
        assert [c.size for c in r.chunks] == [1] * 5
        assert r.output_counted_by == "counts"
        for i, chunk in enumerate(r.chunks):
            due_ms = settings.first_ms(k) + i * settings.gap_ms(k)
            assert (chunk.time_ns - r.t_submit_ns) / 1e6 >= due_ms - 1e-3
        assert r.t_done_ns == r.chunks[-1].time_ns


def test_deliveries_of_several_tokens():
    record = run_null(workload(1, tokens=8), NullSettings(1, 0, 1, 0, tokens_per_delivery=3), RealClock())
    assert [c.size for c in record.requests[0].chunks] == [3, 3, 2]


def test_stopping_in_the_middle_leaves_open_requests_unfinished(sink):
    backend = create("null", None, {"ttft_ms": 1.0, "itl_ms": 1e6})
    backend.start(sink)
    for r in workload(2, tokens=2).requests:
        backend.submit(r)
    sink.wait_deliveries(2)
    backend.stop()
    backend.stop()
    assert {s.outcome for s in sink.seen.values()} == {Outcome.UNFINISHED}
    assert [len(s.token_ns) for s in sink.seen.values()] == [1, 1]
    assert backend.counters() == {"deliveries": 2}


def test_settings_are_read_back_and_wrong_ones_refused():
    config = create("null", None, {"itl_ms": 7.0}).config()
    assert {(c.field, c.value, c.source) for c in config} >= {("itl_ms", 7.0, "user"), ("ttft_ms", 50.0, "default")}
    with pytest.raises(ValueError, match=r"engine\.itl_ms is -1.*at least 0"):
        create("null", None, {"itl_ms": -1.0})
    with pytest.raises(ValueError, match="tokens_per_delivery is 0"):
        create("null", None, {"tokens_per_delivery": 0})
    with pytest.raises(ValueError, match=r"'itl'.*itl_ms"):
        create("null", None, {"itl": 1.0})


def test_who_needs_weights():
    assert {name: needs_weights(name) for name in BACKENDS} == {
        "ours": True, "transformers": True, "static": True, "openai_http": False, "null": False, "vllm": False,
    }  # fmt: skip
    assert NullBackend(NullSettings()).steps() == []


def test_it_serves_another_run_on_the_same_schedule(sink):
    backend = create("null", None, {"ttft_ms": 1.0, "ttft_step_ms": 0.0, "itl_ms": 0.0})
    for k in range(2):
        backend.start(sink)
        for r in workload(3, tokens=2).requests:
            backend.submit(replace(r, request_id=f"{k}-{r.request_id}"))
        sink.wait(3 * (k + 1))
        assert backend.counters() == {"deliveries": 6}
    backend.stop()


def test_an_answer_that_is_due_at_once_does_not_end_before_it_was_admitted():
    order = []
    ended = threading.Event()

    class Sink:
        def on_admit(self, request_id, time_ns):
            ended.wait(0.05)  # the delivering thread has all the time in the world
            order.append("admitted")

        def on_hidden_tokens(self, request_id, count, time_ns):
            order.append("token")

        def on_end(self, request_id, outcome, time_ns, **facts):
            order.append("ended")
            ended.set()

    backend = NullBackend(NullSettings(0.0, 0.0, 0.0, 0.0))
    backend.start(Sink())
    backend.submit(workload(1, tokens=1).requests[0])
    assert ended.wait(10)
    backend.stop()
    assert order == ["admitted", "token", "ended"]
