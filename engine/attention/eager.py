"""Attention written out: the oracle that every other backend is compared with."""

from __future__ import annotations

from typing import ClassVar

import torch

from engine.attention.metadata import AttentionMetadata


class EagerAttention:
    """One row at a time, softmax in fp32, nothing fused. Any device, any page size, windows and soft-cap."""

    name: ClassVar[str] = "eager"
    capturable: ClassVar[bool] = False
    any_lengths: ClassVar[bool] = False
    decode_kernel: ClassVar[bool] = False

    @staticmethod
    def mask_bytes(metadata: AttentionMetadata) -> int:
        """The largest row's: rows come one after the other."""
        counts = [1] * metadata.num_decode + list(metadata.host_query_lengths)
        return max(map(row_mask_bytes, counts, metadata.host_kv_lengths), default=0)

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
        output = torch.empty_like(query)
        page_size = key_cache.shape[1]
        lengths = [1] * metadata.num_decode + list(metadata.host_query_lengths)
        start = 0
        for row, (count, kv_length) in enumerate(zip(lengths, metadata.host_kv_lengths, strict=True)):
            pages = tables.block_table[row, : -(-kv_length // page_size)].long()
            keys = key_cache[pages].flatten(0, 1)[:kv_length]
            values = value_cache[pages].flatten(0, 1)[:kv_length]
            output[start : start + count] = eager_row(
                query[start : start + count], keys, values, scale, tables.window, softcap
            )
            start += count
        return output


def row_mask_bytes(queries: int, keys: int) -> int:
    """Bytes of what `eager_row` builds to hide keys: one bool a query and key, and the same inverted."""
    return 2 * queries * keys


def eager_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of the last ``q`` positions of one sequence.

    Args:
        query: [q, heads, head_dim]; keys, values: [k, kv_heads, head_dim], k >= q.

    Returns:
        [q, heads, head_dim].
    """
    q, k = query.shape[0], keys.shape[0]
    repeat = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(k - q, k, device=query.device)[:, None]
    column = torch.arange(k, device=query.device)[None, :]
    visible = column <= position
    if window is not None:
        visible &= column > position - window
    # Positions out of sight may hold anything (a page that slid away), so their values are zeroed as well.
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    values = values.masked_fill(~visible.any(0)[:, None, None], 0)
    return torch.einsum("hqk,khd->qhd", weights, values)
