"""What the runner asks of a model: logits of a step's tokens, keys and values into the cache on the way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
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

    def refresh(self) -> None:
        """The model's weights were written to in place: copies of them are made again."""
        ...

    def close(self) -> None:
        """Leave the model as it was found."""
        ...


class TraceableExecutor(ABC):
    """An executor whose forward pass is a function of tensors alone, so that torch.compile sees one graph.

    The step's rows and the cache do not pass through that graph: attention is an operator that finds them in the
    context which `during` opens in the calling thread. The graph may therefore be given more tokens than the step has
    (padding behind them): attention looks at the step's own only and gives zeros for the others.

    Attributes:
        tuned: as `Executor.tuned`.
    """

    tuned: TunedLinear | None = None

    @abstractmethod
    def during(self, positions: torch.Tensor, metadata: AttentionMetadata) -> AbstractContextManager[None]:
        """Inside, this thread's attention calls are those of the step."""

    @abstractmethod
    def forward(self, ids: torch.Tensor, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """`logits` inside `during`; may be traced."""

    def refresh(self) -> None:  # noqa: B027 (most have no copies)
        """As `Executor.refresh`: nothing, where the weights are read where they are."""

    @abstractmethod
    def close(self) -> None:
        """Leave the model as it was found."""

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, index: torch.Tensor
    ) -> torch.Tensor:
        """As `Executor.logits`."""
        with self.during(positions, metadata):
            return self.forward(ids, positions, index)
