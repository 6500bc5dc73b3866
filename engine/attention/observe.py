"""How a transformers model calls its attention: one forward pass over three tokens, with a function that only notes.

What a config says of a model's attention is incomplete (a layer may call it twice, share another's keys, look both
ways), so a model that runs through the bridge is asked itself, before anything is allocated for it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.bridge import attention_named

OBSERVER_NAME = "cb_observe"
_TOKENS = 3
_seen = threading.local()


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of a layer's attention.

    Attributes:
        layer: index of the layer; None if the module does not say.
        num_heads, num_kv_heads: of queries, and of keys and values.
        head_dim, value_dim: elements of a key and of a value.
        window: the sliding window it was called with; None if none, or not said.
        says_window: whether the call carries a window at all.
        causal: False where tokens also see what comes after them.
        sinks: whether the softmax has learned extra entries.
        bias: whether it adds a mask or a bias of its own to the scores.
    """

    layer: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    says_window: bool
    causal: bool
    sinks: bool
    bias: bool


@torch.inference_mode()
def observe_attention(model: Any) -> list[AttentionCall]:
    """The attention calls of one forward pass, in order. The model is left as it was.

    Raises:
        Exception: whatever the model raises when it is run as the engine would run it.
    """
    calls: list[AttentionCall] = []
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device=model.device)
    positions = torch.arange(_TOKENS, device=model.device)[None]
    with attention_named(model, OBSERVER_NAME):
        _seen.calls = calls
        try:
            model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=positions[0, -1:])
        finally:
            del _seen.calls
    return calls


def _note(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    layer: Any = getattr(module, "layer_idx", None)
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    _seen.calls.append(
        AttentionCall(
            layer=None if layer is None else int(layer),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[-1],
            value_dim=value.shape[-1],
            window=kwargs.get("sliding_window"),
            says_window="sliding_window" in kwargs,
            causal=bool(causal),
            sinks=kwargs.get("s_aux") is not None or getattr(module, "sinks", None) is not None,
            bias=attention_mask is not None or kwargs.get("position_bias") is not None,
        )
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


ALL_ATTENTION_FUNCTIONS.register(OBSERVER_NAME, _note)
