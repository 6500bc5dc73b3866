"""Offloaded blocks on a GPU: pinned memory, an own copy stream, graphs and async batching beside it."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from engine import ContinuousBatchingConfig, ContinuousBatchingManager

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEW = 40


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to("cuda").eval()


@pytest.mark.parametrize("captured", [True, False])
def test_tokens_in_fp32(model: LlamaForCausalLM, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-off-02, A-off-03. Every request restored continues with the tokens of a pool that holds all."""
    # In fp32 it is the engine's own kernels that can be captured.
    monkeypatch.setattr(model.config, "_attn_implementation", "triton" if captured else "sdpa")
    prompts = [torch.randint(0, 500, (20 + 7 * i,)).tolist() for i in range(12)]
    answers = []
    for blocks, space in ((400, 0.0), (30, 0.05)):
        config = ContinuousBatchingConfig(
            page_size=16,
            num_blocks=blocks,
            max_batch_tokens=64,
            safety_margin=0.0,
            cpu_offload_space=space,
            use_cuda_graph=captured,
            use_async_batching=captured,
            allow_block_sharing=False,
        )
        manager = ContinuousBatchingManager(model, GenerationConfig(max_new_tokens=NEW), config)
        for i, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=str(i))
        manager.warmup()
        host = manager._core.runner.host
        if space:
            assert all(tensor.is_pinned() for tensor in host.tensors)
            assert host.nbytes == manager.resolved_config.num_host_blocks * manager.resolved_config.layout.block_bytes
        manager.start()
        answers.append({output.request_id: output.generated_tokens for output in manager})
        counters, log = manager.counters(), manager.step_log
        manager.destroy()
        if space:
            assert 0 < counters["restores"] <= counters["offloads"] <= counters["preemptions"]
            assert counters["recomputed_tokens"] == 0
            assert all(step.restore_ms > 0 for step in log if step.restored)
            assert (counters["graph_replays"] > 0) is captured
            assert host.tensors == []
    assert answers[0] == answers[1]
