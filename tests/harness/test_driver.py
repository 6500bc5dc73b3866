from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from harness.agenda import Agenda
from harness.clock import FakeClock, RealClock
from harness.driver import drive
from harness.interruption import interrupting
from harness.record import Outcome
from harness.recorder import Recorder


def test_b05_late_wake_ups_do_not_add_up(fakes):
    """2,000 arrivals at 200/s, every sleep 1 ms too long: the last is sent at 9.995 s + 1 ms, not at 11.99 s."""
    clock = FakeClock(start_ns=7_000_000_000, overshoot_ns=1_000_000)
    w = fakes.workload([k / 200 for k in range(2000)])
    recorder = Recorder(w)
    result = drive(w, fakes.InstantBackend(clock.now_ns), recorder, clock, timeout_s=30)
    assert not result.timed_out
    assert result.t_start_ns == 7_000_000_000
    assert clock.sleeps == 1999  # the path under test was taken: every request but the first was waited for
    for k, record in enumerate(recorder.records()):
        assert record.t_sched_ns == 7_000_000_000 + k * 5_000_000
        assert 0 <= record.t_submit_ns - record.t_sched_ns <= 1_000_000
    assert recorder.records()[-1].t_submit_ns - result.t_start_ns == 9_996_000_000


def test_preparing_the_schedule_delays_no_request(fakes, monkeypatch):
    clock = FakeClock()

    def slow(workload):
        clock.sleep_until(clock.now_ns() + 1_000_000_000, threading.Event())
        return Agenda(workload)

    monkeypatch.setattr("harness.driver.Agenda", slow)
    w = fakes.workload([0.0, 0.001, 0.5])
    recorder = Recorder(w)
    result = drive(w, fakes.InstantBackend(clock.now_ns), recorder, clock, timeout_s=5)
    assert result.t_start_ns == 1_000_000_000
    assert [r.t_submit_ns - r.t_sched_ns for r in recorder.records()] == [0, 0, 0]


def test_a_late_sender_catches_up_without_sleeping(fakes):
    clock = FakeClock(overshoot_ns=10_000_000)
    w = fakes.workload([0.0, 0.001, 0.002, 0.5])
    recorder = Recorder(w)
    drive(w, fakes.InstantBackend(clock.now_ns), recorder, clock, timeout_s=5)
    lags = [r.t_submit_ns - r.t_sched_ns for r in recorder.records()]
    assert lags == [0, 10_000_000, 9_000_000, 10_000_000]
    assert clock.sleeps == 2


def test_open_loop_never_waits_for_replies(fakes):
    w = fakes.workload([0.0] * 5)
    backend = fakes.PacedBackend(RealClock().now_ns)
    recorder = Recorder(w)
    result = drive(w, backend, recorder, RealClock(), timeout_s=0.2)
    assert backend.submitted == [f"r{k}" for k in range(5)]
    assert backend.input_closed
    assert result.timed_out
    assert {r.outcome for r in recorder.records()} == {Outcome.UNFINISHED}


def test_closed_loop_keeps_to_its_places(fakes):
    w = fakes.workload([0.0] * 6, concurrency=2)
    backend = fakes.PacedBackend(RealClock().now_ns)
    recorder = Recorder(w)

    def release_all():
        for _ in range(6):
            backend.release()

    releaser = threading.Thread(target=release_all)
    releaser.start()
    result = drive(w, backend, recorder, RealClock(), timeout_s=10)
    releaser.join()
    assert not result.timed_out
    assert backend.most_open <= 2
    assert all(r.outcome is Outcome.OK_LENGTH for r in recorder.records())


def test_closed_loop_that_never_gets_a_place_ends_at_the_timeout(fakes):
    w = fakes.workload([0.0] * 3, concurrency=1)
    backend = fakes.PacedBackend(RealClock().now_ns)
    recorder = Recorder(w)
    began = time.monotonic()
    result = drive(w, backend, recorder, RealClock(), timeout_s=0.2)
    assert result.timed_out
    assert time.monotonic() - began < 5
    assert backend.submitted == ["r0"]
    assert recorder.records()[1].t_submit_ns is None  # never sent: unknown, not zero


def test_a_submit_that_raises_fails_its_request_only(fakes):
    class Refusing(fakes.InstantBackend):
        def submit(self, request):
            if request.request_id == "r1":
                raise RuntimeError("the engine\nis gone")
            super().submit(request)

    clock = FakeClock()
    w = fakes.workload([0.0, 0.1, 0.2])
    recorder = Recorder(w)
    drive(w, Refusing(clock.now_ns), recorder, clock, timeout_s=5)
    outcomes = [r.outcome for r in recorder.records()]
    assert outcomes == [Outcome.OK_LENGTH, Outcome.ENGINE_ERROR, Outcome.OK_LENGTH]
    assert recorder.records()[1].error == "RuntimeError: the engine is gone"


def test_the_senders_own_failure_reaches_the_caller(fakes):
    class BrokenClock(FakeClock):
        def sleep_until(self, deadline_ns, cancelled):
            raise OSError("no timer")

    w = fakes.workload([0.0])
    with pytest.raises(OSError, match="no timer"):
        drive(w, fakes.InstantBackend(lambda: 0), Recorder(w), BrokenClock(), timeout_s=5)


def test_end_is_the_last_terminal_output(fakes):
    clock = FakeClock(start_ns=100)
    w = fakes.workload([0.0, 1.5])
    result = drive(w, fakes.InstantBackend(clock.now_ns), Recorder(w), clock, timeout_s=5)
    assert (result.t_start_ns, result.t_end_ns) == (100, 1_500_000_100)


def test_real_clock_waits_and_can_be_cancelled():
    clock, cancelled = RealClock(), threading.Event()
    deadline = clock.now_ns() + 5_000_000
    assert clock.sleep_until(deadline, cancelled)
    assert clock.now_ns() >= deadline
    cancelled.set()
    assert not clock.sleep_until(clock.now_ns() + 60_000_000_000, cancelled)


@pytest.mark.parametrize("came", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_observed(came, fakes):
    clock = RealClock()
    w = fakes.workload([0.0, 0.05, 1000.0])
    recorder = Recorder(w)

    class Interrupting(fakes.InstantBackend):
        def submit(self, request):
            super().submit(request)
            if request.request_id == "r1":
                os.kill(os.getpid(), came)

    with interrupting():
        result = drive(w, Interrupting(clock.now_ns), recorder, clock, timeout_s=20)
    assert result.interrupted is came
    assert not result.timed_out
    assert [r.outcome for r in recorder.records()] == [Outcome.OK_LENGTH, Outcome.OK_LENGTH, Outcome.UNFINISHED]
