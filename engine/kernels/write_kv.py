"""Keys and values of a step's tokens into their slots of the paged cache, both in one launch.

Bytes: ``4 * tokens * kv_heads * head_dim * itemsize`` (read and written, keys and values); no arithmetic.
"""

from __future__ import annotations

import torch

from engine.kernels.language import after_predecessor, next_power_of_2, tl, triton, wait_for_predecessor


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    key_block_stride,
    key_token_stride,
    key_cache_head_stride,
    value_block_stride,
    value_token_stride,
    value_cache_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // PAGE
    offset = slot % PAGE
    element = tl.arange(0, BLOCK)
    live = element < KV_HEADS * HEAD_DIM
    head = element // HEAD_DIM
    d = element % HEAD_DIM
    k = tl.load(key + token * key_stride + head * key_head_stride + d, mask=live)
    v = tl.load(value + token * value_stride + head * value_head_stride + d, mask=live)
    key_row = key_cache + block * key_block_stride + offset * key_token_stride
    value_row = value_cache + block * value_block_stride + offset * value_token_stride
    tl.store(key_row + head * key_cache_head_stride + d, k, mask=live)
    tl.store(value_row + head * value_cache_head_stride + d, v, mask=live)


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store keys and values where their slots say.

    Args:
        key, value: [tokens, kv_heads, head_dim], any strides but a contiguous last dimension.
        key_cache, value_cache: [blocks, page_size, kv_heads, head_dim], likewise.
        slots: [tokens] int32 or int64, ``block * page_size + offset``; a token with a negative slot is skipped. Two
            tokens may share a slot only where nothing reads it (the trash block).

    Raises:
        ValueError: a last dimension is not contiguous.
    """
    tokens, kv_heads, head_dim = key.shape
    named = (("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache))
    for name, tensor in named:
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous")
    if tokens == 0:
        return
    _write_kernel[(tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=key_cache.shape[1],
        BLOCK=next_power_of_2(kv_heads * head_dim),
        num_warps=4,
        **after_predecessor(key.device),
    )


def write_kv_torch(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Twin of `write_kv`."""
    live = slots >= 0
    if key_cache.is_contiguous() and value_cache.is_contiguous() and bool(live.all()):
        # The usual step of a CPU, without a copy of the keys and values that are written.
        key_cache.flatten(0, 1).index_copy_(0, slots.long(), key.to(key_cache.dtype))
        value_cache.flatten(0, 1).index_copy_(0, slots.long(), value.to(value_cache.dtype))
        return
    slots, page_size = slots[live].long(), key_cache.shape[1]
    key_cache[slots // page_size, slots % page_size] = key[live].to(key_cache.dtype)
    value_cache[slots // page_size, slots % page_size] = value[live].to(value_cache.dtype)
