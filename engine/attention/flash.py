"""Attention through flash-attn: what its versions share; version 2, decode rows by the split-KV kernel and prefill rows
by the varlen kernel, both through the block table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from engine.attention.metadata import AttentionMetadata

FLASH_PAGE_MULTIPLE = 256
"""flash-attn 2's paged kernels take pages that are a multiple of this many tokens."""


def why_no_version(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why no version of flash attention can serve, or None."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the model is on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, the model is {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"it takes head sizes up to 256 in steps of 8, the model has {head_dim}"
    return None


def why_not_flash(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> str | None:
    """The reason why flash-attn 2 cannot serve, or None if it can."""
    obstacle = why_no_version(device, dtype, head_dim)
    if obstacle is not None:
        return obstacle
    if page_size % FLASH_PAGE_MULTIPLE:
        return f"its pages are multiples of {FLASH_PAGE_MULTIPLE} tokens, page_size is {page_size}"
    try:
        import flash_attn  # noqa: F401
    except ImportError as error:
        return f"flash-attn cannot be imported ({error})"
    return None


class FlashAttention(ABC):
    """Decode rows in one call, prefill rows in another; both read the cache in place."""

    capturable: ClassVar[bool] = True
    any_lengths: ClassVar[bool] = False
    decode_kernel: ClassVar[bool] = True

    @staticmethod
    def mask_bytes(metadata: AttentionMetadata) -> int:
        """None: the kernels see lengths."""
        return 0

    @abstractmethod
    def decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        **common: Any,
    ) -> torch.Tensor:
        """Rows of one token: [rows, 1, heads, head_dim] to the same."""

    @abstractmethod
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
        """Packed rows: [tokens, heads, head_dim] to the same."""

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
        tables = metadata.groups[group]
        rows = metadata.num_decode
        table, lengths = tables.block_table, metadata.kv_lengths
        common: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if tables.window is None else (tables.window - 1, 0),
            "softcap": softcap or 0.0,
        }
        decoded: torch.Tensor | None = None
        if rows:
            one = query[:rows].unsqueeze(1)
            decoded = self.decode(one, key_cache, value_cache, table[:rows], lengths[:rows], **common).squeeze(1)
            if metadata.cu_query is None:
                return decoded
        output = self.prefill(query, key_cache, value_cache, table[rows:], lengths[rows:], metadata, **common)
        if decoded is not None:
            torch.where(_is_decode(metadata), decoded, output[:rows], out=output[:rows])
        return output


def _is_decode(metadata: AttentionMetadata) -> torch.Tensor:
    """[num_decode, 1, 1] bool: whether a decode row is none of a captured step's padding."""
    found: torch.Tensor | None = metadata.memo.get(_is_decode)
    if found is None:
        assert metadata.cu_query is not None
        numbers = torch.arange(metadata.num_decode, dtype=torch.int32, device=metadata.cu_query.device)
        found = metadata.memo[_is_decode] = (numbers < metadata.cu_query[0])[:, None, None]
    return found


class FlashAttention2(FlashAttention):
    """Heads that share a key head are packed by the decode kernel itself."""

    name: ClassVar[str] = "flash_attention_2"

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._decode = flash_attn_with_kvcache
        self._varlen = flash_attn_varlen_func

    def decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        **common: Any,
    ) -> torch.Tensor:
        output: torch.Tensor = self._decode(
            query, key_cache, value_cache, cache_seqlens=lengths, block_table=table, **common
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
        output: torch.Tensor = self._varlen(
            query,
            key_cache,
            value_cache,
            cu_seqlens_q=metadata.cu_query,
            cu_seqlens_k=metadata.cu_kv,
            max_seqlen_q=metadata.max_query,
            max_seqlen_k=metadata.max_kv,
            block_table=table,
            **common,
        )
        return output
