"""Attention through this project's Triton kernels: any page size of at least 4, sliding windows, soft-cap, fp32 too."""

from __future__ import annotations

from typing import ClassVar

import torch

from engine.attention.metadata import AttentionMetadata
from engine.kernels import paged_decode, paged_prefill, why_no_triton

HEAD_DIMS = range(32, 257)
"""Head sizes the kernels have tiles for."""

MIN_TICKETS = 1 << 16


def why_not_triton(device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> str | None:
    """The reason why this backend cannot serve, or None if it can."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes float32, bfloat16 or float16, the model is {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS or head_dim % 8:
        return f"it takes head sizes from 32 to 256 in steps of 8, the model has {head_dim}"
    if page_size < 4:
        return f"its pages have at least 4 tokens, page_size is {page_size}"
    return why_no_triton(device)


class TritonAttention:
    """Decode rows by the split-key kernel, prefill rows by the varlen kernel, both into one output. Neither needs a
    length on the host, so both calls may be recorded in a CUDA graph."""

    name: ClassVar[str] = "triton"
    capturable: ClassVar[bool] = True
    any_lengths: ClassVar[bool] = True
    decode_kernel: ClassVar[bool] = True

    def __init__(self) -> None:
        # Captured steps go on with the tickets they were captured with, so those are kept when more are needed.
        self._tickets: list[torch.Tensor] = []

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
        rows, window = metadata.num_decode, metadata.groups[group].window
        tables, lengths = _split(metadata, group)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if rows:
            paged_decode(
                query[:rows],
                key_cache,
                value_cache,
                tables[0],
                lengths[0],
                scale,
                window,
                softcap,
                out=output[:rows],
                tickets=self._zeros(rows * key_cache.shape[2], query.device),
            )
        if metadata.cu_query is not None:  # behind the decode rows, padding among which may have written its tokens
            paged_prefill(
                query,
                key_cache,
                value_cache,
                tables[1],
                metadata.cu_query,
                lengths[1],
                scale,
                window,
                softcap,
                out=output,
            )
        return output

    def _zeros(self, count: int, device: torch.device) -> torch.Tensor:
        """Tickets of the decode kernel, which leaves them as it finds them."""
        if not self._tickets or self._tickets[-1].numel() < count:
            # Never inside a capture, which would repeat the filling: a step runs once before it is captured.
            self._tickets.append(torch.zeros(max(count, MIN_TICKETS), dtype=torch.int32, device=device))
        return self._tickets[-1]


def _split(
    metadata: AttentionMetadata, group: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Block tables and key lengths of decode rows and of prefill rows, made once a step."""
    found: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None
    found = metadata.memo.get(group)
    if found is None:
        rows, table, lengths = metadata.num_decode, metadata.groups[group].block_table, metadata.kv_lengths
        found = metadata.memo[group] = (table[:rows], table[rows:]), (lengths[:rows], lengths[rows:])
    return found
