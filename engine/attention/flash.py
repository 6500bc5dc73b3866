"""Attention through flash-attn 2: decode rows by the split-KV kernel, prefill rows by the varlen kernel, both through
the block table."""

from __future__ import annotations

from typing import ClassVar

import torch

from engine.attention.metadata import AttentionMetadata

FLASH_PAGE_MULTIPLE = 256
"""flash-attn 2's paged kernels take pages that are a multiple of this many tokens."""


def why_not_flash(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> str | None:
    """The reason why this backend cannot serve, or None if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the model is on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, the model is {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"it takes head sizes up to 256 in steps of 8, the model has {head_dim}"
    if page_size % FLASH_PAGE_MULTIPLE:
        return f"its pages are multiples of {FLASH_PAGE_MULTIPLE} tokens, page_size is {page_size}"
    try:
        import flash_attn  # noqa: F401
    except ImportError as error:
        return f"flash-attn cannot be imported ({error})"
    return None


class FlashAttention2:
    """Both calls read the cache in place. Heads that share a key head are packed by the decode kernel itself."""

    name: ClassVar[str] = "flash_attention_2"
    capturable: ClassVar[bool] = True
    decode_kernel: ClassVar[bool] = True

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._decode = flash_attn_with_kvcache
        self._varlen = flash_attn_varlen_func

    @staticmethod
    def mask_bytes(metadata: AttentionMetadata) -> int:
        """None: the kernels see lengths."""
        return 0

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
        window = (-1, -1) if tables.window is None else (tables.window - 1, 0)
        rows, tokens = metadata.num_decode, query.shape[0]
        parts: list[torch.Tensor] = []
        if rows:
            decode = self._decode(
                query[:rows].unsqueeze(1),
                key_cache,
                value_cache,
                cache_seqlens=metadata.kv_lengths[:rows],
                block_table=tables.block_table[:rows],
                softmax_scale=scale,
                causal=True,
                window_size=window,
                softcap=softcap or 0.0,
            )
            parts.append(decode.squeeze(1))
        if rows < tokens:
            prefill = self._varlen(
                query[rows:],
                key_cache,
                value_cache,
                cu_seqlens_q=metadata.cu_query,
                cu_seqlens_k=metadata.cu_kv,
                max_seqlen_q=metadata.max_query,
                max_seqlen_k=metadata.max_kv,
                block_table=tables.block_table[rows:],
                softmax_scale=scale,
                causal=True,
                window_size=window,
                softcap=softcap or 0.0,
            )
            parts.append(prefill)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
