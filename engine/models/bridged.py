"""Any transformers model, its own forward pass, attention through the bridge."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from engine.attention import AttentionBackend, AttentionMetadata, ForwardContext, left_alone, paged_attention
from engine.models.base import LayerCaches, TraceableExecutor
from engine.models.cpu_linear import OneDnnLinears, onednn_linear_available


class BridgedModel(TraceableExecutor):
    """Runs ``model.forward`` with its attention calls answered from the paged cache.

    Args:
        model: a transformers causal LM.
        backend: attention backend.
        caches: keys and values by layer.
    """

    def __init__(self, model: Any, backend: AttentionBackend, caches: LayerCaches) -> None:
        self._model, self._backend, self._caches = model, backend, caches
        self._selects = _selects_rows(model)
        faster = onednn_linear_available(model.device, model.dtype)
        self._linears: Callable[[], AbstractContextManager[Any]] = OneDnnLinears if faster else nullcontext

    def during(self, positions: torch.Tensor, metadata: AttentionMetadata) -> AbstractContextManager[None]:
        return paged_attention(self._model, ForwardContext(self._backend, metadata, self._caches))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=ids.long().unsqueeze(0),
            position_ids=positions.long().unsqueeze(0),
            use_cache=False,
            logits_to_keep=index.long(),
        )
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects else logits[index.long()]

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, index: torch.Tensor
    ) -> torch.Tensor:
        with self._linears():
            return super().logits(ids, positions, metadata, index)

    def close(self) -> None:
        """The bridge leaves nothing behind."""


@torch.inference_mode()
def _selects_rows(model: Any) -> bool:
    """Whether the model gives logits of the wanted tokens only; one that swallows the wish in its keywords is asked."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return True
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    keep = torch.zeros(1, dtype=torch.int64, device=ids.device)
    with left_alone(model):
        output = model(input_ids=ids, use_cache=False, logits_to_keep=keep)
    return bool(output.logits.shape[1] == 1)
