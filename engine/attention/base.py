"""The interface of an attention backend and its registry."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from engine.attention.metadata import AttentionMetadata


class AttentionBackend(Protocol):
    """Attention of a step's queries over the paged cache, read in place.

    Attributes:
        name: as in ``attn_implementation``.
        capturable: whether its calls may be recorded in a CUDA graph.
        any_lengths: whether a captured call for prefill rows costs what their tokens cost, however they are spread over
            rows. Without it the call is prepared for rows as long as the step, so captured steps have few of them.
        decode_kernel: whether it has a kernel of its own for rows with one query token, which reads the block table;
            such rows then count as the decode fast path.
    """

    name: ClassVar[str]
    capturable: ClassVar[bool]
    any_lengths: ClassVar[bool]
    decode_kernel: ClassVar[bool]

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        group: int,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Args:
            query: [tokens, heads, head_dim].
            key_cache, value_cache: [blocks, page_size, kv_heads, head_dim], this step's tokens already written.
            metadata: the step's rows.
            group: index of the layer's group in ``metadata.groups``.
            scale: factor of the query-key products.
            softcap: logits are ``softcap * tanh(logits / softcap)``; None = off.

        Returns:
            [tokens, heads, head_dim].
        """
        ...

    @staticmethod
    def mask_bytes(metadata: AttentionMetadata) -> int:
        """Bytes of the masks that were alive at once in a step that has run; 0 where kernels see lengths instead."""
        ...


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store this step's keys and values. key, value: [tokens, kv_heads, head_dim]; slots: [tokens] int64."""
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)
