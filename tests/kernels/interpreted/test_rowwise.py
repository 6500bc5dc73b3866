"""Norm, activation and argmax against their twins and against transformers' and torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.kernels import (
    add_rms_norm,
    add_rms_norm_torch,
    gelu_tanh_mul,
    gelu_tanh_mul_torch,
    greedy_argmax,
    greedy_argmax_torch,
    rms_norm,
    rms_norm_torch,
    silu_mul,
    silu_mul_torch,
)

# The interpreter rounds to fp16 as torch does, but truncates to bf16; that is compared on a GPU.
DTYPES = [torch.float32, torch.float16]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the last bit: rsqrt and the order of sums are not torch's."""
    assert got.dtype == want.dtype
    tolerance = 1e-6 if got.dtype == torch.float32 else 1e-3
    torch.testing.assert_close(got, want, rtol=2 * tolerance, atol=tolerance)


def padded(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random [rows, columns] inside a wider tensor of NaN."""
    wide = torch.full((rows, columns + 8), float("nan"), dtype=dtype)
    wide[:, :columns] = torch.randn(rows, columns, generator=generator).to(dtype)
    return wide[:, :columns]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.integers(0, 4), st.integers(1, 300), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(0, 99)
)
def test_norms(tokens, hidden, dtype, unit_offset, in_place, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (padded(tokens, hidden, dtype, generator) for _ in range(2))
    weight = torch.randn(hidden, generator=generator).to(dtype)
    assert_close(rms_norm(x, weight, 1e-6, unit_offset), rms_norm_torch(x, weight, 1e-6, unit_offset))
    twin_residual, before = residual.clone(), x.clone()
    want = add_rms_norm_torch(x, twin_residual, weight, 1e-6, unit_offset)
    got = add_rms_norm(x, residual, weight, 1e-6, unit_offset, out=x if in_place else None)
    assert_close(got, want)
    assert torch.equal(residual, twin_residual)
    assert in_place or torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_transformers(dtype, generator) -> None:
    x = torch.randn(3, 96, generator=generator).to(dtype)
    weight = torch.randn(96, generator=generator).to(dtype)
    for module, unit_offset in ((LlamaRMSNorm(96, 1e-5), False), (Gemma2RMSNorm(96, 1e-5), True)):
        module.weight.data = weight
        assert_close(rms_norm(x, weight, 1e-5, unit_offset), module(x))


def test_sum_is_rounded_before_it_is_normalised(generator) -> None:
    x, residual = torch.full((1, 4), 2**-12, dtype=torch.float16), torch.ones(1, 4, dtype=torch.float16)
    add_rms_norm(x, residual, torch.ones(4, dtype=torch.float16), 0.0)
    assert torch.equal(residual, torch.ones(1, 4, dtype=torch.float16))


def test_norm_of_different_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="residual has shape"):
        add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), 1e-6)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 3), st.sampled_from([1, 7, 64, 1024, 1500]), st.sampled_from(DTYPES), st.integers(0, 99))
def test_activations(tokens, intermediate, dtype, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = padded(tokens, 2 * intermediate, dtype, generator)
    gate_up[:, ::3] *= 20  # both tails
    assert_close(silu_mul(gate_up), silu_mul_torch(gate_up))
    # In fp32 torch's own GELU cancels in the left tail; so the twin computes in fp64.
    exact = gate_up.double() if dtype == torch.float32 else gate_up
    assert_close(gelu_tanh_mul(gate_up), gelu_tanh_mul_torch(exact).to(dtype))


def test_activation_is_rounded_before_the_product() -> None:
    gate_up = torch.tensor([[1.3, 1000.0]], dtype=torch.float16)
    want = torch.nn.functional.silu(gate_up[:, :1]) * gate_up[:, 1:]
    assert torch.equal(silu_mul(gate_up), want)


def test_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="width 7"):
        silu_mul(torch.ones(1, 7))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.integers(0, 4),
    st.sampled_from([1, 2, 97, 4095, 4096, 4097, 9000]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([1, 3, 1000]),
    st.integers(0, 99),
)
def test_argmax(rows, vocab, dtype, distinct, seed) -> None:
    """Few distinct values: the lowest of many equal ones must win."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((rows, vocab + 5), float("nan"), dtype=dtype)
    logits[:, :vocab] = (torch.randint(0, distinct, (rows, vocab), generator=generator) - distinct // 2).to(dtype)
    first = [row.tolist().index(max(row.tolist())) for row in logits[:, :vocab]]
    assert greedy_argmax(logits[:, :vocab]).tolist() == first


def test_argmax_of_special_values() -> None:
    infinite, nan = float("inf"), float("nan")
    logits = torch.full((4, 5000), -infinite)
    logits[1, 4999] = -1e30
    logits[2, 4500], logits[2, 10] = nan, infinite
    logits[3, 7] = nan
    assert greedy_argmax(logits).tolist() == [0, 4999, 10, 7]


def test_argmax_also_sets_the_last_token_of_each_slot() -> None:
    logits = torch.randn(3, 9000, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    last, twins = torch.full((6,), -1, dtype=torch.int32), torch.full((6,), -1, dtype=torch.int32)
    tokens = greedy_argmax(logits, slots=slots, last_token=last)
    assert tokens.tolist() == greedy_argmax_torch(logits, slots, twins).tolist() == logits.argmax(-1).tolist()
    assert last.tolist() == twins.tolist() == [tokens[1], -1, tokens[2], -1, tokens[0], -1]
    with pytest.raises(ValueError, match="give slots and last_token both"):
        greedy_argmax(logits, slots=slots)
