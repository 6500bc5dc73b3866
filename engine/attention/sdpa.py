"""Attention through torch's scaled_dot_product_attention: the CPU backend, and a GPU's fallback for any page size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.eager import eager_row, row_mask_bytes
from engine.attention.metadata import AttentionMetadata

_LARGEST_ROW = "largest row"  # key of the memo: mask bytes of the largest row that was written out


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Decode rows whose sequences lie in one page each, in blocks that are evenly spaced: one strided view, one call.

    Attributes:
        rows: [n] int64, which decode rows, in order of their blocks.
        blocks: the blocks as a slice of the cache.
        longest: keys of the longest row.
        hidden: [n, 1, 1, longest] float mask, -inf behind a row's end; None if all rows are as long.
    """

    rows: torch.Tensor
    blocks: slice
    longest: int
    hidden: torch.Tensor | None


class SdpaAttention:
    """Keys and values are read in place where a sequence lies in one page, through its page list otherwise.

    For a decode row the heads that share a key head are the "query length" of a call: no mask, no repeated keys. How
    the rows are put together is derived once a step and used by every layer. Soft-capped logits are beyond torch's
    kernel and go through the eager form.
    """

    name: ClassVar[str] = "sdpa"
    capturable: ClassVar[bool] = False
    any_lengths: ClassVar[bool] = False
    decode_kernel: ClassVar[bool] = False

    @staticmethod
    def mask_bytes(metadata: AttentionMetadata) -> int:
        """All masks of the step, which every layer uses again; where logits are soft-capped, the largest row's."""
        total = metadata.memo.get(_LARGEST_ROW, 0)
        for made in metadata.memo.values():
            if isinstance(made, torch.Tensor):
                total += made.nbytes
            elif isinstance(made, tuple):
                total += sum(run.hidden.nbytes for run in made[0] if run.hidden is not None)
        return int(total)

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

        runs, singles = self._decode_rows(metadata, group, page_size, softcap, query)
        for run in runs:
            keys = key_cache[run.blocks, : run.longest].transpose(1, 2)
            values = value_cache[run.blocks, : run.longest].transpose(1, 2)
            grouped_output[run.rows] = scaled_dot_product_attention(
                grouped[run.rows], keys, values, attn_mask=run.hidden, scale=scale
            )
        for row in singles:
            kv_length = metadata.host_kv_lengths[row]
            first = 0 if window is None else max(0, kv_length - window)
            keys, values = _gather(key_cache, value_cache, host_tables[row], first, kv_length, page_size)
            if softcap is not None:
                _note_row(metadata, 1, kv_length - first)
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
                _note_row(metadata, count, kv_length - first)
                output[span] = eager_row(query[span], keys, values, scale, window, softcap)
                continue
            visible = kv_length - first
            causal_only = visible == count and (window is None or count <= window)
            mask = None
            if not causal_only:
                mask = metadata.memo.get((group, row))
                if mask is None:
                    mask = metadata.memo[group, row] = _mask(count, visible, window, query.device)
            output[span] = scaled_dot_product_attention(
                query[span].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=causal_only,
                scale=scale,
                enable_gqa=heads != kv_heads,
            )[0].transpose(0, 1)
        return output

    @staticmethod
    def _decode_rows(
        metadata: AttentionMetadata, group: int, page_size: int, softcap: float | None, query: torch.Tensor
    ) -> tuple[list[DecodeRun], Sequence[int]]:
        """The step's decode rows as runs that share a call, and those that need one of their own."""
        if softcap is not None:
            return [], range(metadata.num_decode)
        plan = metadata.memo.get(group)
        if plan is None:
            plan = metadata.memo[group] = plan_decode(
                metadata.host_kv_lengths[: metadata.num_decode],
                metadata.host_tables[group],
                metadata.groups[group].window,
                page_size,
                query,
            )
        return plan


def _note_row(metadata: AttentionMetadata, queries: int, keys: int) -> None:
    metadata.memo[_LARGEST_ROW] = max(metadata.memo.get(_LARGEST_ROW, 0), row_mask_bytes(queries, keys))


def plan_decode(
    kv_lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    window: int | None,
    page_size: int,
    query: torch.Tensor,
) -> tuple[list[DecodeRun], list[int]]:
    """Put decode rows that fit one page into runs of evenly spaced blocks.

    Args:
        kv_lengths: keys of each decode row.
        tables: block ids of each row's pages.
        window: sliding window; a row longer than it stands alone.
        page_size: tokens a page.
        query: gives the masks' dtype and device.

    Returns:
        runs of at least two rows, and the rows that stand alone.
    """
    reach = page_size if window is None else min(page_size, window)
    alone = [row for row, length in enumerate(kv_lengths) if length > reach]
    rows = sorted((row for row, length in enumerate(kv_lengths) if length <= reach), key=lambda row: tables[row][0])
    runs = []
    while rows:
        end, step = 1, 0
        while end < len(rows):
            gap = tables[rows[end]][0] - tables[rows[end - 1]][0]
            if step == 0:
                step = gap
            if gap != step or gap == 0:  # the same block twice: a shared page that both rows fit in
                break
            end += 1
        members, rows = rows[:end], rows[end:]
        if len(members) == 1:
            alone.append(members[0])
            continue
        lengths = [kv_lengths[row] for row in members]
        longest, hidden = max(lengths), None
        if min(lengths) < longest:
            behind = torch.arange(longest) >= torch.tensor(lengths)[:, None]
            hidden = torch.zeros(behind.shape, dtype=query.dtype).masked_fill_(behind, float("-inf"))
            hidden = hidden[:, None, None].to(query.device)
        first, last = tables[members[0]][0], tables[members[-1]][0]
        index = torch.tensor(members, device=query.device)
        runs.append(DecodeRun(index, slice(first, last + 1, step), longest, hidden))
    return runs, alone


def _gather(
    key_cache: torch.Tensor, value_cache: torch.Tensor, table: Sequence[int], first: int, end: int, page_size: int
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
