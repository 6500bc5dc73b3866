"""The loop held still between two steps: weights change, requests go on, nothing old is found."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine import RequestStatus

Open = Callable[..., Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]
PROMPT = [(5 * i + i * i) % 97 for i in range(13)]
RUNNING = [3, 1, 4, 1, 5]


@pytest.fixture
def model(m1: Any) -> Any:
    """One whose weights a test may change."""
    return copy.deepcopy(m1)


@pytest.fixture
def other(m1: Any) -> Any:
    """The same architecture with other weights."""
    changed = copy.deepcopy(m1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return changed


@pytest.fixture
def held(gate: Any) -> Callable[..., Any]:
    """A pause taken while a request of the manager is in the middle of its generation."""

    def hold(manager: Any, **options: Any) -> Any:
        g = gate(after=4)
        manager.add_request(RUNNING, request_id="running", max_new_tokens=60)
        assert g.reached.wait(10)
        opener = threading.Thread(target=lambda: (_until(lambda: manager._pauses.called), g.open()))
        opener.start()
        context = manager.pause(**options)
        context.__enter__()
        opener.join(10)
        return context

    return hold


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not come to pass within 10 s")


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_new_weights(
    depth: int, fused: bool | None, held: Any, open_manager: Open, model: Any, other: Any, m1: Any, reference: Reference
) -> None:
    manager = open_manager(model, start=False, allow_block_sharing=True, use_fused_forward=fused, num_blocks=60)
    manager.warmup()
    manager._core._depth = depth
    manager.start()

    def ask() -> Any:
        manager.add_request(PROMPT, max_new_tokens=8)
        return manager.get_result(timeout=10)

    old = reference(m1, PROMPT, 8)
    new = reference(other, PROMPT, 8)
    assert old != new
    assert ask().generated_tokens == old
    context = held(manager)
    assert not manager._core._launched, "every launched step is collected"
    assert ask_is_waiting(manager)
    model.load_state_dict(other.state_dict())
    context.__exit__(None, None, None)
    done = {o.request_id: o for o in manager}
    assert done["running"].status is RequestStatus.FINISHED
    assert done["running"].num_generated == 60
    assert (done["waiting"].generated_tokens, done["waiting"].cached_tokens) == (new, 0)
    again = ask()
    assert (again.generated_tokens, again.cached_tokens) == (new, 12)
    # What ran across the change holds keys of both: it was never offered.
    manager.add_request([*RUNNING, *done["running"].generated_tokens], max_new_tokens=1)
    assert manager.get_result(timeout=10).cached_tokens == 0


def ask_is_waiting(manager: Any) -> bool:
    steps = manager.stats.steps
    manager.add_request(PROMPT, request_id="waiting", max_new_tokens=8)
    return manager.get_result(timeout=0.05) is None and manager.stats.steps == steps


def test_a_pause_that_only_reads_keeps_the_prefixes(open_manager: Open, model: Any) -> None:
    manager = open_manager(model, allow_block_sharing=True)
    manager.add_request(PROMPT, max_new_tokens=2)
    manager.get_result(timeout=10)
    with manager.pause(weights_changed=False):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=1, pad_token_id=0)
    manager.add_request(PROMPT, max_new_tokens=2)
    assert manager.get_result(timeout=10).cached_tokens == 12


def test_the_loop_goes_on_when_the_last_thread_leaves(open_manager: Open) -> None:
    manager = open_manager()
    release = threading.Event()
    inside = threading.Barrier(3, timeout=10)

    def hold() -> None:
        with manager.pause(weights_changed=False):
            inside.wait()
            release.wait(10)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    with manager.pause(), manager.pause():
        manager.add_request(PROMPT)
    assert manager.get_result(timeout=0.05) is None, "two threads still hold it"
    release.set()
    assert manager.get_result(timeout=10).status is RequestStatus.FINISHED
    for thread in threads:
        thread.join(10)


def test_a_pause_needs_a_loop_and_cannot_hold_its_stop(open_manager: Open) -> None:
    manager = open_manager(start=False)
    with pytest.raises(RuntimeError, match=r"call start\(\) first"), manager.pause():
        pass
    manager.start()
    with manager.pause(), pytest.raises(RuntimeError, match="inside a pause"):
        manager.stop()
    manager.stop()


@pytest.mark.parametrize("what", ["start", "warmup", "destroy"])
def test_a_pause_does_not_wait_for_a_stop_that_waits_for_it(open_manager: Open, what: str) -> None:
    manager = open_manager()
    stopper = threading.Thread(target=manager.stop)
    with manager.pause():
        stopper.start()
        while manager._lifecycle.acquire(blocking=False):  # until the stop has it
            manager._lifecycle.release()
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="inside a pause"):
            getattr(manager, what)()
    stopper.join(10)
    assert not stopper.is_alive()


def test_a_hard_stop_of_another_thread_does_not_wait_for_it(open_manager: Open) -> None:
    manager = open_manager()
    with manager.pause():
        manager.add_request(PROMPT, request_id="a")
        stopper = threading.Thread(target=lambda: manager.stop(hard_stop=True))
        stopper.start()
        stopper.join(10)
        assert not stopper.is_alive()
    assert manager.get_result(timeout=10).status is RequestStatus.FAILED


def test_a_loop_that_fails_releases_who_waits_for_a_pause(open_manager: Open, gate: Any, steps: Any) -> None:
    manager = open_manager()
    g = gate(after=0)
    manager.add_request(PROMPT)
    assert g.reached.wait(10)

    class Broken:
        def before_launch(self) -> None:
            raise ValueError("broken")

    steps.append(Broken())
    opener = threading.Thread(target=lambda: (_until(lambda: manager._pauses.called), g.open()))
    opener.start()
    with pytest.raises(RuntimeError, match="ended before it could pause"), manager.pause():
        pass
    opener.join(10)


def test_a_replaced_parameter_is_not_taken_for_a_changed_one(open_manager: Open, model: Any) -> None:
    manager = open_manager(model)
    norm = model.model.norm
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight among them, were replaced"), manager.pause():
        norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    manager.add_request(PROMPT)
    assert manager.get_result(timeout=10).status is RequestStatus.FINISHED


def test_leaving_by_an_exception_forgets_too(open_manager: Open, model: Any) -> None:
    manager = open_manager(model, allow_block_sharing=True)
    manager.add_request(PROMPT, max_new_tokens=2)
    manager.get_result(timeout=10)
    with pytest.raises(KeyError), manager.pause():
        raise KeyError("half the weights are written")
    manager.add_request(PROMPT, max_new_tokens=2)
    assert manager.get_result(timeout=10).cached_tokens == 0
