"""Life cycle and failures: what clients see of the thread that runs the loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import engine.intake
from engine import RequestStatus

Open = Callable[..., Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]
Everything = Callable[[Any], dict[str, Any]]
Started = Callable[[Callable[[], Any]], threading.Thread]

PROMPTS = [[5, 9, 11], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8], [6], [31, 41, 59, 26]]


# --- life cycle -----------------------------------------------------------------------------------------------------


def test_requests_added_before_start_are_served_after_it(
    open_manager: Open, m1: Any, reference: Reference, everything: Everything
) -> None:
    """A-mgr-01."""
    manager = open_manager(start=False)
    ids = manager.add_requests(PROMPTS[:3])
    assert not manager.is_running()
    assert manager.get_result(timeout=0.05) is None
    manager.start()
    assert manager.is_running()
    done = everything(manager)
    assert [done[i].generated_tokens for i in ids] == [reference(m1, p, 8) for p in PROMPTS[:3]]


def test_soft_stop_finishes_everything_and_results_stay(
    open_manager: Open, m1: Any, reference: Reference, everything: Everything
) -> None:
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
    open_manager: Open,
    m1: Any,
    gate: Any,
    reference: Reference,
    everything: Everything,
    started_thread: Started,
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


def test_start_waits_for_a_stop_in_progress(
    open_manager: Open, m1: Any, gate: Any, reference: Reference, everything: Everything, started_thread: Started
) -> None:
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


def test_destroy_stops_first_is_final_and_harmless_when_repeated(
    open_manager: Open, m1: Any, gate: Any, started_thread: Started
) -> None:
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


def test_a_waiting_consumer_is_released_by_the_stop(open_manager: Open, started_thread: Started) -> None:
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


def test_settings_that_cannot_be_met_are_refused_before_anything_is_allocated(open_manager: Open, m1: Any) -> None:
    with pytest.raises(ValueError, match="typical_p"):
        open_manager(generation=GenerationConfig(typical_p=0.5))
    with pytest.raises(ValueError, match="num_blocks=100000000000"):
        open_manager(num_blocks=100_000_000_000)
    assert m1.config._attn_implementation == "eager"


def test_a_stop_during_a_start_ends_what_it_started(open_manager: Open, started_thread: Started) -> None:
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


def test_start_inside_a_pause_of_a_loop_that_is_to_end_is_refused(open_manager: Open, started_thread: Started) -> None:
    manager = open_manager()
    with manager.pause():
        started_thread(lambda: manager.stop(block=False)).join(5)
        with pytest.raises(RuntimeError, match="leave the pause first"):
            manager.start()
    manager.start()
    assert manager.is_running()


# --- failure of the loop --------------------------------------------------------------------------------------------


def test_an_exception_in_a_step_fails_all_with_its_cause_and_the_manager_says_why(
    open_manager: Open,
    m1: Any,
    fail_step: Any,
    reference: Reference,
    everything: Everything,
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


# --- the model ------------------------------------------------------------------------------------------------------


def test_two_managers_on_one_model(open_manager: Open, m1: Any, reference: Reference, everything: Everything) -> None:
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
