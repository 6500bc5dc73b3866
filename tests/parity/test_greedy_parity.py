"""Greedy tokens are those of ``model.generate`` on each prompt alone, in fp32, in the same process, whatever the
settings; every test asserts that the path it is about was taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

Models = Callable[[str, str], Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]

# Gemma 2's soft-cap is not in torch's kernel, so transformers offers it with eager attention only.
ARMS = [
    ("tiny-llama", "eager"),
    ("tiny-llama", "sdpa"),
    ("tiny-qwen3", "eager"),
    ("tiny-qwen3", "sdpa"),
    ("tiny-mistral", "eager"),
    ("tiny-mistral", "sdpa"),
    ("tiny-gemma2", "eager"),
    ("tiny-gpt2", "eager"),
    ("tiny-gpt2", "sdpa"),
]
FULL = [arm for arm in ARMS if arm[0] not in ("tiny-mistral", "tiny-gemma2")]
SLIDING = [arm for arm in ARMS if arm not in FULL]
NEW = 12

arms = pytest.mark.parametrize(("preset", "attention"), ARMS, ids=["-".join(a) for a in ARMS])


def prompt(length: int, salt: int) -> list[int]:
    return [(salt + 31 * i + i * i) % 97 for i in range(length)]


# Shorter and longer than a page of 4 and 16, on page borders, and more than three windows of 16.
PROMPTS = [prompt(1, 3), prompt(9, 5), prompt(16, 7), prompt(33, 11), prompt(60, 13)]


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
@pytest.mark.parametrize("page_size", [4, 16, 256])
@arms
def test_pages_budgets_and_schedulers(
    preset: str, attention: str, page_size: int, scheduler: str, tiny_model: Models, reference: Reference, run: Any
) -> None:
    """Page sizes 4, 16 and 256, with a token budget below one prompt and above all of them."""
    model = tiny_model(preset, attention)
    expected = [reference(model, p, NEW) for p in PROMPTS]
    for budget in (7, 512):
        result = run(
            model, PROMPTS, NEW, page_size=page_size, num_blocks=200, max_batch_tokens=budget, scheduler_type=scheduler
        )
        assert result.tokens == expected
        assert result.resolved.attention_backend == attention
        assert result.counters["preemptions"] == 0
        assert all(s.decode_rows + s.prefill_tokens <= budget for s in result.steps)
        if budget == 7:
            assert sum(s.prefill_rows for s in result.steps) > len(PROMPTS), "prompts were computed in chunks"
            assert any(s.kind == "mixed" for s in result.steps) or scheduler == "prefill_first"
        else:
            assert result.steps[0].prefill_rows + result.steps[0].decode_rows == len(PROMPTS)
            assert max(s.decode_rows for s in result.steps) == len(PROMPTS), "all decode together"


@pytest.mark.parametrize("budget", [7, 512])
@arms
def test_fused_and_bridged(
    preset: str, attention: str, budget: int, tiny_model: Models, reference: Reference, run: Any
) -> None:
    """The engine's own forward pass where the family is known, and transformers' through its attention interface."""
    model = tiny_model(preset, attention)
    expected = [reference(model, p, NEW) for p in PROMPTS]
    for fused in (None, False):
        result = run(model, PROMPTS, NEW, page_size=16, num_blocks=60, max_batch_tokens=budget, use_fused_forward=fused)
        assert result.tokens == expected
        assert result.resolved.use_fused_forward is (fused is None and preset != "tiny-gpt2")


@pytest.mark.parametrize("budget", [5, 64])
@arms
def test_preemption(
    preset: str, attention: str, budget: int, tiny_model: Models, reference: Reference, run: Any
) -> None:
    """So few blocks that requests are evicted and computed again."""
    model = tiny_model(preset, attention)
    prompts = [prompt(7 + i, 17 * i) for i in range(5)]
    layout_blocks = 11 if preset != "tiny-gemma2" else 22  # two layer groups: a request needs twice the blocks
    result = run(model, prompts, 20, page_size=4, num_blocks=layout_blocks, max_batch_tokens=budget, safety_margin=0.0)
    assert result.tokens == [reference(model, p, 20) for p in prompts]
    assert result.counters["preemptions"] > 0
    assert result.counters["recomputed_tokens"] > 0
    assert result.counters["kv_blocks_free_min"] <= 1


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize(("preset", "attention"), FULL, ids=["-".join(a) for a in FULL])
def test_shared_prefixes(
    preset: str, attention: str, page_size: int, tiny_model: Models, reference: Reference, run: Any
) -> None:
    """One after another and all at once; on and off; the hits are exactly the whole pages shared."""
    model = tiny_model(preset, attention)
    shared = prompt(37, 23)
    prompts = [[*shared, *prompt(4 + i, i)] for i in range(4)]
    expected = [reference(model, p, NEW) for p in prompts]
    whole = 37 // page_size * page_size
    for sharing, one_by_one in product((True, False), (True, False)):
        result = run(
            model,
            prompts,
            NEW,
            one_by_one,
            page_size=page_size,
            num_blocks=100,
            max_batch_tokens=24,
            allow_block_sharing=sharing,
        )
        assert result.tokens == expected
        if not sharing:
            assert result.counters["prefix_hit_tokens"] == 0
        elif one_by_one:
            assert result.cached == [0, whole, whole, whole]
            assert result.counters["prefix_hit_tokens"] == 3 * whole
        else:
            assert result.counters["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-gpt2"])
def test_shared_prefixes_under_preemption(preset: str, tiny_model: Models, reference: Reference, run: Any) -> None:
    model = tiny_model(preset, "sdpa")
    shared = prompt(9, 29)
    prompts = [[*shared, i] for i in range(6)]
    result = run(model, prompts, 24, page_size=4, num_blocks=16, max_batch_tokens=16, safety_margin=0.0)
    assert result.tokens == [reference(model, p, 24) for p in prompts]
    assert result.counters["preemptions"] > 0
    assert result.counters["prefix_hit_tokens"] > 0


@pytest.mark.parametrize(("preset", "attention"), FULL, ids=["-".join(a) for a in FULL])
def test_a_prompt_of_more_than_a_large_page(
    preset: str, attention: str, tiny_model: Models, reference: Reference, run: Any
) -> None:
    """300 tokens on pages of 256, in chunks of 100, the second time with one page found."""
    model = tiny_model(preset, attention)
    long = prompt(300, 31)
    result = run(model, [long, [*long[:260], 5]], 6, True, page_size=256, num_blocks=4, max_batch_tokens=100)
    assert result.tokens == [reference(model, long, 6), reference(model, [*long[:260], 5], 6)]
    assert result.cached == [0, 256]
    assert [s.prefill_tokens for s in result.steps[:3]] == [100, 100, 100]


@pytest.mark.parametrize(("budget", "in_window"), [(1, 5), (3, 6), (16, 9), (30, 13)])
@pytest.mark.parametrize(("preset", "attention"), SLIDING, ids=["-".join(a) for a in SLIDING])
def test_windows_shorter_than_the_sequence(
    preset: str,
    attention: str,
    budget: int,
    in_window: int,
    tiny_model: Models,
    reference: Reference,
    run: Any,
) -> None:
    """A-swa-01, A-swa-02, A-prefix-02: 60 tokens and 40 new against a window of 16. The pool could not hold the whole
    sequence in every layer, so pages were given back; sharing is off, and said to be."""
    model = tiny_model(preset, attention)
    prompts = [prompt(60, 13), prompt(40, 19)]
    hybrid = preset == "tiny-gemma2"
    per_request = in_window + (25 if hybrid else 0)
    result = run(model, prompts, 40, True, page_size=4, num_blocks=per_request, max_batch_tokens=budget)
    assert result.tokens == [reference(model, p, 40) for p in prompts]
    assert result.resolved.layout.blocks_needed(99, budget) == per_request < 25 * (1 + hybrid)
    assert result.resolved.allow_block_sharing is False
    assert result.counters["prefix_hit_tokens"] == 0


def test_a_changed_window_is_obeyed(tiny_model: Models, reference: Reference, run: Any) -> None:
    """A-swa-03: the window is the model's."""
    from transformers import MistralConfig, MistralForCausalLM

    base = tiny_model("tiny-mistral", "eager")
    answers = []
    for window in (8, 16):
        config = MistralConfig(**{**base.config.to_dict(), "sliding_window": window})
        config._attn_implementation = "eager"
        model = MistralForCausalLM(config).eval()
        model.load_state_dict(base.state_dict())
        result = run(model, [prompt(40, 3)], NEW, page_size=4, num_blocks=30, max_batch_tokens=16)
        assert result.tokens == [reference(model, prompt(40, 3), NEW)]
        assert result.resolved.layout.groups[0].window == window
        answers.append(result.tokens)
    assert answers[0] != answers[1]


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_one_request_at_a_time(scheduler: str, tiny_model: Models, reference: Reference, run: Any) -> None:
    """A-mrb-01: a cap of 1, 2 and 3 requests a step."""
    model = tiny_model("tiny-qwen3", "sdpa")
    for cap in (1, 2, 3):
        result = run(
            model, PROMPTS, NEW, page_size=4, num_blocks=100, max_batch_tokens=9, max_requests_per_batch=cap,
            scheduler_type=scheduler,
        )  # fmt: skip
        assert result.tokens == [reference(model, p, NEW) for p in PROMPTS]
        assert result.counters["max_running"] == cap
        assert max(s.decode_rows + s.prefill_rows for s in result.steps) <= cap


def test_real_weights(tiny_model: Models, reference: Reference, run: Any) -> None:
    """SmolLM2-135M: few tokens, chunks, and a shared beginning."""
    from harness.models import ModelLoadError

    try:
        model = tiny_model("smollm2", "sdpa")
    except ModelLoadError as error:
        pytest.skip(str(error))
    shared = [504, 3575, 282, 4649, 314, 253, 1123, 2644, 338, 553, 260, 905, 30, 198, 1788, 506, 4421]
    prompts = [[*shared, 1990, 28], [*shared, 260, 1695, 282], [504, 1671]]
    result = run(model, prompts, 8, True, page_size=16, num_blocks=16, max_batch_tokens=12)
    assert result.tokens == [reference(model, p, 8) for p in prompts]
    assert result.cached == [0, 16, 0]
    assert any(s.prefill_tokens == 12 for s in result.steps), "a prompt was computed in chunks"
