"""Attention through flash-attn 3: decode and prefill rows by the same paged kernel, which takes pages of any size.

Signature: ``hopper/flash_attn_interface.py`` of Dao-AILab/flash-attention. Its varlen function has no block table;
``flash_attn_with_kvcache`` takes one (``page_table``) and rows of unequal length (``cu_seqlens_q``, ``max_seqlen_q``).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from engine.attention.metadata import AttentionMetadata

CAPABILITIES = (8, 9)
"""Major compute capabilities that flash-attn 3 has kernels for."""


def why_not_flash3(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why this backend cannot serve, or None if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, the model is on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, the model is {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"it takes head sizes up to 256 in steps of 8, the model has {head_dim}"
    try:
        from flash_attn_interface import flash_attn_with_kvcache  # noqa: F401
    except ImportError as error:
        return f"flash_attn_interface cannot be imported ({error})"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in CAPABILITIES:
        return f"it has no kernels for compute capability {major}.{minor}"
    return None


class FlashAttention3:
    """Both calls read the cache in place. How many splits a row's keys are cut into follows from sizes on the host."""

    name: ClassVar[str] = "flash_attention_3"
    capturable: ClassVar[bool] = True
    decode_kernel: ClassVar[bool] = True

    def __init__(self) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        self._attend = flash_attn_with_kvcache

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
            decode = self._attend(
                query[:rows].unsqueeze(1),
                key_cache,
                value_cache,
                cache_seqlens=metadata.kv_lengths[:rows],
                page_table=tables.block_table[:rows],
                softmax_scale=scale,
                causal=True,
                window_size=window,
                softcap=softcap or 0.0,
            )
            parts.append(decode.squeeze(1))
        if rows < tokens:
            prefill = self._attend(
                query[rows:],
                key_cache,
                value_cache,
                cache_seqlens=metadata.kv_lengths[rows:],
                page_table=tables.block_table[rows:],
                cu_seqlens_q=metadata.cu_query,
                max_seqlen_q=metadata.max_query,
                softmax_scale=scale,
                causal=True,
                window_size=window,
                softcap=softcap or 0.0,
            )
            parts.append(prefill)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
