"""From the fused qkv projection to attention: norm of query and key heads where the model has one, rotary embedding,
keys and values into the paged cache, queries out contiguous; one launch.

Source: RoFormer (Su et al. 2021, arXiv 2104.09864) in the half-split form of GPT-NeoX and Llama. All arithmetic is
fp32, written to round to the tensors' dtype where transformers rounds: cos and sin; the normalised head (Llama's form)
and its product with the weight (Gemma's form rounds only that product); each of the two products of the rotation; their
sum. The interpreter does just that. Compiled, a product and the sum behind it may become one fused multiply-add, which
drops a rounding: on an H200 a quarter of bf16 queries differ from transformers' by one last bit, and are nearer to the
exact rotation (relative error 0.0020 against 0.0023).

Bytes: ``2 * tokens * (heads + 2 * kv_heads) * head_dim * itemsize``, read and written once.
"""

from __future__ import annotations

import torch

from engine.kernels.language import after_predecessor, cdiv, next_power_of_2, tl, triton, wait_for_predecessor
from engine.kernels.norm import rms_norm_torch
from engine.kernels.write_kv import write_kv_torch

HEADS_PER_PROGRAM = 8


@triton.jit
def _norm_heads(
    x0, x1, weight, half, live, eps, HEAD_DIM: tl.constexpr, UNIT_OFFSET: tl.constexpr, dtype: tl.constexpr
):
    """RMSNorm of heads given as two halves [heads, half] fp32."""
    half_size: tl.constexpr = HEAD_DIM // 2
    inverse = tl.rsqrt((tl.sum(x0 * x0, 1) + tl.sum(x1 * x1, 1)) / HEAD_DIM + eps)[:, None]
    w0 = tl.load(weight + half, mask=live, other=0.0).to(tl.float32)[None, :]
    w1 = tl.load(weight + half_size + half, mask=live, other=0.0).to(tl.float32)[None, :]
    x0 = x0 * inverse
    x1 = x1 * inverse
    if UNIT_OFFSET:
        x0 = x0 * (1.0 + w0)
        x1 = x1 * (1.0 + w1)
    else:
        x0 = x0.to(dtype).to(tl.float32) * w0
        x1 = x1.to(dtype).to(tl.float32) * w1
    return x0.to(dtype).to(tl.float32), x1.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_kernel(
    qkv,
    query_weight,
    key_weight,
    cos,
    sin,
    positions,
    slots,
    query,
    key_cache,
    value_cache,
    qkv_stride,
    cos_stride,
    sin_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dtype: tl.constexpr = qkv.dtype.element_ty
    half_size: tl.constexpr = HEAD_DIM // 2
    query_parts: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    key_parts: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    half = tl.arange(0, BLOCK_HALF)
    half_live = half < half_size

    # Heads of this program: their number in the section (queries, keys or values) and the section's place in qkv.
    if part < query_parts:
        section = 0
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        head_live = head < HEADS
    elif part < query_parts + key_parts:
        section = HEADS
        head = (part - query_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
        head_live = head < KV_HEADS
    else:
        section = HEADS + KV_HEADS
        head = (part - query_parts - key_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
        head_live = head < KV_HEADS
    live = head_live[:, None] & half_live[None, :]
    source = qkv + token * qkv_stride + (section + head)[:, None] * HEAD_DIM + half[None, :]
    raw0 = tl.load(source, mask=live, other=0.0)
    raw1 = tl.load(source + half_size, mask=live, other=0.0)
    # Everything is asked for at once, before anything is waited for.
    slot = tl.load(slots + token).to(tl.int64)
    angle = token
    if POSITIONS:
        angle = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + angle * cos_stride + half, mask=half_live, other=0.0).to(dtype).to(tl.float32)[None, :]
    s = tl.load(sin + angle * sin_stride + half, mask=half_live, other=0.0).to(dtype).to(tl.float32)[None, :]

    if part >= query_parts + key_parts:
        row = value_cache + (slot // PAGE) * value_block_stride + (slot % PAGE) * value_token_stride
        place = row + head[:, None] * value_head_stride + half[None, :]
        tl.store(place, raw0, mask=live & (slot >= 0))
        tl.store(place + half_size, raw1, mask=live & (slot >= 0))
    else:
        x0 = raw0.to(tl.float32)
        x1 = raw1.to(tl.float32)
        if NORM:
            weight = query_weight
            if part >= query_parts:
                weight = key_weight
            x0, x1 = _norm_heads(x0, x1, weight, half, half_live, eps, HEAD_DIM, UNIT_OFFSET, dtype)
        y0 = ((x0 * c).to(dtype).to(tl.float32) - (x1 * s).to(dtype).to(tl.float32)).to(dtype)
        y1 = ((x1 * c).to(dtype).to(tl.float32) + (x0 * s).to(dtype).to(tl.float32)).to(dtype)
        if part < query_parts:
            place = query + (token * HEADS + head)[:, None] * HEAD_DIM + half[None, :]
            tl.store(place, y0, mask=live)
            tl.store(place + half_size, y1, mask=live)
        else:
            row = key_cache + (slot // PAGE) * key_block_stride + (slot % PAGE) * key_token_stride
            place = row + head[:, None] * key_head_stride + half[None, :]
            tl.store(place, y0, mask=live & (slot >= 0))
            tl.store(place + half_size, y1, mask=live & (slot >= 0))


def _check(qkv: torch.Tensor, cos: torch.Tensor, positions: torch.Tensor | None, key_cache: torch.Tensor) -> int:
    """Query heads of ``qkv``."""
    kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if heads < 1 or qkv.shape[1] % head_dim:
        raise ValueError(
            f"qkv of width {qkv.shape[1]} cannot be heads of {head_dim}: {kv_heads} for keys, {kv_heads} for values "
            "and the rest for queries"
        )
    if head_dim % 2 or cos.shape[1] not in (head_dim, head_dim // 2):
        raise ValueError(f"cos and sin have width {cos.shape[1]}; heads of {head_dim} need {head_dim} or half that")
    if positions is None and cos.shape[0] != qkv.shape[0]:
        raise ValueError(f"cos has {cos.shape[0]} rows for {qkv.shape[0]} tokens; give positions to index a table")
    return heads


def rope_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> torch.Tensor:
    """Norm and rotate query and key heads, write keys and values to the cache.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], heads of queries, then keys, then values; last dimension
            contiguous.
        cos, sin: [tokens, head_dim] as transformers gives them (both halves equal, the first is read), or
            [positions, head_dim] tables with ``positions``; head_dim / 2 columns do as well.
        slots: [tokens] int32 or int64, ``block * page_size + offset``; with a negative slot nothing is written.
        key_cache, value_cache: [blocks, page_size, kv_heads, head_dim], last dimension contiguous.
        positions: [tokens] int32 or int64 rows of the tables.
        query_norm, key_norm: [head_dim] weights of the heads' RMSNorm; both or none.
        eps: of that norm.
        unit_offset: that norm multiplies by ``1 + weight`` (Gemma).

    Returns:
        Queries [tokens, heads, head_dim], contiguous.

    Raises:
        ValueError: sizes that do not fit together, one norm weight without the other.
    """
    heads = _check(qkv, cos, positions, key_cache)
    if (query_norm is None) != (key_norm is None):
        raise ValueError("give the norm weights of queries and keys both, or neither")
    tokens = qkv.shape[0]
    page_size, kv_heads, head_dim = key_cache.shape[1:]
    query = qkv.new_empty((tokens, heads, head_dim))
    if tokens == 0:
        return query
    block_h = min(HEADS_PER_PROGRAM, next_power_of_2(max(heads, kv_heads)))
    _rope_kernel[(tokens, cdiv(heads, block_h) + 2 * cdiv(kv_heads, block_h))](
        qkv,
        qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm,
        cos,
        sin,
        slots if positions is None else positions,
        slots,
        query,
        key_cache,
        value_cache,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        NORM=query_norm is not None,
        UNIT_OFFSET=unit_offset,
        POSITIONS=positions is not None,
        BLOCK_H=block_h,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        num_warps=2,
        **after_predecessor(qkv.device),
    )
    return query


def rope_and_write_torch(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> torch.Tensor:
    """Twin of `rope_and_write`."""
    heads = _check(qkv, cos, positions, key_cache)
    kv_heads, head_dim = key_cache.shape[2:]
    query, key, value = qkv.view(-1, heads + 2 * kv_heads, head_dim).split((heads, kv_heads, kv_heads), 1)
    if query_norm is not None and key_norm is not None:
        query = rms_norm_torch(query, query_norm, eps, unit_offset)
        key = rms_norm_torch(key, key_norm, eps, unit_offset)
    if positions is not None:
        cos, sin = cos[positions.long()], sin[positions.long()]
    half = head_dim // 2
    c, s = (table[:, None, :half].to(qkv.dtype) for table in (cos, sin))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * c - second * s, second * c + first * s), -1)

    write_kv_torch(rotate(key), value, key_cache, value_cache, slots)
    return rotate(query).contiguous()
