"""Any transformers model, its own forward pass, attention through the bridge."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from engine.attention import AttentionBackend, AttentionMetadata, ForwardContext, paged_attention
from engine.models.base import LayerCaches
from engine.models.cpu_linear import OneDnnLinears, onednn_linear_available


class BridgedModel:
    """Runs ``model.forward`` with its attention calls answered from the paged cache.

    Args:
        model: a transformers causal LM.
        backend: attention backend.
        caches: keys and values by layer.
    """

    tuned = None

    def __init__(self, model: Any, backend: AttentionBackend, caches: LayerCaches) -> None:
        self._model, self._backend, self._caches = model, backend, caches
        faster = onednn_linear_available(model.device, model.dtype)
        self._linears: Callable[[], AbstractContextManager[Any]] = OneDnnLinears if faster else nullcontext

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, index: torch.Tensor
    ) -> torch.Tensor:
        with paged_attention(self._model, ForwardContext(self._backend, metadata, self._caches)), self._linears():
            output = self._model(
                input_ids=ids.long().unsqueeze(0),
                position_ids=positions.long().unsqueeze(0),
                use_cache=False,
                logits_to_keep=index.long(),
            )
        logits = output.logits[0]
        # Some models swallow the argument and give the logits of all tokens.
        return logits if logits.shape[0] == index.numel() else logits[index.long()]

    def close(self) -> None:
        """The bridge leaves nothing behind."""
