"""The fused forward pass of Llama-style decoders.

Nine launches a layer instead of some thirty: one matrix product for q, k and v and one for gate and up, the head norms,
rotation and cache write in one kernel, each residual sum with the norm that follows it, and logits only for the rows
that sample. fp32 results equal transformers' forward pass up to the order of sums.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention import AttentionBackend, AttentionMetadata
from engine.attention.opaque import opaque, padded
from engine.kernels.gemm import tuned_linear
from engine.models.base import LayerCaches, TraceableExecutor
from engine.models.cpu_linear import PackedLinear
from engine.models.families import FAMILIES, activation_of
from engine.models.operators import Operators
from engine.models.weights import Matrix, release, take_layers


class FusedDecoder(TraceableExecutor):
    """Runs a model of `engine.models.families` from its weights.

    Args:
        model: such a model; its q/k/v and gate/up parameters become views of fused matrices until `close`.
        backend: attention backend.
        caches: keys and values by layer.
        max_positions: length of the rotary tables.
        pack: compute on copies of the matrices in oneDNN's layout (`PackedLinear`).
    """

    def __init__(
        self, model: Any, backend: AttentionBackend, caches: LayerCaches, max_positions: int, pack: bool = False
    ) -> None:
        self._model, self._backend, self._caches = model, backend, caches
        self._family = FAMILIES[type(model).__name__]
        config = model.config
        self._eps = config.rms_norm_eps
        self._op, self._twins = Operators.choose(model.device, model.dtype), Operators.twins()
        self._silu = activation_of(config) == "silu"
        first = model.model.layers[0].self_attn
        self._heads: int = config.num_attention_heads
        self._head_dim: int = first.head_dim
        self._scale: float = first.scaling
        self._softcap: float | None = getattr(config, "attn_logit_softcapping", None)
        self._final_softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._final_norm: torch.Tensor = model.model.norm.weight.data
        self._head = Matrix.of(model.lm_head)
        with torch.no_grad():
            # transformers computes the angles in fp32 and rounds cos and sin to the model's dtype; so does the table.
            positions = torch.arange(max_positions, device=model.device)[None]
            like = torch.empty(1, dtype=model.dtype, device=model.device)
            cos, sin = model.model.rotary_emb(like, positions)
        half = cos.shape[-1] // 2
        self._cos, self._sin = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        self._layers = take_layers(model)
        matrices = [m for layer in self._layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        matrices.append(self._head)
        self.tuned = tuned_linear([(m.weight, m.bias) for m in matrices])
        self._packed = PackedLinear([m.weight for m in matrices]) if pack else None
        linear = self.tuned or self._packed
        if linear is not None:
            self._op = replace(self._op, linear=linear)

    @contextmanager
    def during(self, positions: torch.Tensor, metadata: AttentionMetadata) -> Iterator[None]:
        _active.step = _Step(self, positions, metadata)
        try:
            yield
        finally:
            _active.step = None

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        # Inductor fuses the twins into its own kernels; ours would be walls between them.
        compiling = torch.compiler.is_compiling()
        op = self._twins if compiling else self._op
        attend = _attend_operator if compiling else _attend
        activate = op.silu_mul if self._silu else op.gelu_tanh_mul
        eps, offset = self._eps, self._family.unit_offset
        residual = self._embed(ids)
        tokens = residual.shape[0]
        hidden = op.rms_norm(residual, self._layers[0].input_norm, eps, offset)
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            attended = attend(op.linear(hidden, layer.qkv.weight, layer.qkv.bias), number, self._heads, self._head_dim)
            hidden = op.linear(attended.view(tokens, -1), layer.out.weight, layer.out.bias)
            if layer.post_attention_norm is not None:
                hidden = op.rms_norm(hidden, layer.post_attention_norm, eps, offset)
            hidden = op.add_rms_norm(hidden, residual, layer.pre_mlp_norm, eps, offset)
            hidden = op.linear(hidden, layer.gate_up.weight, layer.gate_up.bias)
            hidden = op.linear(activate(hidden), layer.down.weight, layer.down.bias)
            if layer.post_mlp_norm is not None:
                hidden = op.rms_norm(hidden, layer.post_mlp_norm, eps, offset)
            if number < last:
                hidden = op.add_rms_norm(hidden, residual, self._layers[number + 1].input_norm, eps, offset)
        rows = index.long()
        hidden = op.add_rms_norm(hidden[rows], residual[rows], self._final_norm, eps, offset)
        logits = op.linear(hidden, self._head.weight, self._head.bias)
        if self._final_softcap is not None:
            logits = torch.tanh(logits / self._final_softcap) * self._final_softcap
        return logits

    def attend(
        self, qkv: torch.Tensor, number: int, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Head norms, rotation, cache write and attention of layer ``number``: [tokens, heads, head_dim]."""
        layer = self._layers[number]
        group, keys, values = self._caches[number]
        query = self._op.rope_and_write(
            qkv,
            self._cos,
            self._sin,
            metadata.groups[group].kv_slots,
            keys,
            values,
            positions,
            layer.query_norm,
            layer.key_norm,
            self._eps,
            self._family.unit_offset,
        )
        return self._backend.attend(query, keys, values, metadata, group, self._scale, self._softcap)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings [tokens, hidden], a fresh tensor that serves as the residual stream."""
        embedding = self._model.model.embed_tokens
        rows = torch.nn.functional.embedding(ids, embedding.weight)
        if self._family.scaled_embedding:
            rows = rows * embedding.embed_scale.to(rows.dtype)
        return rows

    def refresh(self) -> None:
        """Pack the matrices again."""
        if self._packed is not None:
            self._packed.refresh()

    def close(self) -> None:
        """Give the model's parameters their own storages back."""
        release(self._model)


@dataclass(frozen=True, slots=True)
class _Step:
    """What the attention calls of one forward pass share."""

    decoder: FusedDecoder
    positions: torch.Tensor
    metadata: AttentionMetadata


_active = threading.local()


def _attend(qkv: torch.Tensor, number: int, heads: int, head_dim: int) -> torch.Tensor:
    """`FusedDecoder.attend` of the step that this thread runs: qkv [tokens, …] to [tokens, heads, head_dim]."""
    step: _Step = _active.step
    count = step.metadata.groups[0].kv_slots.shape[0]  # a compiled pass may carry padding behind the step's tokens
    own = qkv if qkv.shape[0] == count else qkv[:count]
    return padded(step.decoder.attend(own, number, step.positions, step.metadata), qkv.shape[0])


def _attended_like(qkv: torch.Tensor, number: int, heads: int, head_dim: int) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], heads, head_dim))


_attend_operator = opaque(
    "rope_and_attend", "(Tensor qkv, int number, int heads, int head_dim) -> Tensor", _attended_like
)(_attend)
