"""The decode fast path in the whole engine: which kernel decode rows take, and that it changes no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import engine
from engine import ContinuousBatchingConfig

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9, 7, 9]]
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny(kind: Any, config: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind._from_config(config(**SIZES, **more), attn_implementation="eager").eval()


def reference(model: Any, prompt: list[int]) -> list[int]:
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("pages", [None, 0, 1])
def test_the_path_of_decode_rows(pages: int | None) -> None:
    """A-fast-03, A-fast-04: on by default, also for requests longer than the tables; never with 0."""
    model = tiny(LlamaForCausalLM, LlamaConfig)
    expected = [reference(model, prompt) for prompt in PROMPTS]
    model.config._attn_implementation = "triton"
    config = ContinuousBatchingConfig(page_size=4, num_blocks=20, max_batch_tokens=10, max_blocks_per_request=pages)
    manager = engine.init_continuous_batching(model, GenerationConfig(max_new_tokens=4), config)
    assert manager.resolved_config.attention_backend == "triton"
    assert manager.resolved_config.decode_kernel is (pages != 0)
    manager.start()
    ids = manager.add_requests(PROMPTS)
    done = {output.request_id: output.generated_tokens for output in manager}
    log = manager.step_log
    manager.destroy()
    assert [done[i] for i in ids] == expected
    assert any(step.kind == "mixed" for step in log), "decode rows beside a prefill"
    for step in log:
        single = step.decode_rows
        assert step.decode_kernel_rows == 0 if pages == 0 else step.decode_kernel_rows >= single
        assert step.table_pages >= 1
    assert (manager.counters()["decode_kernel_rows"] > 0) is (pages != 0)


def test_the_own_kernel_serves_sliding_layers() -> None:
    """A-fast-06: the field is 0, the decode kernel runs."""
    model = tiny(MistralForCausalLM, MistralConfig, sliding_window=5)
    expected = [reference(model, prompt) for prompt in PROMPTS]
    model.config._attn_implementation = "triton"
    config = ContinuousBatchingConfig(page_size=4, num_blocks=20, max_blocks_per_request=64)
    manager = engine.init_continuous_batching(model, GenerationConfig(max_new_tokens=4), config)
    assert manager.resolved_config.max_blocks_per_request == 0
    manager.start()
    ids = manager.add_requests(PROMPTS)
    done = {output.request_id: output.generated_tokens for output in manager}
    counters = manager.counters()
    manager.destroy()
    assert [done[i] for i in ids] == expected
    assert counters["decode_kernel_rows"] > 0
