"""A decoder's weights, with the matrices that share an input fused in place.

The fused matrix is the only copy: the model's own parameters become views of it, so ``model.generate`` goes on working
and a weight written through either is seen by both. `release` gives each parameter its own storage back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

_users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_exchange = threading.Lock()
"""Held while parameters change their storages: one manager may start while another, on the same model, ends."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer: weight [out, in] and bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, linear: torch.nn.Linear) -> Matrix:
        return cls(linear.weight.data, None if linear.bias is None else linear.bias.data)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms are weight vectors; those a family does not have are None."""

    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: torch.Tensor
    pre_mlp_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    post_attention_norm: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None


def take_layers(model: Any) -> list[LayerWeights]:
    """Fuse q/k/v and gate/up of every layer and return the weights; pair each call with one of `release`.

    Args:
        model: a causal LM with ``model.model.layers`` in Llama's layout (see `engine.models.families`).
    """
    with _exchange:
        layers = [_take(layer) for layer in model.model.layers]
        _users[model] = _users.get(model, 0) + 1
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the parameters' old storages, before the cache is sized to what is free
    return layers


def _take(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    return LayerWeights(
        qkv=_fuse((attention.q_proj, attention.k_proj, attention.v_proj)),
        out=Matrix.of(attention.o_proj),
        gate_up=_fuse((mlp.gate_proj, mlp.up_proj)),
        down=Matrix.of(mlp.down_proj),
        input_norm=layer.input_layernorm.weight.data,
        pre_mlp_norm=(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm).weight.data,
        query_norm=attention.q_norm.weight.data if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.data if hasattr(attention, "k_norm") else None,
        post_attention_norm=layer.post_attention_layernorm.weight.data if sandwich else None,
        post_mlp_norm=layer.post_feedforward_layernorm.weight.data if sandwich else None,
    )


def release(model: Any) -> None:
    """Undo `take_layers` once the last user is gone: every parameter owns its storage again, values unchanged."""
    with _exchange:
        _users[model] -= 1
        if _users[model]:
            return
        del _users[model]
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.data = linear.weight.data.clone()
                if linear.bias is not None:
                    linear.bias.data = linear.bias.data.clone()


def _fuse(linears: Sequence[torch.nn.Linear]) -> Matrix:
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Matrix(_join(weights), _join(biases) if biases else None)


def _join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parameters one under the other; they become views of the result, or already are."""
    tensors = [parameter.data for parameter in parameters]
    rows = sum(t.shape[0] for t in tensors)
    expected = tensors[0].storage_offset()
    storage = tensors[0].untyped_storage().data_ptr()
    for t in tensors:
        if t.untyped_storage().data_ptr() != storage or t.storage_offset() != expected or not t.is_contiguous():
            break
        expected += t.numel()
    else:
        return tensors[0].as_strided((rows, *tensors[0].shape[1:]), tensors[0].stride())
    joined = torch.cat(tensors)
    start = 0
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = joined[start : start + tensor.shape[0]]
        start += tensor.shape[0]
    return joined
