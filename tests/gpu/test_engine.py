"""The engine on a GPU in fp32: tokens are those of single-prompt generation with each backend, launched kernel by
kernel, replayed from graphs, and a step ahead; whatever the layers' windows, preemptions, ends and cancels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from engine import ContinuousBatchingConfig, ContinuousBatchingManager, RequestStatus
from engine.attention.triton_paged import why_not_triton
from engine.bench.oracle import cut, with_other_weights
from engine.model_shape import ModelShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Models = Callable[[str], Any]
Serve = Callable[..., Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]

NEW = 12
MODES = {
    "launched": {"use_cuda_graph": False, "use_async_batching": False},
    "captured": {"use_cuda_graph": True, "use_async_batching": False},
    "ahead": {"use_cuda_graph": True, "use_async_batching": True},
}


def prompt(length: int, salt: int) -> list[int]:
    return [(salt + 31 * i + i * i) % 97 for i in range(length)]


# One token, on page borders, several chunks of 64, more than a page of 256.
PROMPTS = [prompt(n, 7 * n) for n in (1, 5, 16, 33, 64, 77, 130, 250, 9, 300)]


@pytest.fixture(autouse=True)
def _the_kernels_run_here() -> None:
    why = why_not_triton(torch.device("cuda"), torch.float32, 64, 16)
    assert why is None, why


@pytest.mark.parametrize(
    ("backend", "page_size", "mode"),
    [
        *[("triton", page_size, mode) for page_size in (16, 64, 128, 256) for mode in MODES],
        ("sdpa", 16, "launched"),
        ("sdpa", 256, "launched"),
        ("eager", 16, "launched"),
    ],
)
def test_tokens_equal_generate(
    backend: str, page_size: int, mode: str, gpu_model: Models, serve: Serve, reference: Reference
) -> None:
    """A-async-04, A-graph-03, A-page-05."""
    model = gpu_model("tiny-llama")
    result = serve(
        model, backend, PROMPTS, NEW, page_size=page_size, num_blocks=6400 // page_size, max_requests_per_batch=24,
        **MODES[mode],
    )  # fmt: skip
    assert result.tokens == [reference(model, p, NEW) for p in PROMPTS]
    assert result.resolved.use_fused_forward
    assert any(step.kind == "mixed" for step in result.steps)
    assert (result.counters["graph_replays"] > 0) is (mode != "launched")
    assert result.overlapped is (mode == "ahead")
    if mode != "launched":
        assert any(step.graph and step.kind == "decode" for step in result.steps)
        assert any(step.graph and step.kind == "mixed" for step in result.steps)
        assert result.counters["padded_rows"] > 0


@pytest.mark.parametrize("memory", ["ample", "recompute", "offload"])
@pytest.mark.parametrize("name", ["tiny-mistral", "tiny-gemma2", "tiny-gemma3"])
def test_windows_and_soft_caps_a_step_ahead(
    name: str, memory: str, gpu_model: Models, serve: Serve, reference: Reference
) -> None:
    """A-swa-01, A-fast-06, A-off-03: every layer, every other layer, by the fused forward pass and by transformers'."""
    model = gpu_model(name)
    prompts = [prompt(20 + 3 * i, 11 * i) for i in range(8)]
    layout = ModelShape.of(model).cache_layout(16)
    tight = layout.blocks_needed(41 + 40, 64) + layout.blocks_needed(41, 1)
    result = serve(
        model, "triton", prompts, 40, num_blocks=200 if memory == "ample" else tight, safety_margin=0.0,
        cpu_offload_space=100.5 * layout.block_bytes / 2**30 if memory == "offload" else 0.0, **MODES["ahead"],
    )  # fmt: skip
    assert result.tokens == [reference(model, p, 40) for p in prompts]
    assert result.resolved.use_fused_forward is (name != "tiny-gemma3")
    assert any(group.window for group in layout.groups)
    assert result.counters["graph_replays"] > 0
    assert result.overlapped
    assert (result.counters["preemptions"] > 0) is (memory != "ample")
    assert (result.counters["restores"] > 0) is (memory == "offload")
    assert (result.counters["recomputed_tokens"] > 0) is (memory == "recompute")


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_ends_and_cancels_a_step_ahead(
    scheduler: str, gpu_model: Models, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-async-04: 20 requests with EOS, stop sequences and cancels, in a pool that preempts; shared prefixes."""
    model, rng = gpu_model("tiny-llama"), random.Random(5)
    shared = prompt(20, 3)
    prompts = [[*shared, *prompt(1 + i, i)] if i % 2 else prompt(3 * i + 1, 5 * i) for i in range(20)]
    to_cancel = (0, 7)  # in the middle of many tokens, far from their end
    lengths = [150 if i in to_cancel else 40 for i in range(20)]
    whole = [reference(model, p, n) for p, n in zip(prompts, lengths, strict=True)]
    ends: list[tuple[int, list[int]]] = []
    for i, tokens in enumerate(whole):
        place = rng.randrange(5, 30)
        end = rng.choice([(-1, []), (tokens[place], []), (-1, tokens[place : place + 2])])
        ends.append((-1, []) if i in to_cancel else end)
    monkeypatch.setattr(model.config, "_attn_implementation", "triton")
    config = ContinuousBatchingConfig(
        page_size=16, num_blocks=14, max_batch_tokens=64, max_requests_per_batch=8, safety_margin=0.0,
        scheduler_type=scheduler, auto_switch_to_flash=False, **MODES["ahead"],
    )  # fmt: skip
    manager = ContinuousBatchingManager(model, GenerationConfig(max_new_tokens=40), config)
    monkeypatch.undo()
    try:
        for i, (p, (eos, stop)) in enumerate(zip(prompts, ends, strict=True)):
            stops = {"stop_sequences": [stop]} if stop else {}
            manager.add_request(
                p, request_id=str(i), max_new_tokens=lengths[i], eos_token_id=eos, streaming=i in to_cancel, **stops
            )
        manager.start()
        done, cancelled = {}, set()
        for output in manager:
            if output.is_finished():
                assert output.request_id not in done, "a second end"
                done[output.request_id] = output
            elif output.num_generated >= 3 and output.request_id not in cancelled:
                cancelled.add(output.request_id)
                manager.cancel_request(output.request_id)
        counters = manager.counters()
        assert manager._core is not None
        pool = manager._core.cache.pool
        assert pool.num_available == pool.num_blocks
    finally:
        manager.destroy()
    assert len(done) == 20
    early = 0
    for i, (tokens, (eos, stop)) in enumerate(zip(whole, ends, strict=True)):
        output, expected = done[str(i)], cut(tokens, eos, stop)
        if i in to_cancel:
            assert output.status is RequestStatus.CANCELLED
            assert output.generated_tokens == expected[: output.num_generated]
        else:
            assert output.status is RequestStatus.FINISHED
            assert output.generated_tokens == expected
            early += len(expected) < 40
    assert early >= 5
    assert counters["preemptions"] > 0
    assert counters["graph_replays"] > 0
    assert counters["prefix_hit_tokens"] > 0


def test_seeded_sampling_does_not_depend_on_graphs_or_mates(gpu_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpu_model("tiny-llama")
    seen = set()
    for mates, mode in (([], "launched"), (PROMPTS[1:4], "captured"), (PROMPTS, "ahead")):
        monkeypatch.setattr(model.config, "_attn_implementation", "triton")
        config = ContinuousBatchingConfig(
            page_size=16, max_batch_tokens=64, num_blocks=100, max_requests_per_batch=8, auto_switch_to_flash=False,
            **MODES[mode],
        )  # fmt: skip
        generation = GenerationConfig(do_sample=True, temperature=0.8, max_new_tokens=16)
        manager = ContinuousBatchingManager(model, generation, config)
        monkeypatch.undo()
        try:
            for mate in mates:
                manager.add_request(mate)
            manager.add_request(PROMPTS[4], request_id="seeded", seed=42)
            manager.start()
            seen.add(tuple(next(o for o in manager if o.request_id == "seeded").generated_tokens))
            assert (manager.counters()["graph_replays"] > 0) is (mode != "launched")
        finally:
            manager.destroy()
    assert len(seen) == 1


def test_captured_steps_read_changed_weights(
    gpu_model: Models, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause under graphs and async batching: later requests have the tokens of the new weights, no old prefix."""
    from engine.bench.tiny_models import tiny_model

    served, old = tiny_model("tiny-llama", head_dim=64).to("cuda"), gpu_model("tiny-llama")
    new = with_other_weights(old.cpu(), 5).to("cuda")
    old.to("cuda")
    served.config._attn_implementation = "triton"
    config = ContinuousBatchingConfig(
        page_size=16, num_blocks=60, max_batch_tokens=64, max_requests_per_batch=4, auto_switch_to_flash=False,
        **MODES["ahead"],
    )  # fmt: skip
    manager = ContinuousBatchingManager(served, GenerationConfig(max_new_tokens=NEW), config)
    try:
        manager.start()
        for model in (old, new):
            with manager.pause():
                served.load_state_dict(model.state_dict())
            for cached in (0, 32):
                manager.add_request(PROMPTS[3])
                output = manager.get_result(timeout=30)
                assert output is not None
                assert (output.generated_tokens, output.cached_tokens) == (reference(model, PROMPTS[3], NEW), cached)
        assert manager.counters()["graph_replays"] > 0
    finally:
        manager.destroy()
