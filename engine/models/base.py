"""What the runner asks of a model: logits of a step's tokens, keys and values into the cache on the way."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention import AttentionMetadata
from engine.kernels.gemm import TunedLinear

LayerCaches = tuple[tuple[int, torch.Tensor, torch.Tensor], ...]
"""By layer: (index of its group, keys, values), each [blocks, page_size, kv_heads, head_dim]."""


class Executor(Protocol):
    """A way to run a decoder over the paged cache."""

    @property
    def tuned(self) -> TunedLinear | None:
        """Its linear layers, if they learn from the steps rehearsed before serving; None = torch's."""
        ...

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, index: torch.Tensor
    ) -> torch.Tensor:
        """Args:
            ids, positions: [tokens] int32.
            metadata: the step's rows and where their keys and values lie.
            index: [rows] int32, query tokens whose logits are wanted.

        Returns:
            [rows, vocabulary] in the model's dtype.
        """
        ...

    def close(self) -> None:
        """Leave the model as it was found."""
        ...
