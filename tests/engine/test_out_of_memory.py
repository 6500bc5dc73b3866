"""Device memory that runs out in a step costs at most one request, and no other a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine import RequestStatus
from engine.runner import LaunchedStep, ModelRunner
from engine.scheduler import StepPlan

Open = Callable[..., Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]
PROMPTS = [[(7 * i + j * j) % 97 for j in range(12)] for i in range(3)]


def prefill_tokens(plan: StepPlan) -> int:
    return sum(row.count for row in plan.rows if not row.is_decode)


@pytest.fixture(params=["before", "after"])
def short_of_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[StepPlan]]:
    """Let launches of some plans run out of memory, before anything ran or when all of it has; returns those plans."""
    launch = ModelRunner.launch

    def build(too_large: Callable[[StepPlan], bool]) -> list[StepPlan]:
        refused: list[StepPlan] = []

        def limited(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
            large = too_large(plan)
            launched = launch(self, plan) if not large or request.param == "after" else None
            if large:
                refused.append(plan)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")
            assert launched is not None
            return launched

        monkeypatch.setattr(ModelRunner, "launch", limited)
        return refused

    return build


def run(manager: Any, depth: int, new: int = 8, **options: Any) -> dict[str, Any]:
    for i, prompt in enumerate(PROMPTS):
        manager.add_request(prompt, request_id=str(i), max_new_tokens=new, **options)
    manager.warmup()
    manager._core._depth = depth  # as async batching does on a GPU
    manager.start()
    return {output.request_id: output for output in manager}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_a_smaller_step_that_fits_costs_nobody(
    scheduler: str, depth: int, short_of_memory: Any, open_manager: Open, m1: Any, reference: Reference
) -> None:
    refused = short_of_memory(lambda plan: prefill_tokens(plan) > 8)
    manager = open_manager(start=False, max_batch_tokens=16, scheduler_type=scheduler)
    done = run(manager, depth)
    assert [done[str(i)].generated_tokens for i in range(3)] == [reference(m1, p, 8) for p in PROMPTS]
    assert manager.counters()["oom_retries"] == len(refused) > 1
    assert manager.counters()["failed"] == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prefill_that_never_fits_fails_alone(
    depth: int, short_of_memory: Any, open_manager: Open, m1: Any, reference: Reference
) -> None:
    """M-fail-03."""
    refused = short_of_memory(lambda plan: any(r.request.request_id == "2" and not r.is_decode for r in plan.rows))
    manager = open_manager(start=False, max_batch_tokens=64)
    done = run(manager, depth)
    assert [done[str(i)].generated_tokens for i in range(2)] == [reference(m1, p, 8) for p in PROMPTS[:2]]
    assert done["2"].status is RequestStatus.FAILED
    assert done["2"].error == "oom_prefill: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert len(refused) >= 2
    assert manager.is_running()
    assert manager._core.cache.pool.num_available == manager.resolved_config.num_blocks


@pytest.mark.parametrize("depth", [0, 1])
def test_a_decode_step_that_never_fits_fails_the_youngest(
    depth: int, short_of_memory: Any, open_manager: Open, m1: Any, reference: Reference
) -> None:
    """M-fail-03."""
    short_of_memory(lambda plan: not prefill_tokens(plan) and len(manager._core.requests) == 3)
    manager = open_manager(start=False, max_batch_tokens=64)
    done = run(manager, depth)
    assert [done[str(i)].generated_tokens for i in range(2)] == [reference(m1, p, 8) for p in PROMPTS[:2]]
    assert done["2"].error.startswith("oom_decode: CUDA out of memory")
    assert done["2"].generated_tokens == reference(m1, PROMPTS[2], 8)[: done["2"].num_generated]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_decode_step_of_half_the_rows_fits(
    depth: int, short_of_memory: Any, open_manager: Open, m1: Any, reference: Reference
) -> None:
    refused = short_of_memory(lambda plan: not prefill_tokens(plan) and len(plan.rows) > 2)
    done = run(open_manager(start=False, max_batch_tokens=64), depth)
    assert [done[str(i)].generated_tokens for i in range(3)] == [reference(m1, p, 8) for p in PROMPTS]
    assert refused


def test_children_of_a_step_that_was_not_computed(
    short_of_memory: Any, open_manager: Open, m1: Any, reference: Reference
) -> None:
    """They had taken over blocks that nothing was written to."""
    refused = short_of_memory(lambda plan: bool(plan.forked) and not refused)
    manager = open_manager(start=False, max_batch_tokens=64)
    done = run(manager, 0, num_return_sequences=3)
    assert len(done) == 9
    assert refused[0].num_forked > 0
    for name, output in done.items():
        assert output.generated_tokens == reference(m1, PROMPTS[int(name[0])], 8)
    assert manager.counters()["oom_retries"] == 1


def test_offloaded_blocks_move_once(short_of_memory: Any, open_manager: Open, m1: Any, reference: Reference) -> None:
    """The copies of a plan that could not be launched have been made; the smaller plan builds on them."""
    refused = short_of_memory(lambda plan: bool(plan.offloads or plan.restores))
    manager = open_manager(start=False, num_blocks=9, max_batch_tokens=16, safety_margin=0.0, cpu_offload_space=0.001)
    done = run(manager, 0, 20)
    assert [done[str(i)].generated_tokens for i in range(3)] == [reference(m1, p, 20) for p in PROMPTS]
    assert [p for p in refused if p.offloads]
    assert [p for p in refused if p.restores]
    assert manager.counters()["recomputed_tokens"] == 0
