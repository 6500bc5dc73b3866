"""Models small enough to check every token of: random weights of a fixed seed, fp32, on the CPU."""

from __future__ import annotations

from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "tiny-llama": {"model_type": "llama"},
    "tiny-mistral": {"model_type": "mistral", "sliding_window": 8},
    "tiny-gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "tiny-gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
"""All layers full, all sliding, and both in turn: with a soft-cap, and with a rotation of its own for each kind."""


def tiny_model(name: str, seed: int = 0, attention: str = "eager", **sizes: Any) -> Any:
    """A causal LM of `TINY_MODELS` in eval mode.

    Args:
        seed: of its weights.
        attention: as it is loaded with, written out by default.
        sizes: fields of its configuration to change, such as ``head_dim``.

    Raises:
        ValueError: no such model.
    """
    if name not in TINY_MODELS:
        raise ValueError(f"model {name!r} is not one of {', '.join(TINY_MODELS)}")
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**_SIZES, **TINY_MODELS[name], **sizes}
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
