"""Causal attention of prompt chunks over the paged cache, rows of different lengths in one launch.

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), pages as in PagedAttention (Kwon et al. 2023, arXiv 2309.06180).
A tile holds neighbouring query tokens with all query heads that share a key head, so that short chunks fill it as well
and the causal edge is cut finely. A chunk's queries are its row's last positions; the keys before them may be cached.

The grid is ``tokens // tile + rows`` tiles by key heads: row r's tiles begin at ``(cu_query[r] - cu_query[0]) // tile +
r``, which a program finds by binary search. Only shapes are needed on the host, so the launch can be captured, and a
captured one serves any rows that fit: what is not there costs a program that ends at once. Programs start with the last
tile, which has the most keys. Tiles that every query sees whole run without masks.

FLOPs: ``4 * heads * head_dim * (query-key pairs visible)``; bound by arithmetic from chunks of about a hundred tokens.
"""

from __future__ import annotations

import math

import torch

from engine.kernels.elementary import tanh
from engine.kernels.language import after_predecessor, dot_operand, next_power_of_2, tl, triton, wait_for_predecessor
from engine.kernels.tiles import Tile, prefill_tile

LOG2_E = math.log2(math.e)


@triton.jit
def _attend_tiles(
    q,
    peak,
    total,
    mixed,
    keys,
    values,
    table,
    position,
    oldest,
    newest,
    begin,
    end,
    key_block_stride,
    key_token_stride,
    value_block_stride,
    value_token_stride,
    scale,
    softcap,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Online softmax over the tiles ``begin`` … ``end - 1``. Positions from ``oldest`` to ``newest`` are visible to
    some query of the tile; unless MASKED, all positions are visible to all queries."""
    n_range = tl.arange(0, BLOCK_N)
    d_live = tl.arange(0, BLOCK_D) < HEAD_DIM
    for tile in range(begin, end):
        token = tile * BLOCK_N + n_range
        live = (token >= oldest) & (token <= newest)
        if PAGE % BLOCK_N == 0:
            block = tl.load(table + (tile * BLOCK_N) // PAGE).to(tl.int64)
            offset = (tile * BLOCK_N) % PAGE + n_range
        elif MASKED:
            block = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
            offset = token % PAGE
        else:
            block = tl.load(table + token // PAGE).to(tl.int64)
            offset = token % PAGE
        key_rows = keys[None, :] + (block * key_block_stride + offset * key_token_stride)[:, None]
        value_rows = values[None, :] + (block * value_block_stride + offset * value_token_stride)[:, None]
        if MASKED:
            k = tl.load(key_rows, mask=live[:, None] & d_live[None, :], other=0.0).to(OPERAND)
            v = tl.load(value_rows, mask=live[:, None] & d_live[None, :], other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(key_rows).to(OPERAND)
            v = tl.load(value_rows)
        else:
            k = tl.load(key_rows, mask=d_live[None, :], other=0.0).to(OPERAND)
            v = tl.load(value_rows, mask=d_live[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = tanh(scores) * softcap
        if MASKED:
            visible = token[None, :] <= position[:, None]
            if WINDOW > 0:
                visible &= token[None, :] > position[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = new_peak
        if MASKED and WINDOW > 0:  # a query may see nothing of the window's first tiles
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype).to(OPERAND), v.to(OPERAND), mixed * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, mixed


@triton.jit(
    do_not_specialize=["rows", "table_row_stride"],
    do_not_specialize_on_alignment=["block_table", "cu_query", "kv_lengths"],
)
def _prefill_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    cu_query,
    kv_lengths,
    output,
    query_token_stride,
    query_head_stride,
    output_token_stride,
    output_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    table_row_stride,
    scale,
    softcap,
    rows,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    kv_head = tl.program_id(0)
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    origin = tl.load(cu_query)
    row = rows * 0
    after = rows
    while after - row > 1:  # the last row whose first tile is not after this one
        middle = (row + after) // 2
        here = (tl.load(cu_query + middle) - origin) // BLOCK_Q + middle <= index
        row = tl.where(here, middle, row)
        after = tl.where(here, after, middle)
    start = tl.load(cu_query + row)
    count = tl.load(cu_query + row + 1) - start
    first_query = (index - (start - origin) // BLOCK_Q - row) * BLOCK_Q
    if first_query >= count:
        return

    cached = tl.load(kv_lengths + row) - count
    m_range = tl.arange(0, BLOCK_M)
    d_range = tl.arange(0, BLOCK_D)
    d_live = d_range < HEAD_DIM
    q_live = (m_range < BLOCK_Q * GROUP) & (first_query + m_range // GROUP < count)
    # Rows of the tile beyond the chunk repeat its last query: they see keys like any other and are not stored.
    chunk_index = tl.minimum(first_query + tl.minimum(m_range // GROUP, BLOCK_Q - 1), count - 1)
    position = cached + chunk_index
    heads = kv_head * GROUP + m_range % GROUP
    token = (start + chunk_index).to(tl.int64)
    q = tl.load(
        query + token[:, None] * query_token_stride + heads[:, None] * query_head_stride + d_range[None, :],
        mask=d_live[None, :],
        other=0.0,
    ).to(OPERAND)

    lowest = cached + first_query
    newest = cached + tl.minimum(first_query + BLOCK_Q, count) - 1
    end = newest // BLOCK_N + 1
    oldest = 0
    begin = 0
    whole_begin = 0
    if WINDOW > 0:
        oldest = tl.maximum(lowest - WINDOW + 1, 0)
        begin = oldest // BLOCK_N
        whole_begin = tl.minimum(tl.cdiv(tl.maximum(newest - WINDOW + 1, 0), BLOCK_N), end)
    whole_end = tl.maximum((lowest + 1) // BLOCK_N, whole_begin)

    keys = key_cache + kv_head * key_head_stride + d_range
    values = value_cache + kv_head * value_head_stride + d_range
    table = block_table + row.to(tl.int64) * table_row_stride
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The window's first tiles, those that every query sees whole, and the last ones.
    bounds = (begin, whole_begin, whole_end, end)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        peak, total, mixed = _attend_tiles(
            q,
            peak,
            total,
            mixed,
            keys,
            values,
            table,
            position,
            oldest,
            newest,
            bounds[part],
            bounds[part + 1],
            key_block_stride,
            key_token_stride,
            value_block_stride,
            value_token_stride,
            scale,
            softcap,
            part != 1,
            HEAD_DIM,
            PAGE,
            WINDOW,
            SOFTCAP,
            OPERAND,
            BLOCK_N,
            BLOCK_D,
        )
    tl.store(
        output + token[:, None] * output_token_stride + heads[:, None] * output_head_stride + d_range[None, :],
        mixed / total[:, None],
        mask=q_live[:, None] & d_live[None, :],
    )


def check_paged_inputs(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raise ValueError if heads are not a multiple of key heads, or a last dimension is not contiguous."""
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads; they must be a multiple")
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous")


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_query: torch.Tensor,
    kv_lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Causal attention of each row's last ``cu_query[r + 1] - cu_query[r]`` positions.

    Args:
        query: [tokens, heads, head_dim] fp32, bf16 or fp16, last dimension contiguous; row r's tokens are
            ``cu_query[r]`` … ``cu_query[r + 1] - 1``. Tokens before ``cu_query[0]`` and from ``cu_query[-1]`` on are
            left alone.
        key_cache, value_cache: [blocks, page_size, kv_heads, head_dim] of the same dtype, last dimension contiguous.
        block_table: [rows, pages] int32. Only entries of pages with a visible key are read.
        cu_query: [rows + 1] int32, running sums of the query lengths from the first row's first token.
        kv_lengths: [rows] int32, keys of each row, its queries' own included.
        scale: factor of the query-key products.
        window: visible keys of a query, None = all.
        softcap: logits are ``softcap * tanh(logits / softcap)``; None = off.
        out: [tokens, heads, head_dim] to write to.
        tile: launch shape, None = the table's.

    Returns:
        [tokens, heads, head_dim] of the query's dtype; softmax and sums in fp32.

    Raises:
        ValueError: heads are not a multiple of key heads, or a last dimension is not contiguous.
    """
    tokens, heads, head_dim = query.shape
    rows = cu_query.shape[0] - 1
    page_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    check_paged_inputs(query, key_cache, value_cache)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    if tokens == 0 or rows == 0:
        return out
    group = heads // kv_heads
    tile = prefill_tile(head_dim, page_size, query.dtype) if tile is None else tile
    block_m = max(tile.queries, next_power_of_2(group))
    block_q = block_m // group
    _prefill_kernel[(kv_heads, tokens // block_q + rows)](
        query,
        key_cache,
        value_cache,
        block_table,
        cu_query,
        kv_lengths,
        out,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        scale / softcap if softcap else scale * LOG2_E,
        softcap * LOG2_E if softcap else 0.0,
        rows,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        WINDOW=window or 0,
        SOFTCAP=bool(softcap),
        OPERAND=dot_operand(query.dtype),
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=tile.keys,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **after_predecessor(query.device),
    )
    return out


def paged_prefill_torch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_query: torch.Tensor,
    kv_lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Twin of `paged_prefill`: row by row, all in fp32. Reads lengths on the host."""
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    page_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    group = query.shape[1] // kv_heads
    bounds = cu_query.tolist()
    for row, kv_length in enumerate(kv_lengths.tolist()):
        start, end = bounds[row], bounds[row + 1]
        if start == end or kv_length == 0:
            continue
        first = 0 if window is None else max(0, kv_length - (end - start) - window + 1)
        token = torch.arange(first, kv_length, device=query.device)
        block, offset = block_table[row, token // page_size].long(), token % page_size
        keys = key_cache[block, offset].float().repeat_interleave(group, 1)
        values = value_cache[block, offset].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(kv_length - (end - start), kv_length, device=query.device)[:, None]
        visible = token <= position
        if window is not None:
            visible &= token > position - window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output
