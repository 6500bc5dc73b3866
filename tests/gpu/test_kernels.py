"""The Triton kernels compiled for a GPU, against their twins there; their CPU tests run in the interpreter.

As there, whatever must not be read holds NaN.
"""

from __future__ import annotations

import pytest
import torch

from engine.attention.eager import EagerAttention
from engine.attention.metadata import AttentionMetadata, GroupTables
from engine.attention.triton_paged import TritonAttention, why_not_triton
from engine.bench.paged import PagedRows, random_rows
from engine.kernels import (
    add_rms_norm,
    add_rms_norm_torch,
    gelu_tanh_mul,
    gelu_tanh_mul_torch,
    greedy_argmax,
    greedy_argmax_torch,
    paged_decode,
    paged_decode_torch,
    paged_prefill,
    paged_prefill_torch,
    rms_norm,
    rms_norm_torch,
    rope_and_write,
    rope_and_write_torch,
    silu_mul,
    silu_mul_torch,
    why_no_triton,
    write_kv,
    write_kv_torch,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest error of attention, of the largest value."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [
        (32, 8, 128, 16, BF16),
        (32, 8, 128, 256, BF16),
        (32, 8, 128, 16, FP32),
        (32, 8, 128, 16, FP16),
        (16, 8, 256, 32, BF16),
        (16, 8, 256, 32, FP32),
        (4, 4, 64, 64, BF16),
        (6, 2, 80, 12, BF16),
        (28, 4, 96, 5, FP32),
        (8, 1, 32, 4, BF16),
    ],
)
VARIANTS = pytest.mark.parametrize(("window", "softcap"), [(None, None), (33, 20.0)])


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    error = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-9)
    assert error <= TOLERANCE[got.dtype], f"relative error {error:.2e}"


def guarded(like: torch.Tensor) -> torch.Tensor:
    """NaN, with a row more at either end."""
    return torch.full((like.shape[0] + 2, *like.shape[1:]), float("nan"), dtype=like.dtype, device=like.device)


def caches_of(rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rows.key_cache, rows.value_cache, rows.block_table


def test_the_kernels_can_run_here() -> None:
    assert why_no_triton(torch.device("cuda")) is None
    assert why_not_triton(torch.device("cuda"), torch.bfloat16, 128, 16) is None


@SHAPES
@VARIANTS
def test_decode(dtype, heads, kv_heads, head_dim, page_size, window, softcap, generator) -> None:
    lengths = [1, 70, page_size, page_size + 1, 1000, 513, 0]
    rows = random_rows(
        lengths, [1] * 7, heads, kv_heads, head_dim, page_size, dtype, generator, window, 3, poisoned=True
    )
    arguments = (rows.query, *caches_of(rows), rows.kv_lengths, head_dim**-0.5, window, softcap)
    want = paged_decode_torch(*arguments)
    for splits in (None, 1, 5):
        buffer = guarded(want)
        paged_decode(*arguments, out=buffer[1:-1], splits=splits)
        assert_close(buffer[1:-1], want)
        assert buffer[[0, -1]].isnan().all()


@SHAPES
@VARIANTS
def test_prefill(dtype, heads, kv_heads, head_dim, page_size, window, softcap, generator) -> None:
    lengths, counts = [300, 3, 700, 33, 0], [300, 1, 90, 32, 0]
    rows = random_rows(
        lengths, counts, heads, kv_heads, head_dim, page_size, dtype, generator, window, 3, poisoned=True
    )
    arguments = (rows.query, *caches_of(rows), rows.cu_query, rows.kv_lengths, head_dim**-0.5, window, softcap)
    want = paged_prefill_torch(*arguments)
    buffer = guarded(want)
    paged_prefill(*arguments, out=buffer[1:-1])
    assert_close(buffer[1:-1], want)
    assert buffer[[0, -1]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_a_captured_decode_follows_growing_rows(dtype, batch, generator) -> None:
    rows = random_rows([900] * batch, [1] * batch, 8, 2, 128, 16, dtype, generator)
    lengths = torch.ones_like(rows.kv_lengths)
    backend, metadata = TritonAttention(), AttentionMetadata(batch, lengths, (_tables(rows, None),))
    arguments = (rows.query, rows.key_cache, rows.value_cache, metadata, 0, 0.1, None)
    backend.attend(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = backend.attend(*arguments)
    for step in (1, 17, 592, 900):
        lengths.fill_(step)
        lengths[0] = 1
        graph.replay()
        assert_close(got, paged_decode_torch(rows.query, *caches_of(rows), lengths, 0.1))


def _tables(rows: PagedRows, window: int | None) -> GroupTables:
    slots = torch.zeros(len(rows.query), dtype=torch.int64, device="cuda")
    return GroupTables(rows.block_table, slots, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (64, 20.0)])
def test_backend_equals_eager_on_a_mixed_step(dtype, window, softcap, generator) -> None:
    lengths, counts = [1, 300, 77, 200, 600, 17], [1, 1, 1, 200, 100, 17]
    rows = random_rows(lengths, counts, 8, 2, 128, 16, dtype, generator, window, 2)
    metadata = AttentionMetadata(
        num_decode=3,
        kv_lengths=rows.kv_lengths,
        groups=(_tables(rows, window),),
        cu_query=rows.cu_query[3:],
        cu_kv=torch.tensor([0, 200, 800, 817], dtype=torch.int32, device="cuda"),
        max_query=200,
        max_kv=600,
        host_kv_lengths=lengths,
        host_query_lengths=counts[3:],
    )
    arguments = (rows.query, rows.key_cache, rows.value_cache, metadata, 0, 128**-0.5, softcap)
    got, want = TritonAttention().attend(*arguments), EagerAttention().attend(*arguments)
    # Eager attention rounds its scores to the dtype, so in bf16 it is the less exact of the two.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 65, 513])
def test_rowwise_kernels(dtype, tokens, generator) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]  # two of the last bit

    def close(got: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)

    for hidden in (2560, 80):
        x, residual, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)
        for unit_offset in (False, True):
            close(rms_norm(x, weight, 1e-6, unit_offset), rms_norm_torch(x, weight, 1e-6, unit_offset))
            mine, twin = residual.clone(), residual.clone()
            want = add_rms_norm_torch(x, twin, weight, 1e-6, unit_offset)
            close(add_rms_norm(x, mine, weight, 1e-6, unit_offset), want)
            assert torch.equal(mine, twin)
    gate_up = random(tokens, 2 * 9728)
    close(silu_mul(gate_up), silu_mul_torch(gate_up))
    exact = gate_up.double() if dtype == torch.float32 else gate_up
    close(gelu_tanh_mul(gate_up), gelu_tanh_mul_torch(exact).to(dtype))
    logits = random(min(tokens, 65), 151936)
    assert torch.equal(greedy_argmax(logits), greedy_argmax_torch(logits))
    assert not greedy_argmax(torch.zeros_like(logits)).any()


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return ((value.float() - exact.float()).norm() / exact.float().norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (6, 2, 80), (8, 1, 256)])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_writes(dtype, heads, kv_heads, head_dim, norm, generator) -> None:
    tokens, page_size = 37, 16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim)
    angle = torch.randn(50, head_dim // 2, device="cuda", generator=generator).repeat(1, 2)
    positions = torch.randint(0, 50, (tokens,), device="cuda", generator=generator)
    slots = torch.randperm(4 * page_size, device="cuda", generator=generator)[:tokens] - 1
    slots[3] = -1
    weights = (random(head_dim), random(head_dim)) if norm else (None, None)
    caches = torch.full((4, 4, page_size, kv_heads, head_dim), float("nan"), dtype=dtype, device="cuda")
    arguments = (positions, *weights, 1e-6)
    got = rope_and_write(qkv, angle.cos(), angle.sin(), slots, caches[0], caches[1], *arguments)
    want = rope_and_write_torch(qkv, angle.cos(), angle.sin(), slots, caches[2], caches[3], *arguments)
    exact_caches = torch.full((2, 4, page_size, kv_heads, head_dim), float("nan"), device="cuda")
    tables = (angle.cos().to(dtype).float(), angle.sin().to(dtype).float())
    exact_norms = tuple(w if w is None else w.float() for w in weights)
    exact_query = rope_and_write_torch(qkv.float(), *tables, slots, *exact_caches, positions, *exact_norms, 1e-6)
    for mine, twin, exact in ((got, want, exact_query), (caches[0], caches[2], exact_caches[0])):
        if dtype == torch.float32:
            torch.testing.assert_close(mine, twin, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:  # a fused multiply-add drops a rounding: a last bit apart, and no farther from the exact result
            written = ~twin.isnan()
            assert torch.equal(mine.isnan(), twin.isnan())
            assert relative_error(mine[written], exact[written]) <= 1.05 * relative_error(twin[written], exact[written])
    torch.testing.assert_close(caches[1], caches[3], rtol=0, atol=0, equal_nan=True)
    caches.fill_(float("nan"))
    key, value = qkv.view(tokens, -1, head_dim)[:, heads:].split(kv_heads, 1)
    write_kv(key, value, caches[0], caches[1], slots)
    write_kv_torch(key, value, caches[2], caches[3], slots)
    torch.testing.assert_close(caches[:2], caches[2:], rtol=0, atol=0, equal_nan=True)
