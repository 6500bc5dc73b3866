"""torch.compile on a GPU: every level gives the tokens of single-prompt generation (fp32), with captured steps and
async batching too, and nothing is compiled while requests are served.

Levels 2 and 3 let Inductor search; here it may try two tilings a product and no others, for what it would find does
not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters as torch_counters
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import CompileConfig

import engine
from engine import ContinuousBatchingConfig
from engine.attention.flash import why_not_flash
from engine.attention.triton_paged import why_not_triton

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEW_TOKENS = 16
LENGTHS = (1, 5, 90, 33, 2, 17, 40)


def build(dtype: torch.dtype) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").to("cuda").eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 512, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return build(torch.float32)


def generated(model: Qwen3ForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt alone by transformers, greedily."""
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
    result = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        result.append(out[0, len(prompt) :].tolist())
    return result


@pytest.fixture(scope="module")
def expected(model: Qwen3ForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    return generated(model, prompts)


@contextmanager
def small_search() -> Iterator[None]:
    """Inductor's search of "max-autotune-no-cudagraphs" without its last part, coordinate descent over each kernel's
    launch parameters, with two tilings of its own beside torch's for a matrix product, and timed anew."""
    from torch._inductor import config as inductor

    options = torch._inductor.list_mode_options
    small = {"max-autotune-no-cudagraphs": {"max_autotune": True}}
    few = {"test_configs.max_mm_configs": 2, "autotune_local_cache": False}

    def list_mode_options(mode: str | None = None, dynamic: bool | None = None) -> dict[str, Any]:
        return small.get(mode or "", options(mode, dynamic))

    with pytest.MonkeyPatch.context() as patch, inductor.patch(few):
        patch.setattr(torch._inductor, "list_mode_options", list_mode_options)
        yield


def serve(manager: Any, prompts: list[list[int]]) -> list[list[int]]:
    manager.start()
    compiled = torch_counters["stats"]["unique_graphs"]
    ids = manager.add_requests(prompts)
    done = {output.request_id: output for output in manager}
    assert [done[name].error for name in ids] == [None] * len(ids)
    assert torch_counters["stats"]["unique_graphs"] == compiled, "compiled while requests were served"
    return [done[name].generated_tokens for name in ids]


@pytest.mark.parametrize(
    ("level", "fused", "graphs"),
    [(1, True, True), (1, False, True), (1, True, False), (2, True, False), (3, True, True)],
)
def test_each_level_equals_generate(
    model: Any, prompts: list[list[int]], expected: list[list[int]], level: int, fused: bool, graphs: bool
) -> None:
    """A-comp-02: both paths are compiled; captured steps replay what was compiled."""
    why = why_not_triton(torch.device("cuda"), torch.float32, 64, 16)
    if why is not None:
        pytest.skip(why)
    tokens, rows = (32, 16) if level < 3 else (8, 4)  # at level 3 each power of two is compiled
    config = ContinuousBatchingConfig(
        page_size=16,
        num_blocks=60,
        max_batch_tokens=tokens,
        max_requests_per_batch=rows,
        attention_backend="triton",
        use_fused_forward=fused,
        use_cuda_graph=graphs,
        use_async_batching=graphs,
        q_padding_interval_size=tokens // 2 if graphs else 0,
        default_compile_level=level,
    )
    torch_counters.clear()
    manager = engine.init_continuous_batching(model, GenerationConfig(max_new_tokens=NEW_TOKENS), config)
    settled = manager.resolved_config
    assert settled.decode_kernel
    assert settled.varlen_compile_config.mode == ("default" if level == 1 else "max-autotune-no-cudagraphs")
    assert settled.decode_compile_config.dynamic is (level < 3)
    try:
        with small_search():
            manager.warmup()
        answers = serve(manager, prompts)
        counters = manager.counters()
        assert counters["compile_s"] > 0
        # One token and any other number on both paths; at level 3 1, 2, 4, and 8 with prompt tokens.
        assert torch_counters["stats"]["unique_graphs"] == (4 if level < 3 else 7)
        assert not torch_counters["graph_break"]
        searched = torch_counters["inductor"]["select_algorithm_autotune"]
        assert (searched > 0) is (level > 1), "Inductor timed products where the level says so"
        assert (counters["graph_replays"] > 0) is graphs
        kinds = {(record.kind, record.graph) for record in manager.step_log}
        assert ("decode", graphs) in kinds
        assert counters["decode_kernel_rows"] > 0
        assert answers == expected
    finally:
        manager.destroy()


def test_new_weights_reach_captured_compiled_steps(prompts: list[list[int]]) -> None:
    """Written in place during a pause."""
    why = why_not_triton(torch.device("cuda"), torch.float32, 64, 16)
    if why is not None:
        pytest.skip(why)
    model = build(torch.float32)
    config = ContinuousBatchingConfig(
        page_size=16,
        num_blocks=60,
        max_batch_tokens=64,
        max_requests_per_batch=8,
        attention_backend="triton",
        default_compile_level=1,
    )
    manager = engine.init_continuous_batching(model, GenerationConfig(max_new_tokens=NEW_TOKENS), config)
    try:
        before = serve(manager, prompts)
        with manager.pause():
            for parameter in model.parameters():
                parameter.data.mul_(0.7)
        ids = manager.add_requests(prompts)
        done = {output.request_id: output for output in manager}
        after = [done[name].generated_tokens for name in ids]
        assert manager.counters()["graph_replays"] > 0
    finally:
        manager.destroy()
    assert after == generated(model, prompts)
    assert after != before


def test_under_flash_attention_the_level_compiles_decode_only(prompts: list[list[int]]) -> None:
    """A-comp-04."""
    why = why_not_flash(torch.device("cuda"), torch.bfloat16, 64, 256)
    if why is not None:
        pytest.skip(why)
    config = ContinuousBatchingConfig(
        num_blocks=20, max_batch_tokens=64, attention_backend="flash_attention_2", default_compile_level=1
    )
    torch_counters.clear()
    manager = engine.init_continuous_batching(
        build(torch.bfloat16), GenerationConfig(max_new_tokens=NEW_TOKENS), config
    )
    try:
        assert manager.resolved_config.varlen_compile_config is None
        assert [len(tokens) for tokens in serve(manager, prompts)] == [NEW_TOKENS] * len(prompts)
        assert torch_counters["stats"]["unique_graphs"] == 2
        assert manager.counters()["graph_replays"] > 0
    finally:
        manager.destroy()


def test_graphs_of_its_own_are_refused(model: Any) -> None:
    for own in (CompileConfig(), CompileConfig(mode="max-autotune")):
        config = ContinuousBatchingConfig(num_blocks=20, page_size=16, varlen_compile_config=own)
        with pytest.raises(ValueError, match="CUDA graphs of its own"):
            engine.init_continuous_batching(model, GenerationConfig(max_new_tokens=2), config)
