"""After the warm-up no request waits for a compiler."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from engine import ContinuousBatchingConfig, ContinuousBatchingManager
from engine.bench.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _jit_functions() -> list[Any]:
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("engine.kernels.")]
    return [f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)]


@pytest.mark.parametrize("captured", [True, False])
def test_nothing_is_compiled_while_serving(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any size, mixture, alignment and choice of tokens, captured and launched. What earlier tests compiled is
    forgotten first so that what the warm-up compiles is all there is."""
    from triton import knobs

    for function in _jit_functions():
        function.device_caches.clear()
    compiled: list[str] = []
    hook: Callable[..., None] = lambda **details: compiled.append(details["fn"].name)  # noqa: E731
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    model = tiny_model("tiny-llama", head_dim=64).to("cuda", torch.bfloat16)
    config = ContinuousBatchingConfig(
        page_size=16, num_blocks=600, max_batch_tokens=512, max_requests_per_batch=40, attention_backend="triton",
        use_cuda_graph=captured, use_async_batching=captured, per_request_processors=True, max_blocks_per_request=10,
    )  # fmt: skip
    manager = ContinuousBatchingManager(model, GenerationConfig(max_new_tokens=20, do_sample=True), config)
    try:
        manager.warmup()
        names = {name.rpartition(".")[2] for name in compiled}
        assert {"_decode_kernel", "_prefill_kernel", "_rope_kernel", "_gumbel_kernel", "_cut_kernel"} <= names
        compiled.clear()
        rng = random.Random(0)
        for i in range(60):
            manager.add_request(
                rng.choices(range(97), k=rng.randrange(1, 120)), max_new_tokens=rng.randrange(2, 20),
                temperature=rng.choice((0.0, 0.0, 0.7)), top_k=rng.choice((0, 5)), top_p=rng.choice((1.0, 0.9)),
                repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
            )  # fmt: skip
            if i == 20:
                manager.start()
            if i == 40:  # wider than the captured tables: steps with it are launched
                manager.add_request(rng.choices(range(97), k=200), max_new_tokens=3)
        assert len(list(manager)) == 61
        kinds = {(step.kind, step.graph) for step in manager.step_log}
    finally:
        manager.destroy()
    assert ("mixed", captured) in kinds
    assert ("decode", captured) in kinds
    assert ("mixed", False) in kinds or ("prefill", False) in kinds
    assert compiled == []
