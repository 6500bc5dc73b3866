"""Rotary embedding with cache write, and the plain write, into poisoned caches: against twins and transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine.kernels import rope_and_write, rope_and_write_torch, write_kv, write_kv_torch

DTYPES = [torch.float32, torch.float16]


def poisoned_caches(blocks: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, twice: bool = True):
    """NaN caches [blocks, page_size, kv_heads, head_dim] whose blocks are not adjacent; a second pair for the twin."""
    store = torch.full((4 if twice else 2, blocks, 2, page_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    return [part[:, 0] for part in store]


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 2e-6 if got.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def angles(count: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator):
    angle = torch.randn(count, head_dim // 2, generator=generator).repeat(1, 2) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 5),
    kv_heads=st.integers(1, 9),
    group=st.sampled_from([1, 2, 5]),
    head_dim=st.sampled_from([32, 40, 64, 80, 128]),
    page_size=st.sampled_from([4, 5, 16, 256]),
    dtype=st.sampled_from(DTYPES),
    norm=st.booleans(),
    unit_offset=st.booleans(),
    table=st.booleans(),
    halved=st.booleans(),
    slot_type=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 99),
)
def test_rope_and_write(
    tokens, kv_heads, group, head_dim, page_size, dtype, norm, unit_offset, table, halved, slot_type, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, blocks = kv_heads * group, 4
    qkv = torch.full((tokens, (heads + 2 * kv_heads) * head_dim + 16), float("nan"), dtype=dtype)[:, :-16]
    qkv[:] = torch.randn(qkv.shape, generator=generator).to(dtype)
    cos, sin = angles(30 if table else tokens, head_dim, torch.float32, generator)
    if halved:
        cos, sin = cos[:, : head_dim // 2], sin[:, : head_dim // 2]
    positions = torch.randint(0, 30, (tokens,), generator=generator).int() if table else None
    weights = [torch.randn(head_dim, generator=generator).to(dtype) if norm else None for _ in range(2)]
    slots = (torch.randperm(blocks * page_size, generator=generator)[:tokens] - 1).to(slot_type)  # -1: skipped
    caches = poisoned_caches(blocks, page_size, kv_heads, head_dim, dtype)
    arguments = (positions, *weights, 1e-6, unit_offset)
    got = rope_and_write(qkv, cos, sin, slots, caches[0], caches[1], *arguments)
    want = rope_and_write_torch(qkv.contiguous(), cos, sin, slots, caches[2], caches[3], *arguments)
    assert got.is_contiguous()
    assert_same(got, want)
    assert_same(caches[0], caches[2])
    assert torch.equal(caches[1].nan_to_num(9.0), caches[3].nan_to_num(9.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_numbers_are_those_of_transformers(dtype, norm, generator) -> None:
    """fp16 is equal to the bit without the norm, whose sums and rsqrt may differ in the last one."""
    tokens, heads, kv_heads, dim = 6, 4, 2, 64
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    cos, sin = angles(tokens, dim, dtype, generator)
    weights = [torch.randn(dim, generator=generator).to(dtype) if norm else None for _ in range(2)]
    query, key, value = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), 1)
    if norm:
        modules = [Qwen3RMSNorm(dim, 1e-6) for _ in range(2)]
        for module, weight in zip(modules, weights, strict=True):
            module.weight.data = weight
        query, key = modules[0](query), modules[1](key)
    want = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    want_query, want_key = (part[0].transpose(0, 1) for part in want)
    caches = poisoned_caches(2, 4, kv_heads, dim, dtype, twice=False)
    slots = torch.arange(tokens)
    got = rope_and_write(qkv, cos, sin, slots, *caches, query_norm=weights[0], key_norm=weights[1])
    stored_key, stored_value = (cache.reshape(-1, kv_heads, dim)[:tokens] for cache in caches)
    if norm:
        assert_same(got, want_query)
        assert_same(stored_key, want_key)
    else:
        exact = dtype == torch.float16
        torch.testing.assert_close(got, want_query, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)
        torch.testing.assert_close(stored_key, want_key, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)
    assert torch.equal(stored_value, value)


def test_what_does_not_fit_is_refused() -> None:
    caches, slots = poisoned_caches(1, 4, 2, 32, torch.float32, twice=False), torch.zeros(1, dtype=torch.int64)
    table, qkv = torch.ones(1, 32), torch.ones(1, 6 * 32)
    with pytest.raises(ValueError, match="qkv of width 128"):
        rope_and_write(qkv[:, :128], table, table, slots, *caches)
    with pytest.raises(ValueError, match="width 8"):
        rope_and_write(qkv, table[:, :8], table[:, :8], slots, *caches)
    with pytest.raises(ValueError, match="5 rows for 1 tokens"):
        rope_and_write(qkv, table.expand(5, 32), table.expand(5, 32), slots, *caches)
    with pytest.raises(ValueError, match="both, or neither"):
        rope_and_write(qkv, table, table, slots, *caches, query_norm=table[0])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 5),
    kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([8, 33, 64, 80]),
    page_size=st.sampled_from([4, 5, 16]),
    dtype=st.sampled_from([*DTYPES, torch.bfloat16]),
    slot_type=st.sampled_from([torch.int32, torch.int64]),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_write_kv(tokens, kv_heads, head_dim, page_size, dtype, slot_type, transposed, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, kv_heads, tokens, head_dim) if transposed else (2, tokens, kv_heads, head_dim)
    both = torch.randn(shape, generator=generator).to(dtype)
    key, value = both.transpose(1, 2) if transposed else both
    slots = (torch.randperm(4 * page_size, generator=generator)[:tokens] - 1).to(slot_type)
    caches = poisoned_caches(4, page_size, kv_heads, head_dim, dtype)
    write_kv(key, value, caches[0], caches[1], slots)
    write_kv_torch(key, value, caches[2], caches[3], slots)
    assert torch.equal(caches[0].nan_to_num(9.0), caches[2].nan_to_num(9.0))
    assert torch.equal(caches[1].nan_to_num(9.0), caches[3].nan_to_num(9.0))


def test_write_of_strided_heads_is_refused() -> None:
    caches = poisoned_caches(1, 4, 2, 8, torch.float32, twice=False)
    key = torch.ones(1, 8, 2).transpose(1, 2)
    with pytest.raises(ValueError, match="key has stride 2"):
        write_kv(key, key, *caches, torch.zeros(1, dtype=torch.int64))
