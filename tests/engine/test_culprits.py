"""An exception in a step ends the request to blame, or all of them at once if nobody can be told to be."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine import RequestStatus
from engine.culprits import find_culprits
from engine.requests import Request
from engine.runner import LaunchedStep, ModelRunner
from engine.sampling.rules import BiasRules
from engine.scheduler import StepPlan

Open = Callable[..., Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]
PROMPTS = [[(7 * i + j * j) % 97 for j in range(10)] for i in range(4)]


@pytest.fixture(params=["before", "after"])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Let launches raise if a row asks for it, before anything ran or when all of it has; returns who was in them."""
    launch = ModelRunner.launch

    def build(fails: Callable[[Request], bool], error: Callable[[], Exception]) -> list[list[str]]:
        failed: list[list[str]] = []

        def watched(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
            bad = any(fails(row.request) for row in plan.rows)
            launched = launch(self, plan) if not bad or request.param == "after" else None
            if bad:
                failed.append([row.request.request_id for row in plan.rows])
                raise error()
            assert launched is not None
            return launched

        monkeypatch.setattr(ModelRunner, "launch", watched)
        return failed

    return build


def run(manager: Any, depth: int = 0, new: int = 8, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> Any:
    for i, prompt in enumerate(prompts):
        manager.add_request(prompt, request_id=str(i), max_new_tokens=new, **options)
    manager.warmup()
    manager._core._depth = depth  # as async batching does on a GPU
    manager.start()
    return {output.request_id: output for output in manager}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("tokens_before", [0, 3])
@pytest.mark.parametrize("culprits", [{"2"}, {"0", "3"}])
def test_the_requests_to_blame_fail_and_the_others_lose_nothing(
    culprits: set[str], tokens_before: int, depth: int, failing: Any, open_manager: Open, m1: Any, reference: Reference
) -> None:
    failed = failing(
        lambda r: r.request_id in culprits and r.num_generated >= tokens_before, lambda: ValueError("bad row")
    )
    manager = open_manager(start=False, max_batch_tokens=64)
    done = run(manager, depth)
    for i, prompt in enumerate(PROMPTS):
        output = done[str(i)]
        if str(i) in culprits:
            assert (output.status, output.error) == (RequestStatus.FAILED, "ValueError: bad row")
            assert tokens_before <= output.num_generated < 8
            assert output.generated_tokens == reference(m1, prompt, 8)[: output.num_generated]
        else:
            assert output.generated_tokens == reference(m1, prompt, 8)
    assert len(failed[0]) > 1, "they were in a step with others"
    assert all([name] in failed for name in culprits), "and were tried by themselves"
    assert manager.is_running()
    assert manager.fatal_error is None
    assert manager._core.cache.pool.num_available == manager.resolved_config.num_blocks
    manager.add_request(PROMPTS[0], request_id="later", max_new_tokens=8)
    assert manager.get_result(timeout=10).generated_tokens == reference(m1, PROMPTS[0], 8)


def test_prompts_in_chunks_and_children(failing: Any, open_manager: Open, m1: Any, reference: Reference) -> None:
    failed = failing(lambda r: r.request_id.startswith("1") and r.num_generated >= 2, lambda: ValueError("bad row"))
    done = run(open_manager(start=False, max_batch_tokens=7), num_return_sequences=2)
    assert failed
    assert len(done) == 8
    for name, output in done.items():
        if name.startswith("1"):
            assert output.error == "ValueError: bad row"
        else:
            assert output.generated_tokens == reference(m1, PROMPTS[int(name[0])], 8)


def test_a_step_that_fails_for_everybody_fails_them_all_within_a_second(
    failing: Any, open_manager: Open, m1: Any, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(lambda r: r.num_generated >= 2, lambda: RuntimeError("the device is on fire"))
    manager = open_manager(start=False, max_requests_per_batch=3, max_batch_tokens=64)
    started = time.monotonic()
    done = run(manager)
    assert time.monotonic() - started < 1.5
    assert {output.error for output in done.values()} == {"RuntimeError: the device is on fire"}
    assert [done[str(i)].num_generated for i in range(4)] == [2, 2, 2, 0]
    manager.join(timeout=5)
    with pytest.raises(RuntimeError, match="the device is on fire; call start"):
        manager.add_request([1])
    monkeypatch.undo()
    manager.start()
    manager.add_request(PROMPTS[0], max_new_tokens=8)
    assert manager.get_result(timeout=10).generated_tokens == reference(m1, PROMPTS[0], 8)


def test_alone_in_a_step_it_is_to_blame_until_the_next_one_fails_too(
    failing: Any, open_manager: Open, m1: Any, reference: Reference
) -> None:
    failing(lambda r: r.request_id in ("0", "2", "3"), lambda: ValueError("bad row"))
    manager = open_manager(start=False, max_requests_per_batch=1)
    done = run(manager, prompts=[*PROMPTS, PROMPTS[0]])
    assert {done[i].error for i in "0234"} == {"ValueError: bad row"}
    assert done["1"].generated_tokens == reference(m1, PROMPTS[1], 8)
    manager.join(timeout=5)
    assert str(manager.fatal_error) == "bad row", "2 was blamed; 3 failed before anything succeeded; 4 was never tried"


def test_a_forward_pass_that_cannot_take_a_prompt(
    open_manager: Open, m1: Any, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ModelRunner.forward

    def picky(self: ModelRunner, shape: Any, views: dict[str, torch.Tensor], metadata: Any) -> torch.Tensor:
        logits = forward(self, shape, views, metadata)
        if (views["ids"] == 96).any():
            raise RuntimeError("no 96 here")
        return logits

    monkeypatch.setattr(ModelRunner, "forward", picky)
    prompts = [*PROMPTS[:2], [5, 96, 5]]
    expected = [reference(m1, p, 8) for p in PROMPTS[:2]]
    assert 96 not in itertools.chain(*prompts[:2], *expected)
    done = run(open_manager(start=False), prompts=prompts)
    assert [done[str(i)].generated_tokens for i in range(2)] == expected
    assert done["2"].error == "RuntimeError: no 96 here"


def test_a_processor_that_cannot_be_made(
    open_manager: Open, m1: Any, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host work of the step: settings of a request that takes over a slot."""
    made = BiasRules.of

    def of(params: Any, eos: frozenset[int]) -> BiasRules:
        if dict(params.logit_bias).get(7) == 2.0:
            raise ValueError("no such bias")
        return made(params, eos)

    monkeypatch.setattr(BiasRules, "of", of)
    manager = open_manager(start=False, per_request_processors=True)
    manager.add_request(PROMPTS[3], request_id="biased", logit_bias={7: 1.0})
    manager.add_request(PROMPTS[2], request_id="bad", logit_bias={7: 2.0})
    done = run(manager, prompts=PROMPTS[:2])
    assert done["bad"].error == "ValueError: no such bias"
    assert done["biased"].status is RequestStatus.FINISHED
    assert [done[str(i)].generated_tokens for i in range(2)] == [reference(m1, p, 8) for p in PROMPTS[:2]]


@pytest.mark.parametrize("depth", [0, 1])
def test_rules_for_stopping_that_raise(
    depth: int, open_manager: Open, m1: Any, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(self: Request) -> bool:
        raise TypeError("no such rule")

    monkeypatch.setattr(Request, "_ends_with_stop", raises)
    manager = open_manager(start=False)
    manager.add_request(PROMPTS[3], request_id="bad", stop_sequences=[[1, 2]], streaming=True)
    done = run(manager, depth, prompts=PROMPTS[:2])
    assert done["bad"].error == "TypeError: no such rule"
    assert [done[str(i)].generated_tokens for i in range(2)] == [reference(m1, p, 8) for p in PROMPTS[:2]]
    assert manager.is_running()
    assert manager._core.cache.pool.num_available == manager.resolved_config.num_blocks


def test_a_result_handler_that_raises(open_manager: Open, m1: Any, reference: Reference) -> None:
    manager = open_manager(start=False)
    heard: list[Any] = []
    reported: list[str] = []

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["message"]))
        over = asyncio.Event()

        def bad(output: Any) -> None:
            raise RuntimeError("cannot listen")

        def good(output: Any) -> None:
            heard.append(output)
            if output.is_finished():
                over.set()

        manager.register_result_handler("bad", bad)
        manager.register_result_handler("good", good)
        manager.add_request(PROMPTS[0], request_id="bad", max_new_tokens=8, streaming=True)
        manager.add_request(PROMPTS[1], request_id="good", max_new_tokens=8, streaming=True)
        manager.start()
        await asyncio.wait_for(over.wait(), 10)

    asyncio.run(listen())
    assert heard[-1].generated_tokens == reference(m1, PROMPTS[1], 8)
    assert len(heard) == 8
    assert set(reported) == {"result handler of request 'bad' failed"}
    assert manager.is_running()


# --- the search by itself -------------------------------------------------------------------------------------------


def search(count: int, bad: set[int], make_request: Callable[..., Request], clock: Any = None) -> Any:
    requests = [make_request([1]) for _ in range(count)]
    attempts: list[int] = []

    def attempt(part: Sequence[Request]) -> bool:
        attempts.append(len(part))
        if any(requests.index(r) in bad for r in part):
            raise KeyError(len(part))
        return True

    culprits = find_culprits(requests, ValueError("first"), attempt, clock or (lambda: 0.0))
    return sorted(requests.index(r) for r, _ in culprits), attempts


@pytest.mark.parametrize(("count", "bad"), [(2, {1}), (5, {0, 4}), (256, {77}), (9, {3, 4, 5})])
def test_every_culprit_is_found(count: int, bad: set[int], make_request: Any) -> None:
    found, attempts = search(count, bad, make_request)
    assert found == sorted(bad)
    assert len(attempts) <= 2 * len(bad) * count.bit_length()


@pytest.mark.parametrize(("count", "bad"), [(4, set()), (4, {0, 1, 2, 3})])
def test_nobody_and_everybody_are_not_to_blame(count: int, bad: set[int], make_request: Any) -> None:
    with pytest.raises(ValueError, match="first"):
        search(count, bad, make_request)


def test_the_search_gives_up_in_time(make_request: Any) -> None:
    ticks = itertools.count(0.0, 0.2)
    with pytest.raises(ValueError, match="first"):
        search(64, {5}, make_request, clock=lambda: next(ticks))
