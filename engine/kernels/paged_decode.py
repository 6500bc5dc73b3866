"""Decode attention over the paged cache: one query token a row, split over the keys.

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023) on the online softmax of FlashAttention (Dao et al. 2022,
arXiv 2205.14135), pages as in PagedAttention (Kwon et al. 2023, arXiv 2309.06180). All query heads that share a key
head are rows of one tile, so each key and value is read once.

A row's keys are cut into as many splits as fill the machine; a row so long that it would outlast the others is cut
further. The grid holds an upper bound of splits known on the host, lengths are read on the device, and surplus
programs return at once: the launch can be captured in a CUDA graph whose rows grow. A row with one split writes its
output itself. Otherwise each of its programs leaves its part in memory and draws a ticket, and who draws the last one
merges the parts by their log-sum-exp, always in the order of the splits: no second kernel, and the same sums whoever
is last.

Bytes: ``2 * sum(kv_lengths) * kv_heads * head_dim * itemsize`` and little else. FLOPs: ``4 * sum(kv_lengths) * heads *
head_dim``: 2 * group per byte in bf16, so the kernel is bound by memory.
"""

from __future__ import annotations

import functools
import math

import torch

from engine.kernels.elementary import tanh
from engine.kernels.language import (
    after_predecessor,
    cdiv,
    dot_operand,
    next_power_of_2,
    tl,
    triton,
    wait_for_predecessor,
)
from engine.kernels.paged_prefill import check_paged_inputs, paged_prefill_torch
from engine.kernels.tiles import Tile, decode_tile

LONG_SPLIT_TILES = 64
"""Tiles after which a row is split even where the machine is full."""

MAX_SPLITS = 128
MERGE_VALUES = 64
"""Partial results that a thread holds in registers at a time."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs to fill one multiprocessor with."""

LOG2_E = math.log2(math.e)


@triton.jit
def _splits(kv_length, wanted, bound, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First tile of a row, its number of tiles, tiles of one split, splits in use (at least 1)."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(kv_length - WINDOW, 0) // BLOCK_N
    tiles = tl.cdiv(kv_length, BLOCK_N) - first
    splits = tl.minimum(tl.maximum(wanted, tl.cdiv(tiles, 64)), bound)  # LONG_SPLIT_TILES
    share = tl.maximum(tl.cdiv(tiles, splits), 1)
    return first, tiles, share, tl.maximum(tl.cdiv(tiles, share), 1)


@triton.jit
def _merge(
    own,
    partial,
    partial_lse,
    cell,
    used,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    head_stride,
    bound,
):
    """Write a group's output from its ``used`` parts; ``cell`` is the first head's first part."""
    g_range = tl.arange(0, BLOCK_G)
    s_range = tl.arange(0, BLOCK_S)
    d_range = tl.arange(0, BLOCK_D)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(0, used, BLOCK_S):
        parts = cell + g_range[:, None] * bound + first + s_range[None, :]
        live = (g_range < GROUP)[:, None] & (first + s_range < used)[None, :]
        # Other programs wrote these: they are in the L2 cache, a copy in this multiprocessor's L1 may be old.
        lse = tl.load(partial_lse + parts, mask=live, other=float("-inf"), cache_modifier=".cg")
        x = tl.load(
            partial + parts[:, :, None] * HEAD_DIM + d_range[None, None, :],
            mask=live[:, :, None] & (d_range < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # Heads beyond the group have no part at all: a peak of 0 keeps their exponents finite.
        new_peak = tl.where(g_range < GROUP, tl.maximum(peak, tl.max(lse, 1)), 0.0)
        weights = tl.exp2(lse - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.sum(x * weights[:, :, None], 1)
        peak = new_peak
    total = tl.where(total == 0.0, 1.0, total)
    place = own + g_range[:, None] * head_stride + d_range[None, :]
    tl.store(place, mixed / total[:, None], mask=(g_range < GROUP)[:, None] & (d_range < HEAD_DIM)[None, :])


# One compilation whatever the step: inputs of a step lie anywhere in its packed buffer, tables have any width.
@triton.jit(
    do_not_specialize=["wanted", "bound", "table_row_stride"],
    do_not_specialize_on_alignment=["block_table", "kv_lengths", "tickets"],
)
def _decode_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    kv_lengths,
    output,
    partial,
    partial_lse,
    tickets,
    query_row_stride,
    query_head_stride,
    output_row_stride,
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
    wanted,
    bound,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    # Key heads are the fastest axis: their pieces of a token lie side by side in memory. Splits are the slowest, so
    # that programs of splits that are not there come last and do not disturb how the others spread over the machine.
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    wait_for_predecessor(PDL)
    kv_length = tl.load(kv_lengths + row)
    first, tiles, share, used = _splits(kv_length, wanted, bound, WINDOW, BLOCK_N)
    if split >= used:
        return

    m_range = tl.arange(0, BLOCK_M)
    n_range = tl.arange(0, BLOCK_N)
    d_range = tl.arange(0, BLOCK_D)
    d_live = d_range < HEAD_DIM
    heads = kv_head * GROUP + m_range
    q_live = (m_range < GROUP)[:, None] & d_live[None, :]
    q = tl.load(
        query + row * query_row_stride + heads[:, None] * query_head_stride + d_range[None, :], mask=q_live, other=0.0
    ).to(OPERAND)

    keys = key_cache + kv_head * key_head_stride + d_range
    values = value_cache + kv_head * value_head_stride + d_range
    table = block_table + row * table_row_stride
    begin = first + split * share
    end = tl.minimum(begin + share, first + tiles)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(begin, end):
        token = tile * BLOCK_N + n_range
        live = token < kv_length
        if WINDOW > 0:
            live &= token >= kv_length - WINDOW
        if PAGE % BLOCK_N == 0:  # the tile is inside one page, which has a live token: its table entry is valid
            block = tl.load(table + (tile * BLOCK_N) // PAGE).to(tl.int64)
            offset = (tile * BLOCK_N) % PAGE + n_range
        else:
            block = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
            offset = token % PAGE
        key_rows = keys[None, :] + (block * key_block_stride + offset * key_token_stride)[:, None]
        value_rows = values[None, :] + (block * value_block_stride + offset * value_token_stride)[:, None]
        # Dead positions may hold anything: a NaN value times a weight of zero would be NaN, so zeros are loaded.
        if HEAD_DIM == BLOCK_D:
            k = tl.load(key_rows, mask=live[:, None], other=0.0).to(OPERAND)
            v = tl.load(value_rows, mask=live[:, None], other=0.0)
        else:
            k = tl.load(key_rows, mask=live[:, None] & d_live[None, :], other=0.0).to(OPERAND)
            v = tl.load(value_rows, mask=live[:, None] & d_live[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = tanh(scores) * softcap
        scores = tl.where(live[None, :], scores, float("-inf"))
        # Each tile has a live token, so that the peak is finite from the first tile on.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype).to(OPERAND), v.to(OPERAND), mixed * shrink[:, None], input_precision="ieee")
        peak = new_peak

    total = tl.where(total == 0.0, 1.0, total)  # a row without keys gives zeros
    mixed = mixed / total[:, None]
    own = output + row * output_row_stride + heads[:, None] * output_head_stride + d_range[None, :]
    if used == 1:
        tl.store(own, mixed, mask=q_live)
    else:
        group = row * tl.num_programs(0) + kv_head
        cell = (group * GROUP + m_range) * bound + split
        tl.store(partial + cell[:, None] * HEAD_DIM + d_range[None, :], mixed, mask=q_live)
        tl.store(partial_lse + cell, peak + tl.log2(total), mask=m_range < GROUP)
        tl.debug_barrier()  # every thread's part is written before one of them draws the ticket
        if tl.atomic_add(tickets + group, 1, sem="acq_rel") == used - 1:
            tl.store(tickets + group, 0)  # as the next launch expects it
            own_group = output + row * output_row_stride + kv_head * GROUP * output_head_stride
            _merge(
                own_group,
                partial,
                partial_lse,
                group * GROUP * bound,
                used,
                GROUP,
                HEAD_DIM,
                BLOCK_G,
                BLOCK_S,
                BLOCK_D,
                output_head_stride,
                bound,
            )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; an H200's 132 for the interpreter."""
    return 132 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def choose_splits(rows: int, kv_heads: int, tiles: int, processors: int) -> tuple[int, int]:
    """Splits of a row that fill the machine, and the upper bound for a long row among short ones.

    Args:
        rows: decode rows.
        kv_heads: key heads.
        tiles: tiles of the longest row that the block table has room for.
        processors: multiprocessors.
    """
    wanted = PROGRAMS_PER_PROCESSOR * processors // max(rows * kv_heads, 1)
    wanted = max(1, min(wanted, tiles, MAX_SPLITS))
    return wanted, min(max(wanted, cdiv(tiles, LONG_SPLIT_TILES)), MAX_SPLITS)


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    splits: int | None = None,
    tile: Tile | None = None,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each row's last position over its keys.

    Args:
        query: [rows, heads, head_dim] fp32, bf16 or fp16, last dimension contiguous.
        key_cache, value_cache: [blocks, page_size, kv_heads, head_dim] of the same dtype, last dimension contiguous.
        block_table: [rows, pages] int32. Only entries of pages with a visible key are read.
        kv_lengths: [rows] int32, keys of each row, the query's own included; a row of 0 gives zeros.
        scale: factor of the query-key products.
        window: visible keys, None = all.
        softcap: logits are ``softcap * tanh(logits / softcap)``; None = off.
        out: [rows, heads, head_dim] to write to.
        splits: splits of each row, None = as many as fill the machine.
        tile: launch shape, None = the table's.
        tickets: at least rows * kv_heads int32, all zero, which they are again afterwards; for launches that follow one
            another on one stream. None = zeros of this launch's own, which cost a launch of their own.

    Returns:
        [rows, heads, head_dim] of the query's dtype; softmax and sums in fp32.

    Raises:
        ValueError: heads are not a multiple of key heads, a last dimension is not contiguous, or there are too few
            tickets.
    """
    rows, heads, head_dim = query.shape
    page_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    check_paged_inputs(query, key_cache, value_cache)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    if rows == 0:
        return out
    processors = multiprocessors(query.device)
    if tile is None:
        tile = decode_tile(head_dim, page_size, query.dtype, rows * kv_heads / processors)
    tiles = cdiv(block_table.shape[1] * page_size, tile.keys)
    if window is not None:
        tiles = min(tiles, cdiv(window, tile.keys) + 1)
    if splits is None:
        wanted, bound = choose_splits(rows, kv_heads, tiles, processors)
    else:
        wanted, bound = splits, splits
    group = heads // kv_heads
    # Where every row has one split nobody leaves parts: one element will do, of the same type, or it would be another
    # compilation.
    split_rows = rows if bound > 1 else 0
    partial = query.new_empty((max(split_rows * heads * bound * head_dim, 1),), dtype=torch.float32)
    lse = query.new_empty((max(split_rows * heads * bound, 1),), dtype=torch.float32)
    if tickets is None:
        fill = query.new_zeros if split_rows else query.new_empty
        tickets = fill(rows * kv_heads, dtype=torch.int32)
    elif tickets.numel() < rows * kv_heads:
        raise ValueError(f"{tickets.numel()} tickets do not do for {rows} rows of {kv_heads} key heads")
    block_d, block_g = next_power_of_2(head_dim), next_power_of_2(group)
    _decode_kernel[(kv_heads, rows, bound)](
        query,
        key_cache,
        value_cache,
        block_table,
        kv_lengths,
        out,
        partial,
        lse,
        tickets,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        scale / softcap if softcap else scale * LOG2_E,
        softcap * LOG2_E if softcap else 0.0,
        wanted,
        bound,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        WINDOW=window or 0,
        SOFTCAP=bool(softcap),
        OPERAND=dot_operand(query.dtype),
        BLOCK_M=max(tile.queries, block_g),
        BLOCK_N=tile.keys,
        BLOCK_D=block_d,
        BLOCK_G=block_g,
        BLOCK_S=max(MERGE_VALUES * 32 * tile.warps // (block_g * block_d), 1),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **after_predecessor(query.device),
    )
    return out


def paged_decode_torch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Twin of `paged_decode`: rows of one query each."""
    cu_query = torch.arange(query.shape[0] + 1, dtype=torch.int32)
    return paged_prefill_torch(
        query, key_cache, value_cache, block_table, cu_query, kv_lengths, scale, window=window, softcap=softcap
    )
