"""bf16 on a GPU. Its sums depend on the shape of a batch, so a different token is allowed where, and only where, the
logits of the same weights in fp32 put the two candidates within `MARGIN` of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from engine.attention.flash import why_not_flash
from engine.attention.flash3 import why_not_flash3
from engine.attention.triton_paged import why_not_triton

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MARGIN = 1e-2
NEW = 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 500, (n,), generator=generator).tolist() for n in (1, 5, 9, 300, 40, 257, 256, 13, 77)]


@pytest.fixture(scope="module")
def model() -> Any:
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model(**config.to_dict())
    return Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").to("cuda").eval()


@pytest.fixture(scope="module")
def exact(model: Any) -> Any:
    """The same weights in fp32."""
    twin = Qwen3ForCausalLM(model.config).to("cuda").float().eval()
    twin.load_state_dict(model.state_dict())
    return twin


def obstacle(backend: str) -> str | None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    if backend == "triton":
        return why_not_triton(device, dtype, 64, 16)
    return (
        why_not_flash(device, dtype, 64, 256) if backend == "flash_attention_2" else why_not_flash3(device, dtype, 64)
    )


@torch.no_grad()
def unexplained(exact: Any, prompt: list[int], got: Sequence[int], want: Sequence[int]) -> str | None:
    """None if equal, or first different where the logits are within `MARGIN`; else what differs and by how much."""
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            logits = exact(torch.tensor([[*prompt, *want[:i]]], device="cuda")).logits[0, -1]
            margin = (logits[b] - logits[a]).abs().item()
            return None if margin < MARGIN else f"token {i}: {a} for {b}, margin {margin:.3f}"
    return None


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("blocks", ["ample", "few"])
@pytest.mark.parametrize("backend", ["flash_attention_2", "flash_attention_3", "triton"])
def test_tokens_equal_generate_within_margin(
    backend: str,
    blocks: str,
    captured: bool,
    model: Any,
    exact: Any,
    prompts: list[list[int]],
    serve: Callable[..., Any],
    reference: Callable[[Any, Sequence[int], int], list[int]],
) -> None:
    """Launched, and captured with a step ahead; with few blocks requests are preempted and computed again."""
    why = obstacle(backend)
    if why is not None:
        pytest.skip(why)
    page_size = 256 if backend == "flash_attention_2" else 16
    if blocks == "few":  # each comes to the end of a page while it decodes
        prompts = [(p * (250 // len(p) + 1))[:246] for p in prompts[:6]]
    tight = 5 if page_size == 256 else 33  # five first pages, or all but one of the pages of two
    result = serve(
        model, backend, prompts, NEW, page_size=page_size, num_blocks=6400 // page_size if blocks == "ample" else tight,
        max_batch_tokens=256, safety_margin=0.0, allow_block_sharing=blocks == "ample",
        use_cuda_graph=captured, use_async_batching=captured,
    )  # fmt: skip
    assert (result.counters["preemptions"] > 0) is (blocks == "few")
    assert (result.counters["graph_replays"] > 0) is captured
    assert result.overlapped is captured
    for prompt, got in zip(prompts, result.tokens, strict=True):
        assert unexplained(exact, prompt, got, reference(model, prompt, NEW)) is None
