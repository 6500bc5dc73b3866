"""Life cycle, consumers, failures: what clients see of the thread that runs the loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import engine.intake
from engine import QueueFull, RequestStatus

Open = Callable[..., Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]

PROMPTS = [[5, 9, 11], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8], [6], [31, 41, 59, 26]]


def everything(manager: Any) -> dict[str, Any]:
    return {output.request_id: output for output in manager if output.is_finished()}


def started_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# --- life cycle -----------------------------------------------------------------------------------------------------


def test_requests_added_before_start_are_served_after_it(open_manager: Open, m1: Any, reference: Reference) -> None:
    """A-mgr-01."""
    manager = open_manager(start=False)
    ids = manager.add_requests(PROMPTS[:3])
    assert not manager.is_running()
    assert manager.get_result(timeout=0.05) is None
    manager.start()
    assert manager.is_running()
    done = everything(manager)
    assert [done[i].generated_tokens for i in ids] == [reference(m1, p, 8) for p in PROMPTS[:3]]


def test_soft_stop_finishes_everything_and_results_stay(open_manager: Open, m1: Any, reference: Reference) -> None:
    """A-stop-01, A-stop-02, B03: queued and active requests are finished; iterating afterwards yields them all."""
    manager = open_manager(num_blocks=8)
    for i, prompt in enumerate(PROMPTS):
        manager.add_request(prompt, request_id=f"r{i}")
    manager.stop()
    assert not manager.is_running()
    done = everything(manager)
    assert [done[f"r{i}"].generated_tokens for i in range(5)] == [reference(m1, p, 8) for p in PROMPTS]
    assert {o.status for o in done.values()} == {RequestStatus.FINISHED}
    assert manager.get_result() is None, "nothing twice, and no waiting for more"


def test_hard_stop_fails_everything_at_once_and_keeps_partial_tokens(
    open_manager: Open, m1: Any, gate: Any, reference: Reference
) -> None:
    """A-stop-03."""
    manager = open_manager(num_blocks=300, max_requests_per_batch=3)
    g = gate(after=6)
    for i in range(4):
        manager.add_request(PROMPTS[i], request_id=f"r{i}", max_new_tokens=200)
    assert g.reached.wait(10)
    stopper = started_thread(lambda: manager.stop(hard_stop=True))
    g.open()
    stopper.join(10)
    assert not manager.is_running()
    done = everything(manager)
    assert {o.status for o in done.values()} == {RequestStatus.FAILED}
    assert all(o.error.startswith("RuntimeError: the manager was stopped") for o in done.values())
    for i in range(3):
        tokens = done[f"r{i}"].generated_tokens
        assert 0 < len(tokens) < 200
        assert tokens == reference(m1, PROMPTS[i], 200)[: len(tokens)]
    assert done["r3"].generated_tokens == []
    assert manager.counters()["failed"] == 4


def test_after_stop_new_requests_are_refused_with_a_warning(
    open_manager: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """A-stop-04."""
    manager = open_manager()
    manager.stop()
    with caplog.at_level(logging.WARNING):
        assert manager.add_request([1, 2]) is None
        assert manager.add_requests([[1], [2]]) == []
    assert sum("refused" in record.message for record in caplog.records) == 3


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("hard", [False, True])
def test_start_after_stop_begins_a_second_run_with_equal_results(
    attention: str, hard: bool, open_manager: Open, tiny_model: Any, reference: Reference
) -> None:
    """A-stop-05."""
    model = tiny_model("tiny-llama", attention)
    manager = open_manager(model)
    for _ in range(2):
        assert manager.add_request(PROMPTS[0]) is not None
        output = manager.get_result(timeout=10)
        assert output.generated_tokens == reference(model, PROMPTS[0], 8)
        manager.stop(hard_stop=hard)
        manager.start()
    assert manager.is_running()


def test_start_waits_for_a_stop_in_progress(open_manager: Open, m1: Any, gate: Any, reference: Reference) -> None:
    manager = open_manager()
    g = gate(after=2)
    manager.add_request(PROMPTS[0], request_id="first")
    assert g.reached.wait(10)
    manager.stop(block=False)
    restart = started_thread(manager.start)
    time.sleep(0.02)
    assert restart.is_alive()
    g.open()
    restart.join(10)
    assert manager.is_running()
    manager.add_request(PROMPTS[1], request_id="second")
    done = everything(manager)
    assert done["first"].generated_tokens == reference(m1, PROMPTS[0], 8)
    assert done["second"].generated_tokens == reference(m1, PROMPTS[1], 8)


def test_start_of_a_running_manager_has_no_effect(open_manager: Open, caplog: pytest.LogCaptureFixture) -> None:
    manager = open_manager()
    thread = manager._thread
    with caplog.at_level(logging.WARNING):
        manager.start()
    assert manager._thread is thread
    assert "already running" in caplog.text


def test_a_stop_that_does_not_end_in_time_says_so(
    open_manager: Open, m1: Any, gate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    manager = open_manager()
    g = gate()
    manager.add_request(PROMPTS[0])
    assert g.reached.wait(10)
    with caplog.at_level(logging.WARNING):
        manager.stop(timeout=0.02)
    assert "did not end within 0.02 s" in caplog.text
    assert manager.is_running()
    g.open()
    manager.join(timeout=10)
    assert not manager.is_running()
    assert manager.get_result().status is RequestStatus.FINISHED


def test_destroy_stops_first_is_final_and_harmless_when_repeated(open_manager: Open, m1: Any, gate: Any) -> None:
    """A-stop-06, A-stop-07."""
    manager = open_manager()
    g = gate(after=2)
    manager.add_request(PROMPTS[0], request_id="a", max_new_tokens=100)
    assert g.reached.wait(10)
    destroyer = started_thread(manager.destroy)
    g.open()
    destroyer.join(10)
    assert not manager.is_running()
    assert manager.get_result().status is RequestStatus.FAILED
    manager.destroy()
    for call in (manager.start, lambda: manager.add_request([1]), manager.warmup):
        with pytest.raises(RuntimeError, match="destroyed; make a new one"):
            call()
    assert list(manager) == []


@pytest.mark.parametrize("how", ["destroy", "hard_stop"])
def test_requests_of_a_manager_that_never_ran_end_too(how: str, open_manager: Open) -> None:
    manager = open_manager(start=False)
    manager.add_request(PROMPTS[0], request_id="a")
    if how == "destroy":
        manager.destroy()
    else:
        manager.stop(hard_stop=True)
    (output,) = list(manager)
    assert (output.request_id, output.status) == ("a", RequestStatus.FAILED)
    assert "stopped" in output.error


def test_soft_stop_before_start_keeps_requests_for_it(open_manager: Open, m1: Any, reference: Reference) -> None:
    manager = open_manager(start=False)
    manager.add_request(PROMPTS[0])
    manager.stop()
    manager.start()
    assert manager.get_result(timeout=10).generated_tokens == reference(m1, PROMPTS[0], 8)


def test_a_waiting_consumer_is_released_by_the_stop(open_manager: Open) -> None:
    """`get_result` without a timeout waits as long as the loop lives, and no longer."""
    for _ in range(10):  # the end of the thread and the end of the wait race
        manager = open_manager()
        thread = started_thread(manager.get_result)
        manager.stop()
        thread.join(5)
        assert not thread.is_alive()


def test_the_cache_can_be_kept_for_the_next_session(open_manager: Open) -> None:
    manager = open_manager()
    core = manager._core
    manager.stop(keep_for_next_session=True)
    manager.start()
    assert manager._core is core
    manager.stop()
    assert not manager.warmed_up


# --- failure of the loop --------------------------------------------------------------------------------------------


def test_an_exception_in_a_step_fails_all_with_its_cause_and_the_manager_says_why(
    open_manager: Open, m1: Any, fail_step: Any, reference: Reference
) -> None:
    manager = open_manager(max_requests_per_batch=2)
    fail_step(3, RuntimeError("the device is on fire"))
    for i in range(3):
        manager.add_request(PROMPTS[i], request_id=f"r{i}", streaming=i == 1)
    started = time.monotonic()
    done = everything(manager)
    assert time.monotonic() - started < 1.0
    assert set(done) == {"r0", "r1", "r2"}
    assert {o.status for o in done.values()} == {RequestStatus.FAILED}
    assert {o.error for o in done.values()} == {"RuntimeError: the device is on fire"}
    assert done["r0"].generated_tokens == reference(m1, PROMPTS[0], 8)[:2], "what was generated stays"
    assert done["r2"].generated_tokens == []
    manager.join(timeout=5)
    assert not manager.is_running()
    assert str(manager.fatal_error) == "the device is on fire"
    with pytest.raises(RuntimeError, match="RuntimeError: the device is on fire; call start") as caught:
        manager.add_request([1])
    assert caught.value.__cause__ is manager.fatal_error
    assert m1.config._attn_implementation == "eager"

    manager.start()
    assert manager.fatal_error is None
    manager.add_request(PROMPTS[0], request_id="r0")
    assert manager.get_result(timeout=10).generated_tokens == reference(m1, PROMPTS[0], 8)


def test_a_restart_right_after_the_failure_is_seen_works(
    open_manager: Open, m1: Any, fail_step: Any, reference: Reference
) -> None:
    """The failing thread may still be on its way out when its last output arrives."""
    manager = open_manager()
    for _ in range(5):
        fail_step(2, ValueError("again"))
        manager.add_request(PROMPTS[0])
        assert manager.get_result(timeout=10).status is RequestStatus.FAILED
        manager.start()
        assert manager.is_running()
        manager.add_request(PROMPTS[0])
        assert manager.get_result(timeout=10).generated_tokens == reference(m1, PROMPTS[0], 8)


def test_broken_book_keeping_ends_the_loop_loudly(open_manager: Open) -> None:
    """The invariants are checked after every step in these tests."""
    manager = open_manager(start=False)
    manager.warmup()
    manager._core.cache.pool._free.pop()
    manager.start()
    manager.add_request(PROMPTS[0])
    assert "RuntimeError: free" in manager.get_result(timeout=10).error


# --- requests -------------------------------------------------------------------------------------------------------


def test_ids_are_given_or_generated_and_never_collide(open_manager: Open) -> None:
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


def test_ids_of_a_batch_match_its_inputs(open_manager: Open, m1: Any, reference: Reference) -> None:
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
    open_manager: Open, m1: Any, gate: Any, reference: Reference
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


def test_cancel_of_a_queued_request(open_manager: Open, m1: Any, gate: Any) -> None:
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
    open_manager: Open, m1: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
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


def test_a_patient_submitter_waits_as_long_as_the_loop_lives(open_manager: Open, gate: Any) -> None:
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


def test_threads_that_submit_at_once_do_not_overfill_the_queue(open_manager: Open, gate: Any) -> None:
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
def test_a_stream_ends_at_any_terminal_state(end: str, open_manager: Open, m1: Any, gate: Any, fail_step: Any) -> None:
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


# --- the model ------------------------------------------------------------------------------------------------------


def test_two_managers_on_one_model(open_manager: Open, m1: Any, reference: Reference) -> None:
    expected = [reference(m1, p, 24) for p in PROMPTS]
    first, second = open_manager(page_size=4), open_manager(page_size=16, max_batch_tokens=5)
    for i, prompt in enumerate(PROMPTS):
        first.add_request(prompt, request_id=f"r{i}", max_new_tokens=24)
        second.add_request(prompt, request_id=f"r{i}", max_new_tokens=24)
    for manager in (first, second):
        done = everything(manager)
        assert [done[f"r{i}"].generated_tokens for i in range(5)] == expected
    assert m1.config._attn_implementation == "eager"


def test_a_forward_pass_from_elsewhere_during_a_step_says_what_is_wrong(open_manager: Open, tiny_model: Any) -> None:
    """For a model that is bridged through transformers' attention interface, in the middle of its forward pass."""
    model = tiny_model("tiny-gpt2", "eager")
    reached, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        reached.set()
        go_on.wait(20)

    manager = open_manager(model)
    hook = model.lm_head.register_forward_pre_hook(hold)
    manager.add_request(PROMPTS[0])
    assert reached.wait(10)
    with pytest.raises(RuntimeError, match="used by a running continuous batching manager"):
        model.transformer(torch.tensor([[1, 2, 3]]))
    go_on.set()
    assert manager.get_result(timeout=10).status is RequestStatus.FINISHED
    hook.remove()


def test_a_model_in_training_does_not_drop_out_and_stays_in_training(open_manager: Open) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
    config.eos_token_id = None
    model = GPT2LMHeadModel(config)
    model.transformer.h[0].eval()  # a part that its owner has frozen
    before = [module.training for module in model.modules()]
    assert model.training
    results = []
    for mode in (True, False):
        if not mode:
            model.eval()
        manager = open_manager(model)
        manager.add_request([1, 2, 3], max_new_tokens=30)
        results.append(manager.get_result(timeout=10).generated_tokens)
        if mode:
            assert [module.training for module in model.modules()] == before
    assert results[0] == results[1]


# --- what happened --------------------------------------------------------------------------------------------------


def test_counters_and_step_log(open_manager: Open) -> None:
    """A-over-01: membership is decided anew at every step, and nothing is padded."""
    manager = open_manager(start=False)
    for i in range(3):
        manager.add_request(PROMPTS[i], request_id=f"r{i}", max_new_tokens=2 + 2 * i)
    manager.start()
    everything(manager)
    manager.stop()
    log = manager.step_log
    assert [(s.kind, s.decode_rows, s.prefill_rows, s.prefill_tokens) for s in log] == [
        ("prefill", 0, 3, 3 + 5 + 8),
        ("decode", 3, 0, 0),
        ("decode", 2, 0, 0),
        ("decode", 2, 0, 0),
        ("decode", 1, 0, 0),
        ("decode", 1, 0, 0),
    ]
    assert [s.step for s in log] == list(range(6))
    assert [s.kv_tokens for s in log] == [3 + 5 + 8, 4 + 6 + 9, 7 + 10, 8 + 11, 12, 13]
    assert [s.prefill_pairs for s in log] == [6 + 15 + 36, 0, 0, 0, 0, 0]  # causal: n (n + 1) / 2 of a whole prompt
    assert all(s.step_ms is not None and s.step_ms >= s.schedule_ms >= 0 for s in log)
    assert all(s.padded_rows == 0 and not s.graph for s in log)
    counters = manager.counters()
    assert counters["steps"] == 6
    assert counters["prefill_tokens"] == 16
    assert (counters["finished"], counters["failed"], counters["cancelled"]) == (3, 0, 0)
    assert (counters["kv_blocks_total"], counters["max_running"]) == (32, 3)
    assert counters["kv_blocks_free_min"] == min(s.free_blocks for s in log)
    manager.reset_counters()
    assert manager.step_log == []
    assert manager.counters()["kv_blocks_total"] == 32
    assert manager.counters()["kv_blocks_free_min"] is None


def test_a_terminal_output_tells_its_life(open_manager: Open) -> None:
    """M-mech-01, M-s2-01, M-mem-05: states with times, chunks of the prompt, blocks at the end."""
    manager = open_manager(start=False, max_batch_tokens=16, page_size=4)
    manager.add_request([7] * 40, request_id="long", max_new_tokens=3)
    manager.add_request([7, 8], request_id="gone", max_new_tokens=9)
    manager.cancel_request("gone")
    manager.start()
    done = everything(manager)
    manager.stop()
    states, times = zip(*done["long"].status_times, strict=True)
    assert [s.name for s in states] == ["PENDING", "PREFILLING", "DECODING", "FINISHED"]
    assert list(times) == sorted(times)
    assert done["long"].prefill_steps == sum(s.prefill_rows for s in manager.step_log) == 3  # 16 + 16 + 8
    assert done["long"].kv_blocks == 11  # 42 positions in pages of 4
    assert [s.name for s, _ in done["gone"].status_times] == ["PENDING", "CANCELLED"]
    assert (done["gone"].prefill_steps, done["gone"].kv_blocks) == (0, None)
    unused = [(4 - end % 4) % 4 for end in (16, 32, 40, 41, 42)]
    assert [s.unused_slots for s in manager.step_log] == unused == [0, 0, 0, 3, 2]


def test_the_ledger_names_the_reserve_and_the_host(open_manager: Open) -> None:
    """M-mem-01, M-s4-05: 0.15 of 32 blocks is a little under 5; a block is 4 KiB a token here by the test below."""
    manager = open_manager(start=False, safety_margin=0.15)
    ledger = manager.ledger()
    block = manager.resolved_config.layout.block_bytes
    assert ledger["of_kv_cache_decode_reserve_bytes"] == 5 * block
    assert ledger["host_cache_bytes"] == 0
    assert open_manager(start=False, safety_margin=0.0).ledger()["of_kv_cache_decode_reserve_bytes"] == 0


def test_prefix_counters_survive_a_restart_and_a_reset(open_manager: Open) -> None:
    manager = open_manager()
    prompt = list(range(1, 14))

    def twice() -> None:
        for _ in range(2):
            manager.add_request(prompt, max_new_tokens=1)
            assert manager.get_result(timeout=10).status is RequestStatus.FINISHED

    twice()
    assert (manager.counters()["prefix_hit_tokens"], manager.counters()["prefix_query_tokens"]) == (12, 26)
    manager.stop()
    manager.start()  # a new cache, the same counters
    twice()
    assert (manager.counters()["prefix_hit_tokens"], manager.counters()["prefix_query_tokens"]) == (24, 52)
    manager.reset_counters()
    twice()  # all cached
    assert manager.counters()["prefix_hit_tokens"] == 24


def test_the_ledger_is_the_resolved_one(open_manager: Open) -> None:
    manager = open_manager(start=False)
    assert manager.ledger()["kv_cache_bytes"] == 33 * 4 * 256
    assert manager.ledger()["weights_bytes"] == sum(p.nbytes for p in manager.model.parameters())
    planned = manager.ledger()
    manager.start()
    assert manager.ledger() == planned, "nothing measures a CPU's allocator"
    sources = manager.ledger_sources()
    assert sources.keys() == planned.keys()
    assert (sources["kv_cache_bytes"], sources["activations_bytes"]) == ("exact", "estimated")


def test_settings_that_cannot_be_met_are_refused_before_anything_is_allocated(open_manager: Open, m1: Any) -> None:
    with pytest.raises(ValueError, match="typical_p"):
        open_manager(generation=GenerationConfig(typical_p=0.5))
    with pytest.raises(ValueError, match="num_blocks=100000000000"):
        open_manager(num_blocks=100_000_000_000)
    assert m1.config._attn_implementation == "eager"


def test_a_stop_during_a_start_ends_what_it_started(open_manager: Open) -> None:
    """`start` opens the intake when the warm-up is over: that must not undo a stop asked for meanwhile."""
    manager = open_manager(start=False)
    warming, asked, warmup, close = threading.Event(), threading.Event(), manager.warmup, manager._intake.close

    def slow_warmup() -> None:
        warming.set()
        assert asked.wait(5)
        warmup()

    def noted_close(*arguments: Any) -> None:
        close(*arguments)
        asked.set()

    manager.warmup, manager._intake.close = slow_warmup, noted_close
    starting = started_thread(manager.start)
    assert warming.wait(5)
    stopping = started_thread(manager.stop)
    stopping.join(10)
    stuck = stopping.is_alive()
    close(engine.intake.Stop.HARD)
    starting.join(10)
    stopping.join(10)
    assert not stuck
    assert not manager.is_running()


def test_start_inside_a_pause_of_a_loop_that_is_to_end_is_refused(open_manager: Open) -> None:
    manager = open_manager()
    with manager.pause():
        started_thread(lambda: manager.stop(block=False)).join(5)
        with pytest.raises(RuntimeError, match="leave the pause first"):
            manager.start()
    manager.start()
    assert manager.is_running()
