"""Captured steps on a GPU: padding intervals and the decode fast path change how steps run, never their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import engine
import engine.runner.runner
from engine import ContinuousBatchingConfig
from engine.attention import BACKENDS
from engine.attention.flash import why_not_flash
from engine.attention.flash3 import why_not_flash3
from engine.attention.triton_paged import why_not_triton
from engine.runner.launch_time import ReplayLimit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEW_TOKENS = 12
LENGTHS = (1, 3, 40, 130, 17, 64, 59, 9, 33)
"""356 in all: a full step of 256 tokens and one of about 100."""


def obstacle(backend: str, dtype: torch.dtype) -> str | None:
    device = torch.device("cuda")
    if backend == "triton":
        return why_not_triton(device, dtype, 64, 16)
    if backend == "flash_attention_2":
        return why_not_flash(device, dtype, 64, 256)
    return why_not_flash3(device, dtype, 64)


def served(
    backend: str,
    dtype: torch.dtype,
    page_size: int = 16,
    lengths: tuple[int, ...] = LENGTHS,
    vocabulary: int = 128,
    **config: Any,
) -> Any:
    """Tokens, counters, step log and memory ledger of one run over a tiny Llama."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=256,
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
    model = LlamaForCausalLM._from_config(sizes, dtype=dtype, attn_implementation="sdpa").to("cuda").eval()
    model.config._attn_implementation = backend
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 128, (n,), generator=generator).tolist() for n in lengths]
    sizes = {"num_blocks": 200, "max_batch_tokens": 256, "max_requests_per_batch": 32}
    settings = ContinuousBatchingConfig(page_size=page_size, **sizes | config)
    manager = engine.init_continuous_batching(model, GenerationConfig(max_new_tokens=NEW_TOKENS), settings)
    assert manager.resolved_config.attention_backend == backend
    manager.start()
    ids = manager.add_requests(prompts)
    done = {output.request_id: output for output in manager}
    result = [done[i].generated_tokens for i in ids], manager.counters(), manager.step_log, manager.ledger()
    manager.destroy()
    assert all(done[i].error is None for i in ids)
    return result


def test_intervals_trade_padding_for_graphs() -> None:
    """A-graph-03, A-graph-04: fp32, so tokens are equal to the last."""
    why = obstacle("triton", torch.float32)
    if why is not None:
        pytest.skip(why)
    plain, *_ = served("triton", torch.float32, use_cuda_graph=False)
    runs = {}
    for q, kv in ((64, 0), (256, 0), (64, 64), (64, 256)):
        tokens, counters, log, ledger = served(
            "triton",
            torch.float32,
            use_cuda_graph=True,
            max_blocks_per_request=32,
            q_padding_interval_size=q,
            kv_padding_interval_size=kv,
        )
        assert tokens == plain
        assert counters["graph_replays"] > 0
        assert counters["graph_pool_bytes"] > 0
        assert ledger["graph_pool_bytes"] == counters["graph_pool_bytes"]
        replayed = [step for step in log if step.graph]
        assert any(step.prefill_tokens for step in replayed)
        assert all(step.table_pages * 16 % (kv or 512) == 0 for step in replayed)
        runs[q, kv] = counters, {step.table_pages for step in replayed}
    assert runs[64, 0][0]["captured_steps"] > runs[256, 0][0]["captured_steps"]
    assert runs[64, 64][0]["captured_steps"] > runs[64, 256][0]["captured_steps"] > runs[64, 0][0]["captured_steps"]
    assert runs[64, 0][0]["padded_rows"] < runs[256, 0][0]["padded_rows"]
    assert max(runs[64, 0][1]) == min(runs[64, 0][1]) == 32
    assert min(runs[64, 64][1]) < min(runs[64, 256][1]) < 32


@pytest.mark.parametrize("backend", [name for name, each in BACKENDS.items() if each.decode_kernel])
@pytest.mark.parametrize("graphs", [False, True])
def test_without_the_fast_path_every_row_is_a_varlen_row(backend: str, graphs: bool) -> None:
    """A-fast-04: by the counter, captured or not; bf16 sums may differ, so tokens are compared in fp32 where served."""
    dtype = torch.float32 if backend == "triton" else torch.bfloat16
    why = obstacle(backend, dtype)
    if why is not None:
        pytest.skip(why)
    page_size = 256 if backend == "flash_attention_2" else 16
    fast, with_path, *_ = served(backend, dtype, page_size, use_cuda_graph=graphs)
    slow, without, log, _ = served(backend, dtype, page_size, use_cuda_graph=graphs, max_blocks_per_request=0)
    assert with_path["decode_kernel_rows"] > 0
    assert without["decode_kernel_rows"] == 0
    assert (without["graph_replays"] > 0) is graphs
    assert any(step.kind == "decode" and step.graph is graphs for step in log)
    if dtype == torch.float32:
        assert fast == slow
    else:
        same = sum(a == b for x, y in zip(fast, slow, strict=True) for a, b in zip(x, y, strict=True))
        assert same > 0.8 * len(LENGTHS) * NEW_TOKENS


@pytest.mark.parametrize("backend", ["triton", "flash_attention_2", "flash_attention_3"])
def test_large_steps_of_many_prefill_rows_are_replayed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 4,595 tokens in all in steps of at most 2,048, decode rows beside them; replayed whatever the launches
    take. Tokens are those of launched steps, with and without the decode fast path. flash-attn's captured steps stay at
    1,024 tokens in 8 prefill rows."""
    dtype = torch.float32 if backend == "triton" else torch.bfloat16
    why = obstacle(backend, dtype)
    if why is not None:
        pytest.skip(why)
    monkeypatch.setattr(
        engine.runner.runner, "replay_limit", lambda sizes, always, measure: ReplayLimit(sizes[-1], "all")
    )
    page_size = 256 if backend == "flash_attention_2" else 16
    given: dict[str, Any] = {
        "page_size": page_size,
        "lengths": (480, *(20 + 7 * i for i in range(30)), 470),
        "max_batch_tokens": 2048,
        "max_requests_per_batch": 64,
        "num_blocks": 100 if page_size == 256 else 700,
        "max_blocks_per_request": 32,  # as it is without the fast path
    }
    plain, *_ = served(backend, dtype, use_cuda_graph=False, **given)
    for decode_path in (True, False):
        given |= {} if decode_path else {"max_blocks_per_request": 0}
        tokens, counters, log, _ = served(backend, dtype, use_cuda_graph=True, **given)
        replayed = [step for step in log if step.graph and step.prefill_tokens]
        assert (counters["decode_kernel_rows"] > 0) is decode_path
        if backend == "triton":
            assert tokens == plain
            assert all(step.graph for step in log)
            assert max(step.prefill_tokens for step in replayed) > 1800
            assert max(step.prefill_rows for step in replayed) > 8
            assert any(step.prefill_tokens > 1024 and step.decode_rows > 0 for step in replayed)
            assert all(step.padded_rows <= (step.prefill_tokens + step.decode_rows) / 8 for step in replayed[:2])
        else:
            same = sum(a == b for x, y in zip(tokens, plain, strict=True) for a, b in zip(x, y, strict=True))
            assert same > 0.8 * len(plain) * NEW_TOKENS
            assert any(not step.graph for step in log)


def test_captured_steps_share_the_memory_of_their_logits() -> None:
    """A vocabulary so wide that logits of its own for each captured decode step would be most of what they hold."""
    why = obstacle("triton", torch.bfloat16)
    if why is not None:
        pytest.skip(why)
    _, counters, *_ = served(
        "triton", torch.bfloat16, use_cuda_graph=(False, True), vocabulary=131_072, max_requests_per_batch=64
    )
    rows = (1, 2, 4, *range(8, 65, 8))
    assert counters["captured_steps"] == len(rows)
    assert counters["graph_pool_bytes"] < 0.8 * 2 * 131_072 * sum(rows)


def test_a_request_wider_than_the_tables_is_launched_and_drops_nobody() -> None:
    """A-fast-03: 4 pages of 16 tokens hold the short ones; steps with a long one are not replayed."""
    why = obstacle("triton", torch.float32)
    if why is not None:
        pytest.skip(why)
    plain, *_ = served("triton", torch.float32, use_cuda_graph=False)
    tokens, counters, log, _ = served("triton", torch.float32, use_cuda_graph=True, max_blocks_per_request=4)
    assert tokens == plain
    assert {step.graph for step in log if step.table_pages > 4} == {False}
    assert counters["decode_kernel_rows"] == sum(step.decode_kernel_rows for step in log) > 0
