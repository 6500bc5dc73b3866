"""The engine on a GPU: flash attention, captured graphs and async batching against single-prompt generation.

bf16 sums depend on the shape of a batch, so a different token is allowed where, and only where, the reference's own
logits (fp32) put the two candidates within `MARGIN` of each other.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

import engine
from engine import ContinuousBatchingConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MARGIN = 1e-2
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 500, (n,), generator=generator).tolist() for n in (1, 5, 9, 300, 40, 257, 256, 13, 77)]


def _qwen3(dtype: torch.dtype, attn: str, initializer_range: float = 0.02) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    config = AutoConfig.for_model(**config.to_dict())
    return Qwen3ForCausalLM._from_config(config, dtype=dtype, attn_implementation=attn).to("cuda").eval()


def _reference(model: Qwen3ForCausalLM, prompt: list[int]) -> list[int]:
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
    ids = torch.tensor([prompt], device="cuda")
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()


def _unexplained(model: Qwen3ForCausalLM, prompt: list[int], got: list[int], want: list[int]) -> str | None:
    """None if equal or first different where the logits are within MARGIN; otherwise what differs and by how much."""
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            exact = Qwen3ForCausalLM(model.config).to("cuda").float().eval()
            exact.load_state_dict(model.state_dict())
            with torch.no_grad():
                logits = exact(torch.tensor([prompt + want[:i]], device="cuda")).logits[0, -1]
            margin = (logits[b] - logits[a]).abs().item()
            return None if margin < MARGIN else f"token {i}: {a} for {b}, margin {margin:.3f}"
    return None


def test_fp32_sdpa_equals_generate(prompts: list[list[int]]) -> None:
    model = _qwen3(torch.float32, "sdpa", initializer_range=0.15)
    for page_size in (16, 256):
        config = ContinuousBatchingConfig(
            page_size=page_size, max_batch_tokens=128, num_blocks=400, use_cuda_graph=None
        )
        outputs = engine.generate_batch(model, prompts, None, config, progress_bar=False, max_new_tokens=NEW_TOKENS)
        for prompt, output in zip(prompts, outputs.values(), strict=True):
            assert output.generated_tokens == _reference(model, prompt)


@pytest.mark.parametrize(
    ("graphs", "asynchronous", "scheduler"),
    [(False, False, "fifo"), (True, False, "fifo"), (True, True, "fifo"), (True, True, "prefill_first")],
)
def test_bf16_flash_equals_generate_within_margin(
    prompts: list[list[int]], graphs: bool, asynchronous: bool, scheduler: str
) -> None:
    pytest.importorskip("flash_attn")
    model = _qwen3(torch.bfloat16, "sdpa")
    config = ContinuousBatchingConfig(
        use_cuda_graph=graphs,
        use_async_batching=asynchronous,
        max_batch_tokens=256,
        num_blocks=40,
        scheduler_type=scheduler,
    )
    manager = engine.init_continuous_batching(model, GenerationConfig(max_new_tokens=NEW_TOKENS), config)
    assert manager.resolved_config.attention_backend == "flash_attention_2"
    manager.start()
    ids = manager.add_requests(prompts)
    outputs = {o.request_id: o for o in manager}
    counters = manager.counters()
    manager.destroy()
    assert (counters["graph_replays"] > 0) is graphs
    for prompt, request_id in zip(prompts, ids, strict=True):
        got = outputs[request_id].generated_tokens
        assert _unexplained(model, prompt, got, _reference(model, prompt)) is None


def test_preemption_with_graphs_and_async(prompts: list[list[int]]) -> None:
    pytest.importorskip("flash_attn")
    model = _qwen3(torch.bfloat16, "sdpa")
    long = [p * (250 // len(p) + 1) for p in prompts[:6]]  # each crosses a page boundary while it decodes
    long = [p[:246] for p in long]
    config = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=512, safety_margin=0.0, allow_block_sharing=False)
    manager = engine.init_continuous_batching(model, GenerationConfig(max_new_tokens=NEW_TOKENS), config)
    assert manager.resolved_config.use_async_batching
    manager.start()
    ids = manager.add_requests(long)
    outputs = {o.request_id: o for o in manager}
    counters = manager.counters()
    manager.destroy()
    assert counters["preemptions"] > 0
    assert counters["graph_replays"] > 0
    for prompt, request_id in zip(long, ids, strict=True):
        got = outputs[request_id].generated_tokens
        assert _unexplained(model, prompt, got, _reference(model, prompt)) is None


def test_seeded_sampling_does_not_depend_on_graphs_or_mates(prompts: list[list[int]]) -> None:
    model = _qwen3(torch.float32, "sdpa")
    seen = set()
    for mates in ([], prompts[1:4], prompts):
        config = ContinuousBatchingConfig(max_batch_tokens=128, num_blocks=100)
        generation = GenerationConfig(do_sample=True, temperature=0.8, max_new_tokens=16)
        manager = engine.init_continuous_batching(model, generation, config)
        manager.start()
        for mate in mates:
            manager.add_request(mate)
        manager.add_request(prompts[4], request_id="seeded", seed=42)
        seen.add(tuple(next(o for o in manager if o.request_id == "seeded").generated_tokens))
        manager.destroy()
    assert len(seen) == 1
