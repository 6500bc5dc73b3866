"""The engine on its own kernels: greedy tokens are those of ``model.generate`` on each prompt alone, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from engine import kernels
from engine.bench.tiny_models import tiny_model
from engine.kernels import paged_decode, paged_prefill
from engine.models.operators import Operators
from engine.sampling import operators as sampling
from engine.sampling.filters import cuts_by_search

# Grouped heads everywhere; heads of 32 (the least), 40 and 64; a window, a window and a soft-cap in every other layer.
HYBRID = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama-32": ("tiny-llama", {"head_dim": 32}),
    "llama-one-key-head": ("tiny-llama", {"head_dim": 40, "num_key_value_heads": 1}),
    "mistral-64": ("tiny-mistral", {"head_dim": 64}),
    "gemma2-32": ("tiny-gemma2", {"head_dim": 32, "attn_logit_softcapping": 5.0, **HYBRID}),
    "gemma3-32": ("tiny-gemma3", {"head_dim": 32, **HYBRID}),
}
CASES = [
    # model, page, memory, chunks, scheduler, sharing, ahead, fused
    ("llama-32", 4, "recompute", True, "fifo", True, False, None),
    ("llama-one-key-head", 16, "ample", True, "fifo", False, True, None),
    ("mistral-64", 4, "offload", False, "fifo", False, True, None),
    ("gemma2-32", 16, "recompute", True, "prefill_first", False, True, None),
    ("gemma3-32", 4, "recompute", True, "fifo", False, True, None),
    ("llama-32", 64, "recompute", False, "fifo", True, True, None),
]


@cache
def model_of(name: str) -> Any:
    """Kept: the reference is remembered by model."""
    preset, sizes = MODELS[name]
    return tiny_model(preset, **sizes)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the backend called each attention kernel, and how often with both kinds of rows in one step."""
    from engine.attention import triton_paged

    counts = {"decode": 0, "prefill": 0}

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return kernel(*arguments, **options)

        return call

    monkeypatch.setattr(triton_paged, "paged_decode", counted("decode", paged_decode))
    monkeypatch.setattr(triton_paged, "paged_prefill", counted("prefill", paged_prefill))
    return counts


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_attention_kernels_inside_the_engine(
    case: tuple[Any, ...], check_case: Callable[..., Any], launches: dict[str, int]
) -> None:
    name, page_size, memory, chunks, scheduler, sharing, ahead, fused = case
    requests = 5 if "mistral" in name else 3  # a window of 8 leaves more room
    result = check_case(
        model_of(name), "triton", page_size, chunks, scheduler, sharing, memory, ahead, fused, requests
    )  # fmt: skip
    assert launches["decode"] > 0
    assert launches["prefill"] > 0
    if chunks and scheduler == "fifo":
        assert any(step.kind == "mixed" for step in result.steps)


@pytest.mark.parametrize("name", ["llama-32", "gemma2-32"])
def test_every_kernel_of_the_fused_forward_pass(
    name: str, check_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the small operations are the kernels' twins; here they are the kernels, as on a GPU."""
    chosen = []

    def choose(device: Any, dtype: Any) -> Operators:
        import torch

        chosen.append(device)
        return Operators(
            kernels.rms_norm,
            kernels.add_rms_norm,
            kernels.rope_and_write,
            kernels.silu_mul,
            kernels.gelu_tanh_mul,
            torch.nn.functional.linear,
        )

    def choose_sampling(device: Any) -> sampling.Operators:
        chosen.append(device)
        return sampling.Operators(kernels.greedy_argmax, kernels.gumbel_argmax, cuts_by_search)

    monkeypatch.setattr(Operators, "choose", choose)
    monkeypatch.setattr(sampling.Operators, "choose", choose_sampling)
    check_case(model_of(name), "triton", 4, True, "fifo", True, "recompute", True, None, requests=3)
    assert len(chosen) == 2


def test_heads_below_the_kernels_tiles_are_refused_by_name() -> None:
    from engine import ContinuousBatchingConfig, ContinuousBatchingManager

    model = tiny_model("tiny-llama", head_dim=16)
    model.config._attn_implementation = "triton"
    with pytest.raises(ValueError, match="head sizes from 32 to 256"):
        ContinuousBatchingManager(model, None, ContinuousBatchingConfig(page_size=4))
