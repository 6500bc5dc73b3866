"""What the ledger says is what the allocator gives out."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from engine import ContinuousBatchingConfig, ContinuousBatchingManager

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("captured", [False, True])
def test_the_ledger_agrees_with_the_allocator_to_two_percent(captured: bool) -> None:
    """B22: weights before the engine, then weights and cache when it is made (fused in place: no second copy), and the
    whole with the activations of a full step at its peak."""
    gc.collect()
    torch.cuda.empty_cache()
    empty = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.config._attn_implementation = "triton"
    weights = torch.cuda.memory_allocated() - empty
    settings = ContinuousBatchingConfig(
        page_size=16, num_blocks=16_000, max_batch_tokens=1024, max_requests_per_batch=16, auto_switch_to_flash=False,
        use_cuda_graph=captured, use_async_batching=captured,
    )  # fmt: skip
    manager = ContinuousBatchingManager(model, GenerationConfig(max_new_tokens=8), settings)
    try:
        manager.warmup()
        ledger = manager.ledger()
        assert ledger["kv_cache_bytes"] > 2**30
        assert weights == pytest.approx(ledger["weights_bytes"], rel=0.02)
        held = torch.cuda.memory_allocated() - empty
        graphs = ledger.get("graph_pool_bytes", 0)
        assert (graphs > 0) is captured
        assert held == pytest.approx(ledger["weights_bytes"] + ledger["kv_cache_bytes"], rel=0.02, abs=graphs)
        torch.cuda.reset_peak_memory_stats()
        # Full steps: of one long prompt, replayed where it can be, and of more prompts than a captured step has rows.
        for count, length in ((16, 1000), (16, 64)):
            for i in range(count):
                manager.add_request([(i * length + j) % 32_000 for j in range(length)])
        manager.start()
        assert len(list(manager)) == 32
        full = {step.graph for step in manager.step_log if step.prefill_tokens > 1000}
        assert full == ({True, False} if captured else {False})
        peak = torch.cuda.max_memory_allocated() - empty
        assert peak == pytest.approx(sum(ledger.values()), rel=0.02)
    finally:
        manager.destroy()
