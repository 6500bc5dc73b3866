"""Preempted requests whose blocks wait in host memory go on with the tokens of ``model.generate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

Models = Callable[[str, str], Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]

# With and without fusion, a sliding window in every layer, in every other layer (two layer groups), no rotation.
ARMS = [
    ("tiny-llama", "sdpa"),
    ("tiny-qwen3", "eager"),
    ("tiny-mistral", "sdpa"),
    ("tiny-gemma2", "eager"),
    ("tiny-gpt2", "sdpa"),
]
arms = pytest.mark.parametrize(("preset", "attention"), ARMS, ids=["-".join(a) for a in ARMS])
NEW = 20


def prompt(length: int, salt: int) -> list[int]:
    return [(salt + 31 * i + i * i) % 97 for i in range(length)]


def gib(blocks: int, model: Any) -> float:
    """Host memory for so many blocks of 4 tokens, and half a block that no whole one fits in."""
    from engine.model_shape import ModelShape

    return (blocks + 0.5) * ModelShape.of(model).cache_layout(4).block_bytes / 2**30


def blocks_of(preset: str) -> int:
    return 18 if preset == "tiny-gemma2" else 9  # two layer groups: a request needs twice the blocks


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
@pytest.mark.parametrize("budget", [5, 64])
@arms
def test_nothing_is_computed_again(
    preset: str, attention: str, budget: int, scheduler: str, tiny_model: Models, reference: Reference, run: Any
) -> None:
    """A-off-03."""
    model = tiny_model(preset, attention)
    prompts = [prompt(7 + i, 17 * i) for i in range(5)]
    result = run(
        model, prompts, NEW, page_size=4, num_blocks=blocks_of(preset), max_batch_tokens=budget, safety_margin=0.0,
        scheduler_type=scheduler, cpu_offload_space=gib(100, model), allow_block_sharing=False,
    )  # fmt: skip
    assert result.tokens == [reference(model, p, NEW) for p in prompts]
    counters = result.counters
    # One that is preempted in the very step that admits it has nothing to offload, or its copy is still there.
    assert 0 < counters["restores"] <= counters["offloads"] <= counters["preemptions"]
    assert counters["recomputed_tokens"] == 0
    assert counters["offloaded_tokens"] > 0
    block, log = result.resolved.layout.block_bytes, result.steps
    assert {s.restored_bytes % block for s in log} == {s.offloaded_bytes % block for s in log} == {0}
    assert 0 < sum(s.restored_bytes for s in log) <= sum(s.offloaded_bytes for s in log)
    assert all((s.restored_bytes > 0) == (s.restored > 0) for s in log)
    assert counters["host_blocks_total"] == result.resolved.num_host_blocks == 100
    assert counters["host_blocks_free_min"] < 100
    restored = [s for s in result.steps if s.restored]
    assert sum(s.restored for s in restored) == counters["restores"]
    assert all(s.restore_ms is not None and s.restore_ms >= 0 for s in restored)


@arms
def test_a_host_pool_for_some(preset: str, attention: str, tiny_model: Models, reference: Reference, run: Any) -> None:
    """Where the host is full, a request is computed again; both happen in one run."""
    model = tiny_model(preset, attention)
    prompts = [prompt(7 + i, 17 * i) for i in range(6)]
    result = run(
        model, prompts, NEW, page_size=4, num_blocks=blocks_of(preset) + 4, max_batch_tokens=64, safety_margin=0.0,
        cpu_offload_space=gib(blocks_of(preset) // 2, model), allow_block_sharing=False,
    )  # fmt: skip
    assert result.tokens == [reference(model, p, NEW) for p in prompts]
    assert 0 < result.counters["offloads"] < result.counters["preemptions"]
    assert result.counters["restores"] > 0
    assert result.counters["recomputed_tokens"] > 0


def test_with_shared_prefixes(tiny_model: Models, reference: Reference, run: Any) -> None:
    """Pages that the prefix cache still holds are taken from there, the others from the host."""
    model = tiny_model("tiny-llama", "sdpa")
    prompts = [[*prompt(9, 29), i] for i in range(6)]
    result = run(
        model, prompts, 24, page_size=4, num_blocks=14, max_batch_tokens=16, safety_margin=0.0,
        cpu_offload_space=gib(100, model),
    )  # fmt: skip
    assert result.tokens == [reference(model, p, 24) for p in prompts]
    assert result.counters["prefix_hit_tokens"] > 0
    assert result.counters["restores"] > 0
    assert result.counters["recomputed_tokens"] == 0


def test_penalties_and_streams_do_not_notice(tiny_model: Models) -> None:
    """Settings that follow a slot are those of the request that was restored into it."""
    from transformers import GenerationConfig

    from engine import ContinuousBatchingConfig, ContinuousBatchingManager

    model = tiny_model("tiny-llama", "sdpa")
    answers = []
    for blocks, space in ((60, 0.0), (9, gib(100, model))):
        manager = ContinuousBatchingManager(
            model,
            GenerationConfig(max_new_tokens=NEW, do_sample=True),
            ContinuousBatchingConfig(
                page_size=4, num_blocks=blocks, max_batch_tokens=16, safety_margin=0.0, seed=3,
                cpu_offload_space=space, per_request_processors=True,
            ),
        )  # fmt: skip
        for i in range(5):
            manager.add_request(
                prompt(7 + i, i), request_id=str(i), repetition_penalty=1.0 + 0.2 * i, frequency_penalty=0.5 * (i % 2),
                temperature=0.8, num_return_sequences=1 + i % 2,
            )  # fmt: skip
        manager.start()
        answers.append({o.request_id: o.generated_tokens for o in manager})
        restores = manager.counters()["restores"]
        manager.destroy()
        assert (restores > 0) is (space > 0)
    assert answers[0] == answers[1]
