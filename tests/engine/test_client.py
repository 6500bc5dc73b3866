"""Requests and consumers: what clients ask of the thread that runs the loop, and what they get from it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import engine.intake
from engine import QueueFull, RequestStatus

Open = Callable[..., Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]
Everything = Callable[[Any], dict[str, Any]]
Started = Callable[[Callable[[], Any]], threading.Thread]

PROMPTS = [[5, 9, 11], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8], [6], [31, 41, 59, 26]]


# --- requests -------------------------------------------------------------------------------------------------------


def test_ids_are_given_or_generated_and_never_collide(
    open_manager: Open, everything: Everything, started_thread: Started
) -> None:
    """A-req-01: 100 requests from 4 threads, one of them named as a generated id would be."""
    manager = open_manager(num_blocks=200)
    ids: list[str] = []
    ids.append(manager.add_request([1, 2], request_id="req_7", max_new_tokens=400))
    threads = [
        started_thread(lambda: ids.extend(manager.add_request([1, 2], max_new_tokens=1) for _ in range(25)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.join(20)
    assert len(set(ids)) == 101
    manager.cancel_request("req_7")
    assert set(everything(manager)) == set(ids)


def test_ids_of_a_batch_match_its_inputs(
    open_manager: Open, m1: Any, reference: Reference, everything: Everything
) -> None:
    """A-req-02, A-req-03: sorted inside, where prefixes are shared, and answered by position."""
    inputs = [[1, 2, 3], [9, 9], [1, 2, 4], [9, 8]]
    for sharing, order in ((True, [1, 3, 2, 0]), (False, [0, 1, 2, 3])):
        manager = open_manager(start=False, allow_block_sharing=sharing)
        ids = manager.add_requests(inputs, max_new_tokens=3)
        assert [order.request_id for order in manager._intake._orders] == [ids[i] for i in order]
        manager.start()
        done = everything(manager)
        assert [done[i].prompt_ids for i in ids] == inputs
        assert [done[i].generated_tokens for i in ids] == [reference(m1, p, 3) for p in inputs]


def test_cancel_frees_the_blocks_and_leaves_others_alone(
    open_manager: Open,
    m1: Any,
    gate: Any,
    reference: Reference,
    everything: Everything,
) -> None:
    """A-req-04."""
    manager = open_manager(allow_block_sharing=False)
    g = gate(after=4)
    manager.add_request(PROMPTS[0], request_id="a", max_new_tokens=40)
    manager.add_request(PROMPTS[1], request_id="b", max_new_tokens=20)
    assert g.reached.wait(10)
    manager.cancel_request("a")
    manager.cancel_request("unknown")
    g.open()
    done = everything(manager)
    assert done["a"].status is RequestStatus.CANCELLED
    assert done["a"].error == "cancelled by the client"
    partial = done["a"].generated_tokens
    assert 0 < len(partial) < 40
    assert partial == reference(m1, PROMPTS[0], 40)[: len(partial)]
    assert done["b"].generated_tokens == reference(m1, PROMPTS[1], 20)
    manager.cancel_request("b")  # over: no effect
    assert manager.get_result(timeout=0.05) is None
    assert manager._core.cache.pool.num_available == 32
    assert manager.counters()["cancelled"] == 1


def test_cancel_of_a_queued_request(open_manager: Open, m1: Any, gate: Any, everything: Everything) -> None:
    manager = open_manager(max_requests_per_batch=1)
    g = gate(after=1)
    manager.add_request(PROMPTS[0], request_id="a")
    manager.add_request(PROMPTS[1], request_id="b")
    assert g.reached.wait(10)
    manager.cancel_request("b")
    g.open()
    done = everything(manager)
    assert (done["b"].status, done["b"].generated_tokens) == (RequestStatus.CANCELLED, [])
    assert done["a"].status is RequestStatus.FINISHED


def test_a_full_queue_refuses_after_a_while(
    open_manager: Open,
    m1: Any,
    gate: Any,
    monkeypatch: pytest.MonkeyPatch,
    everything: Everything,
    started_thread: Started,
) -> None:
    manager = open_manager(max_requests_per_batch=1, max_queue_size=2)
    g = gate()
    manager.add_request(PROMPTS[0])
    assert g.reached.wait(10)
    manager.add_request(PROMPTS[1])
    manager.add_request(PROMPTS[2])
    times = iter([0.0, 5.0, 11.0])
    monkeypatch.setattr(engine.intake, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with pytest.raises(QueueFull, match="2 requests already wait"):
        manager.add_request(PROMPTS[3])
    monkeypatch.undo()
    waiting = started_thread(lambda: manager.add_request(PROMPTS[3], request_id="late"))
    g.open()  # room appears: the waiting submitter goes on
    waiting.join(10)
    assert not waiting.is_alive()
    assert "late" in everything(manager)


def test_a_patient_submitter_waits_as_long_as_the_loop_lives(
    open_manager: Open, gate: Any, everything: Everything, started_thread: Started
) -> None:
    manager = open_manager(max_requests_per_batch=1, max_queue_size=1)
    g = gate()
    manager.add_request(PROMPTS[0])
    assert g.reached.wait(10)
    manager.add_request(PROMPTS[1])
    with pytest.raises(QueueFull):
        manager.add_request(PROMPTS[2], queue_timeout=0.0)
    patient = started_thread(lambda: manager.add_request(PROMPTS[2], request_id="patient", queue_timeout=None))
    patient.join(0.2)
    assert patient.is_alive()
    g.open()
    patient.join(10)
    assert "patient" in everything(manager)


def test_threads_that_submit_at_once_do_not_overfill_the_queue(
    open_manager: Open, gate: Any, everything: Everything, started_thread: Started
) -> None:
    manager = open_manager(max_requests_per_batch=1, max_queue_size=3)
    g = gate()
    manager.add_request(PROMPTS[0])
    assert g.reached.wait(10)
    threads = [started_thread(lambda: manager.add_request(PROMPTS[1], queue_timeout=None)) for _ in range(12)]
    for thread in threads:
        thread.join(0.05)
    assert sum(request.admitted_time < 0 for request in manager._intake.live.values()) == 3
    g.open()
    for thread in threads:
        thread.join(10)
    assert len(everything(manager)) == 13


# --- consumers ------------------------------------------------------------------------------------------------------


def test_results_come_in_order_of_completion(open_manager: Open) -> None:
    """A-res-01, A-res-02."""
    manager = open_manager(start=False)
    for name, n in (("long", 20), ("short_0", 3), ("short_1", 5)):
        manager.add_request(PROMPTS[0], request_id=name, max_new_tokens=n)
    manager.start()
    assert [o.request_id for o in manager] == ["short_0", "short_1", "long"]


def test_get_result_of_a_request_that_is_not_the_next_loses_nothing(open_manager: Open) -> None:
    """A-res-03."""
    manager = open_manager(start=False)
    manager.add_request(PROMPTS[0], request_id="a", max_new_tokens=2)
    manager.add_request(PROMPTS[1], request_id="b", max_new_tokens=4)
    manager.start()
    manager.stop()
    assert manager.get_result(request_id="zz") is None
    assert manager.get_result(request_id="b") is None
    assert manager.get_result(request_id="a").request_id == "a"
    assert manager.get_result(request_id="b").request_id == "b"


def test_a_stream_has_one_output_a_token(open_manager: Open, m1: Any, reference: Reference) -> None:
    """A-str-01, A-str-03."""
    manager = open_manager(start=False, return_logprobs=True)
    manager.add_request(PROMPTS[0], request_id="s", streaming=True, record_timestamps=True)
    manager.add_request(PROMPTS[1], request_id="other")
    manager.start()
    chunks = list(manager.request_id_iter("s"))
    expected = reference(m1, PROMPTS[0], 8)
    assert [c.generated_tokens for c in chunks] == [expected[: n + 1] for n in range(8)]
    assert [c.status for c in chunks] == [RequestStatus.DECODING] * 7 + [RequestStatus.FINISHED]
    assert [len(c.logprobs) for c in chunks] == [len(c.timestamps) for c in chunks] == list(range(1, 9))
    (only,) = list(manager.request_id_iter("other"))
    assert only.status is RequestStatus.FINISHED
    assert list(manager.request_id_iter("other")) == []
    assert list(manager.request_id_iter("unknown")) == []


@pytest.mark.parametrize("end", ["cancel", "hard_stop", "failure"])
def test_a_stream_ends_at_any_terminal_state(
    end: str, open_manager: Open, m1: Any, gate: Any, fail_step: Any, started_thread: Started
) -> None:
    manager = open_manager()
    g = gate(after=3)
    chunks: list[Any] = []
    manager.add_request(PROMPTS[0], request_id="s", streaming=True, max_new_tokens=100)
    consumer = started_thread(lambda: chunks.extend(manager.request_id_iter("s")))
    assert g.reached.wait(10)
    if end == "cancel":
        manager.cancel_request("s")
    elif end == "hard_stop":
        manager.stop(block=False, hard_stop=True)
    else:
        fail_step(1, RuntimeError("broken"))
    g.open()
    consumer.join(5)
    assert not consumer.is_alive()
    assert [c.is_finished() for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].status is (RequestStatus.CANCELLED if end == "cancel" else RequestStatus.FAILED)


def test_a_consumer_that_never_reads_holds_nobody_up(open_manager: Open, m1: Any, reference: Reference) -> None:
    manager = open_manager()
    manager.add_request(PROMPTS[0], request_id="unread", streaming=True, max_new_tokens=60)
    for _ in range(3):
        manager.add_request(PROMPTS[1], request_id="read", streaming=True)
        assert [c.num_generated for c in manager.request_id_iter("read")] == list(range(1, 9))
    manager.stop()
    unread = [o for o in manager if o.request_id == "unread"]
    assert [o.num_generated for o in unread] == list(range(1, 61))
    assert unread[-1].generated_tokens == reference(m1, PROMPTS[0], 60)


def test_outputs_reach_an_event_loop(open_manager: Open, m1: Any, reference: Reference) -> None:
    manager = open_manager()

    async def main() -> list[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        manager.register_result_handler("a", queue.put_nowait)
        manager.add_request(PROMPTS[0], request_id="a", streaming=True)
        outputs = [await queue.get()]
        while not outputs[-1].is_finished():
            outputs.append(await queue.get())
        return outputs

    outputs = asyncio.run(asyncio.wait_for(main(), 10))
    assert [o.num_generated for o in outputs] == list(range(1, 9))
    assert outputs[-1].generated_tokens == reference(m1, PROMPTS[0], 8)
    assert manager.get_result(timeout=0.02) is None
