"""Sessions and closed loops driven for real: what is sent when, with which prompt, and what is recorded."""

from __future__ import annotations

import pytest

from harness.clock import FakeClock, RealClock
from harness.driver import drive
from harness.preparation import check_compatible
from harness.record import Outcome
from harness.recorder import Recorder
from workloads.workload import ScheduledRequest, Workload


def session(name: str, turns: int = 3, think_s: float = 0.25, takes_answer: bool = True) -> list[ScheduledRequest]:
    """Turns of 2 new ids and 2 answered ones; the plan has -1 in the answers' places."""
    made: list[ScheduledRequest] = []
    prompt: tuple[int, ...] = ()
    for k in range(turns):
        prompt += (10 * k + 1, 10 * k + 2)
        follows = f"{name}{k - 1}" if k else None
        made.append(
            ScheduledRequest(f"{name}{k}", 0.0, prompt, 2, None, 0, follows, think_s * bool(k), takes_answer and k > 0)
        )
        prompt += (-1, -1)
    return made


class Answering:
    """Mixed into a backend: answers with ids that depend on the request, and keeps the prompts it was given."""

    def answer(self, request):
        self.prompts = getattr(self, "prompts", {}) | {request.request_id: request.prompt_ids}
        number = int(request.request_id[1:])
        self.sink.on_admit(request.request_id, self.now())
        for token in self.answers_of(number):
            self.sink.on_tokens(request.request_id, [token], self.now())
        self.sink.on_end(request.request_id, Outcome.OK_EOS, self.now())

    def answers_of(self, number):
        return [100 + number, 200 + number]


def test_prompts_hold_what_was_answered_and_turns_wait(fakes):
    class Backend(Answering, fakes.InstantBackend):
        pass

    clock = FakeClock(start_ns=1_000)
    w = Workload("w", tuple(session("a")))
    backend, recorder = Backend(clock.now_ns), Recorder(w)
    result = drive(w, backend, recorder, clock, timeout_s=10)
    assert not result.timed_out
    assert backend.input_closed
    assert backend.prompts == {
        "a0": (1, 2),
        "a1": (1, 2, 100, 200, 11, 12),
        "a2": (1, 2, 100, 200, 11, 12, 101, 201, 21, 22),
    }
    records = recorder.records()
    assert [r.t_sched_ns - 1_000 for r in records] == [0, 250_000_000, 500_000_000]  # think time after each end
    assert [r.t_submit_ns - r.t_sched_ns for r in records] == [0, 0, 0]
    assert clock.sleeps == 2
    assert [r.prompt_tokens for r in records] == [2, 6, 10]
    assert [r.holds_answer_of for r in records] == [None, "a0", "a1"]
    assert result.unseen_answers == 0
    assert {k: w.sent_ids(k, {"a0": (100, 200), "a1": (101, 201)}) for k in ("a0", "a1", "a2")} == backend.prompts


def test_a_shorter_answer_makes_a_shorter_prompt(fakes):
    class Backend(Answering, fakes.InstantBackend):
        def answers_of(self, number):
            return [100] if number == 0 else [5, 6]

    clock = FakeClock()
    w = Workload("w", tuple(session("a")))
    backend, recorder = Backend(clock.now_ns), Recorder(w)
    drive(w, backend, recorder, clock, timeout_s=10)
    assert backend.prompts["a2"] == (1, 2, 100, 11, 12, 5, 6, 21, 22)
    assert [(r.prompt_tokens, r.planned_prompt_tokens) for r in recorder.records()] == [(2, 2), (5, 6), (9, 10)]


def test_answers_that_are_not_shown_stay_planned_and_are_counted(fakes):
    class Hidden(Answering, fakes.InstantBackend):
        def answer(self, request):
            self.prompts = getattr(self, "prompts", {}) | {request.request_id: request.prompt_ids}
            self.sink.on_hidden_tokens(request.request_id, 2, self.now())
            self.sink.on_end(request.request_id, Outcome.OK_LENGTH, self.now())

    clock = FakeClock()
    w = Workload("w", tuple(session("a")))
    backend, recorder = Hidden(clock.now_ns), Recorder(w)
    result = drive(w, backend, recorder, clock, timeout_s=10)
    assert backend.prompts == {r.request_id: r.prompt_ids for r in w.requests}
    assert result.unseen_answers == 2


@pytest.mark.parametrize("how", ["fails", "raises", "is empty"])
def test_a_session_ends_with_a_turn_without_answer(fakes, how):
    class Backend(Answering, fakes.InstantBackend):
        def answer(self, request):
            if request.request_id != "a1":
                super().answer(request)
            elif how == "raises":
                raise RuntimeError("gone")
            else:
                ends = {"fails": Outcome.ENGINE_ERROR, "is empty": Outcome.OK_EOS}
                self.sink.on_end("a1", ends[how], self.now())

    clock = FakeClock()
    w = Workload("w", (*session("a", 4), *session("b", 2)), concurrency=1)
    backend, recorder = Backend(clock.now_ns), Recorder(w)
    result = drive(w, backend, recorder, clock, timeout_s=10)
    assert not result.timed_out
    outcomes = {r.request_id: r.outcome for r in recorder.records()}
    failed = Outcome.EMPTY if how == "is empty" else Outcome.ENGINE_ERROR
    assert [outcomes[k] for k in ("a0", "a1", "a2", "a3")] == [Outcome.OK_EOS, failed, *[Outcome.CANCELLED] * 2]
    assert outcomes["b1"] is Outcome.OK_EOS  # the place went to the next session
    never_sent = recorder.records()[2]
    assert never_sent.t_submit_ns is None
    assert never_sent.error == f"not sent: a1, before it in its session, ended as {failed.value}"
    recorder.check()


def test_clients_think_before_their_next_request(fakes):
    clock = FakeClock()
    requests = tuple(ScheduledRequest(f"r{k}", 0.0, (1,), 1, think_s=0.5) for k in range(4))
    w = Workload("w", requests, concurrency=2)
    recorder = Recorder(w)
    drive(w, fakes.InstantBackend(clock.now_ns), recorder, clock, timeout_s=10)
    assert [r.t_sched_ns / 1e9 for r in recorder.records()] == [0.0, 0.0, 0.5, 0.5]


def test_turns_keep_to_real_time_while_others_are_waited_for(fakes):
    """A turn that falls due while the sender sleeps for a later request is sent at its time, not after that one."""

    class Backend(Answering, fakes.InstantBackend):
        pass

    w = Workload("w", (*session("a", 2, think_s=0.02), ScheduledRequest("z9", 0.4, (1,), 1)))
    backend, recorder = Backend(RealClock().now_ns), Recorder(w)
    result = drive(w, backend, recorder, RealClock(), timeout_s=20)
    assert not result.timed_out
    assert backend.submitted == ["a0", "a1", "z9"]
    a0, a1, z9 = recorder.records()
    assert a1.t_sched_ns == a0.t_done_ns + 20_000_000
    assert a1.t_submit_ns >= a1.t_sched_ns
    assert z9.t_sched_ns == result.t_start_ns + 400_000_000


def test_a_sender_that_waits_for_an_answer_ends_at_the_timeout(fakes):
    w = Workload("w", tuple(session("a")))
    backend, recorder = fakes.PacedBackend(RealClock().now_ns), Recorder(w)
    result = drive(w, backend, recorder, RealClock(), timeout_s=0.2)
    assert result.timed_out
    assert backend.submitted == ["a0"]
    assert not backend.input_closed


def test_a_wave_that_might_never_fill_is_refused():
    w = Workload("w", tuple(session("a")))
    with pytest.raises(ValueError, match=r"turns of sessions wait .* set engine\.wave_timeout_s"):
        check_compatible(w, {"name": "static", "wave": 1, "wave_timeout_s": None})
    check_compatible(w, {"name": "static", "wave": 1, "wave_timeout_s": 0.1})
    check_compatible(w, {"name": "ours"})
