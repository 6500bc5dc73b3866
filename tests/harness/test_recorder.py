from __future__ import annotations

import threading

import pytest

from harness.record import Outcome, TokenChunk
from harness.recorder import Progress, Recorder, SinkViolation
from workloads.workload import ScheduledRequest, Workload


def test_everything_lands_in_its_record(fakes):
    recorder = Recorder(fakes.workload([0.0, 0.0]))
    recorder.sent("r1", 10, 12)
    recorder.on_admit("r1", 20)
    recorder.on_tokens("r1", [5], 30)
    recorder.on_tokens("r1", [], 35)  # an empty delivery is no token
    recorder.on_tokens("r1", [6, 7], 40)
    recorder.on_end("r1", Outcome.OK_EOS, 50, cached_tokens=2, padding_prompt_tokens=None)
    record = recorder.records()[1]
    assert (record.t_sched_ns, record.t_submit_ns, record.t_admit_ns, record.t_done_ns) == (10, 12, 20, 50)
    assert record.chunks == [TokenChunk(30, (5,)), TokenChunk(40, (6, 7))]
    assert (record.outcome, record.cached_tokens, record.recomputed_tokens) == (Outcome.OK_EOS, 2, None)
    assert recorder.progress() == Progress(sent=1, ended=1, total=2, tokens=3)
    assert not recorder.wait_all_ended(timeout_s=0)
    recorder.check()


def test_admission_again_after_a_preemption_keeps_the_first_time(fakes):
    recorder = Recorder(fakes.workload([0.0]))
    recorder.on_admit("r0", 1)
    recorder.on_admit("r0", 9)
    assert recorder.records()[0].t_admit_ns == 1


def test_success_without_a_token_is_empty(fakes):
    recorder = Recorder(fakes.workload([0.0]))
    recorder.on_end("r0", Outcome.OK_EOS, 5)
    assert recorder.records()[0].outcome is Outcome.EMPTY
    assert recorder.wait_all_ended(0)


@pytest.mark.parametrize(
    "breach, message",
    [
        (lambda r: r.on_end("r0", Outcome.CANCELLED, 2), "'r0' after its end"),
        (lambda r: r.on_tokens("r0", [1], 2), "tokens of 'r0' after its end"),
        (lambda r: r.on_tokens("nobody", [1], 2), "unknown request 'nobody'"),
        (lambda r: r.on_end("r1", Outcome.EMPTY, 2, speed=3), "unknown fact 'speed'"),
    ],
)
def test_breaches_of_the_contract_fail_the_run_and_not_the_engine(fakes, breach, message):
    recorder = Recorder(fakes.workload([0.0, 0.0]))
    recorder.on_tokens("r0", [1], 1)
    recorder.on_end("r0", Outcome.OK_LENGTH, 1)
    breach(recorder)
    assert recorder.records()[0].outcome is Outcome.OK_LENGTH
    with pytest.raises(SinkViolation, match=message):
        recorder.check()


def test_same_id_twice_is_refused():
    requests = (ScheduledRequest("a", 0.0, (1,), 1), ScheduledRequest("a", 0.0, (2,), 1))
    with pytest.raises(ValueError, match="unique"):
        Recorder(Workload("twice", requests))


def test_many_threads_lose_nothing(fakes):
    recorder = Recorder(fakes.workload([0.0] * 8))

    def answer(k):
        for i in range(500):
            recorder.on_tokens(f"r{k}", [i], i)
        recorder.on_end(f"r{k}", Outcome.OK_LENGTH, 500)

    threads = [threading.Thread(target=answer, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    assert recorder.wait_all_ended(20)
    for thread in threads:
        thread.join()
    assert recorder.progress().tokens == 4000
    assert all([c.token_ids for c in r.chunks] == [(i,) for i in range(500)] for r in recorder.records())
    recorder.check()


def test_nothing_to_wait_for():
    assert Recorder(Workload("none", ())).wait_all_ended(0)


def test_b15_hidden_tokens_are_counted_as_the_server_states(fakes):
    """Three deliveries of unknown size: one token each if the server says 3, else of unknown sizes."""
    recorder = Recorder(fakes.workload([0.0] * 3))
    for name, total in (("r0", 3), ("r1", 5), ("r2", None)):
        for t in (10, 20, 30):
            recorder.on_hidden_tokens(name, None, t)
        recorder.on_hidden_tokens(name, 0, 35)  # an empty delivery is no token
        recorder.on_end(name, Outcome.OK_EOS, 40, output_tokens=total, output_counted_by="total", prompt_tokens=None)
    three, five, silent = recorder.records()
    assert [c.size for c in three.chunks] == [1, 1, 1]
    assert [c.size for c in five.chunks] == [None] * 3
    assert (three.output_tokens, five.output_tokens, silent.output_tokens) == (3, 5, None)
    assert [c.token_ids for c in silent.chunks] == [None] * 3
    assert silent.prompt_tokens == silent.planned_prompt_tokens == 3  # what was sent stays known


def test_changes_are_given_out_once(fakes):
    recorder = Recorder(fakes.workload([0.0, 0.0]))
    recorder.sent("r1", 10, 12)
    recorder.on_tokens("r1", [5, 6], 30)
    first = recorder.take_changes()
    assert [(k, r.t_submit_ns) for k, r in first.requests] == [(1, 12)]
    assert {name: len(data) for name, data in first.columns.items()} == {
        "requests": 4, "times_ns": 8, "sizes": 4, "ids_seen": 4, "ids": 16,
    }  # fmt: skip
    assert recorder.take_changes().requests == []
    recorder.on_end("r1", Outcome.OK_EOS, 50)
    second = recorder.take_changes()
    assert [(k, r.outcome) for k, r in second.requests] == [(1, Outcome.OK_EOS)]
    assert set(second.columns.values()) == {b""}


def test_an_id_no_integer_column_holds_is_a_breach(fakes):
    recorder = Recorder(fakes.workload([0.0]))
    recorder.on_tokens("r0", [1 << 70], 1)
    recorder.on_tokens("r0", [1, 1 << 70], 1)
    with pytest.raises(SinkViolation, match=r"token id of 'r0' is too large.*and 1 more"):
        recorder.check()
    assert len(recorder.records()[0].chunks) == 0
