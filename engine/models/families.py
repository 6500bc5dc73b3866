"""Which models the fused forward pass serves, and how they differ from Llama."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose frequencies do not depend on the sequence, so that they can be tabulated."""


@dataclass(frozen=True, slots=True)
class Family:
    """Differences between families that share Llama's layer.

    Attributes:
        unit_offset: norms multiply by ``1 + weight``.
        scaled_embedding: token embeddings are multiplied by the square root of the hidden size.
    """

    unit_offset: bool = False
    scaled_embedding: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(),
    "Gemma2ForCausalLM": Family(unit_offset=True, scaled_embedding=True),
}


def activation_of(config: Any) -> str:
    """Name of the gated activation in a model's config ("silu", "gelu_tanh"), or transformers' own if unknown here."""
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    return _ACTIVATIONS.get(str(name), str(name))


def why_not_fused(model: Any) -> str | None:
    """The reason why ``model`` runs through transformers' own forward pass, or None if the fused one serves it.

    Exactly the classes that transformers ships, untouched: a subclass, a hook, an adapter or a quantised layer may do
    anything, so they keep their own forward pass.
    """
    kind = type(model)
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        return f"{kind.__name__} is not one of {', '.join(FAMILIES)}"
    config = model.config
    if activation_of(config) not in _ACTIVATIONS.values():
        return f"its activation is {activation_of(config)}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        return f"its rotary embedding is {rope}, which cannot be tabulated"
    frequencies = getattr(model.model.rotary_emb, "inv_freq", None)
    if frequencies is None:
        return "its rotary embedding differs by layer"
    attention = model.model.layers[0].self_attn
    if not attention.is_causal:
        return "its attention looks in both directions"
    head_dim = attention.head_dim
    if 2 * frequencies.numel() != head_dim:
        return f"its rotary embedding turns {2 * frequencies.numel()} of {head_dim} elements of a head"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has forward hooks"
        if "forward" in vars(module):
            return f"the forward method of {name or 'the model'} was replaced"
        if name.endswith("_proj") and type(module) is not torch.nn.Linear:
            return f"{name} is a {type(module).__name__}, not a plain linear layer"
    return None
