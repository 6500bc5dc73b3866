"""Attention through torch's scaled_dot_product_attention: the CPU backend, and a GPU's fallback for any page size."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.eager import eager_row
from engine.attention.metadata import AttentionMetadata


class SdpaAttention:
    """One call a row. A sequence inside a single page is read in place; a longer one through its page list.

    For a decode row the heads that share a key head are the "query length" of the call: no mask, no repeated keys.
    Soft-capped logits are beyond torch's kernel and go through the eager form.
    """

    name: ClassVar[str] = "sdpa"
    capturable: ClassVar[bool] = False

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
        window = tables.window
        page_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
        tokens, heads, dim = query.shape
        output = torch.empty_like(query)
        host_tables = metadata.host_tables[group]
        # [tokens, kv_heads, group, dim]: for one token this is a batch of kv_heads with `group` queries each.
        grouped = query.view(tokens, kv_heads, heads // kv_heads, dim)
        grouped_output = output.view(tokens, kv_heads, heads // kv_heads, dim)

        for row in range(metadata.num_decode):
            kv_length = metadata.host_kv_lengths[row]
            first = 0 if window is None else max(0, kv_length - window)
            keys, values = _gather(key_cache, value_cache, host_tables[row], first, kv_length, page_size)
            if softcap is not None:
                output[row] = eager_row(query[row : row + 1], keys, values, scale, None, softcap)[0]
                continue
            grouped_output[row] = scaled_dot_product_attention(
                grouped[row][None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], scale=scale
            )[0]

        start = metadata.num_decode
        for i, count in enumerate(metadata.host_query_lengths):
            row = metadata.num_decode + i
            kv_length = metadata.host_kv_lengths[row]
            first = 0 if window is None else max(0, kv_length - count - window + 1)
            keys, values = _gather(key_cache, value_cache, host_tables[row], first, kv_length, page_size)
            span = slice(start, start + count)
            start += count
            if softcap is not None:
                output[span] = eager_row(query[span], keys, values, scale, window, softcap)
                continue
            visible = kv_length - first
            causal_only = visible == count and (window is None or count <= window)
            output[span] = scaled_dot_product_attention(
                query[span].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=None if causal_only else _mask(count, visible, window, query.device),
                is_causal=causal_only,
                scale=scale,
                enable_gqa=heads != kv_heads,
            )[0].transpose(0, 1)
        return output


def _gather(
    key_cache: torch.Tensor, value_cache: torch.Tensor, table: list[int], first: int, end: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions ``first`` … ``end - 1``: [end - first, kv_heads, head_dim] each. A view where one
    page holds them all, a copy of the pages otherwise."""
    head, last = first // page_size, (end - 1) // page_size
    if head == last:
        block, base = table[head], head * page_size
        return key_cache[block, first - base : end - base], value_cache[block, first - base : end - base]
    pages = torch.tensor(table[head : last + 1], device=key_cache.device)
    cut = slice(first - head * page_size, end - head * page_size)
    return key_cache[pages].flatten(0, 1)[cut], value_cache[pages].flatten(0, 1)[cut]


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[queries, keys] bool, True where a query may look: causal, aligned to the last key, inside the window."""
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None, :]
    visible = column <= position
    return visible if window is None else visible & (column > position - window)
