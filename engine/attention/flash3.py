"""Attention through flash-attn 3: decode and prefill rows by the same paged kernel, which takes pages of any size.

Signature: ``hopper/flash_attn_interface.py`` of Dao-AILab/flash-attention. Its varlen function has no block table;
``flash_attn_with_kvcache`` takes one (``page_table``) and rows of unequal length (``cu_seqlens_q``, ``max_seqlen_q``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from engine.attention.flash import FlashAttention, why_no_version
from engine.attention.metadata import AttentionMetadata

CAPABILITIES = (8, 9)
"""Major compute capabilities that flash-attn 3 has kernels for."""


def why_not_flash3(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why this backend cannot serve, or None if it can."""
    obstacle = why_no_version(device, dtype, head_dim)
    if obstacle is not None:
        return obstacle
    try:
        from flash_attn_interface import flash_attn_with_kvcache  # noqa: F401
    except ImportError as error:
        return f"flash_attn_interface cannot be imported ({error})"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in CAPABILITIES:
        return f"it has no kernels for compute capability {major}.{minor}"
    return None


class FlashAttention3(FlashAttention):
    """How many splits a row's keys are cut into follows from sizes on the host."""

    name: ClassVar[str] = "flash_attention_3"

    def __init__(self) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        self._paged = flash_attn_with_kvcache

    def decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        **common: Any,
    ) -> torch.Tensor:
        output: torch.Tensor = self._paged(
            query, key_cache, value_cache, cache_seqlens=lengths, page_table=table, **common
        )
        return output

    def prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        metadata: AttentionMetadata,
        **common: Any,
    ) -> torch.Tensor:
        packed = {"cu_seqlens_q": metadata.cu_query, "max_seqlen_q": metadata.max_query}
        return self.decode(query, key_cache, value_cache, table, lengths, **packed, **common)
