"""Decode and prefill attention against their twins. Whatever no query may see is NaN: dead positions of live pages, the
trash block, and the block that dead entries of the block table name."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.bench.paged import PagedRows, random_rows
from engine.kernels import paged_decode, paged_decode_torch, paged_prefill, paged_prefill_torch
from engine.kernels.language import INTERPRETED
from engine.kernels.paged_decode import LONG_SPLIT_TILES, choose_splits

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of the largest value. fp32: what the kernels promise. Halves: weights and output are rounded (the interpreter
# truncates to bf16).
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    error = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-9)
    assert error <= TOLERANCE[got.dtype], f"relative error {error:.2e}"


def check(rows: PagedRows, decode: bool, window: int | None, softcap: float | None, splits: int | None = None) -> None:
    """Run a kernel into the middle of a poisoned buffer: right inside, untouched outside."""
    tokens, heads, head_dim = rows.query.shape
    scale = head_dim**-0.5
    buffer = torch.full((tokens + 2, heads, head_dim), float("nan"), dtype=rows.query.dtype)
    caches, table, lengths = (rows.key_cache, rows.value_cache), rows.block_table, rows.kv_lengths
    before = [cache.clone() for cache in caches]
    if decode:
        want = paged_decode_torch(rows.query, *caches, table, lengths, scale, window, softcap)
        got = paged_decode(rows.query, *caches, table, lengths, scale, window, softcap, out=buffer[1:-1], splits=splits)
    else:
        cu_query = rows.cu_query
        want = paged_prefill_torch(rows.query, *caches, table, cu_query, lengths, scale, window, softcap)
        got = paged_prefill(rows.query, *caches, table, cu_query, lengths, scale, window, softcap, out=buffer[1:-1])
    assert got.data_ptr() == buffer[1].data_ptr()
    assert_close(got, want)
    assert buffer[0].isnan().all()
    assert buffer[-1].isnan().all()
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))


def test_kernels_are_interpreted_here() -> None:
    assert INTERPRETED


SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [
        (8, 2, 128, 16, "fp32"),
        (8, 2, 128, 64, "bf16"),
        (4, 4, 64, 64, "fp16"),
        (2, 2, 64, 256, "fp32"),
        (6, 2, 80, 12, "fp32"),
        (6, 2, 80, 16, "bf16"),
        (4, 1, 96, 5, "fp32"),
        (2, 1, 256, 32, "fp32"),
        (2, 1, 256, 32, "fp16"),
        (5, 1, 32, 4, "fp32"),
    ],
)


@SHAPES
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, 20.0)])
def test_decode(dtype, heads, kv_heads, head_dim, page_size, window, softcap, generator) -> None:
    lengths = [1, 70, page_size, page_size + 1, 131]
    rows = random_rows(
        lengths, [1] * 5, heads, kv_heads, head_dim, page_size, DTYPES[dtype], generator, window, 2, poisoned=True
    )
    check(rows, True, window, softcap)


@SHAPES
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, 20.0)])
def test_prefill(dtype, heads, kv_heads, head_dim, page_size, window, softcap, generator) -> None:
    lengths, counts = [40, 3, 150, 33], [40, 1, 35, 32]  # whole prompts, a single token, a chunk after cached ones
    rows = random_rows(
        lengths, counts, heads, kv_heads, head_dim, page_size, DTYPES[dtype], generator, window, 1, poisoned=True
    )
    check(rows, False, window, softcap)


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [None, 40])
def test_decode_gives_the_same_for_any_number_of_splits(splits, window, generator) -> None:
    rows = random_rows([1, 33, 200, 64], [1] * 4, 4, 2, 32, 8, torch.float32, generator, window, poisoned=True)
    check(rows, True, window, None, splits=splits)


def test_a_row_without_keys_gives_zeros_and_disturbs_nobody(generator) -> None:
    rows = random_rows([0, 50, 0], [1] * 3, 4, 2, 32, 16, torch.float32, generator, poisoned=True)
    for splits in (None, 1, 2):
        check(rows, True, None, None, splits=splits)
        got = paged_decode(
            rows.query, rows.key_cache, rows.value_cache, rows.block_table, rows.kv_lengths, 0.2, splits=splits
        )
        assert not got[[0, 2]].any()


def test_a_long_row_among_many_is_split_though_the_machine_is_full(generator, monkeypatch) -> None:
    tiles = 3 * LONG_SPLIT_TILES
    assert choose_splits(rows=512, kv_heads=8, tiles=tiles, processors=132) == (1, 3)
    assert choose_splits(rows=512, kv_heads=8, tiles=LONG_SPLIT_TILES, processors=132) == (1, 1)
    module = sys.modules["engine.kernels.paged_decode"]  # the package attribute is the function
    monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    lengths = [3, 1, 64, 9, 30, 32 * LONG_SPLIT_TILES + 5]  # fp32 tiles have 32 keys
    rows = random_rows(lengths, [1] * 6, 2, 2, 32, 64, torch.float32, generator, poisoned=True)
    check(rows, True, None, None)


@pytest.mark.parametrize(
    ("rows", "tiles", "expected"), [(1, 10, (10, 10)), (1, 500, (33, 33)), (8, 500, (4, 8)), (64, 10, (1, 1))]
)
def test_splits_fill_the_machine_and_no_more(rows, tiles, expected) -> None:
    assert choose_splits(rows, 8, tiles, 132) == expected


def test_caches_need_not_be_contiguous(generator) -> None:
    rows = random_rows([70, 9], [30, 9], 4, 2, 64, 16, torch.float32, generator, poisoned=True, interleaved=True)
    assert not rows.key_cache.is_contiguous()
    check(rows, False, None, None)
    rows = random_rows([70, 9], [1, 1], 4, 2, 64, 16, torch.float32, generator, poisoned=True, interleaved=True)
    check(rows, True, None, None)


def test_queries_may_be_a_view_of_the_fused_projection(generator) -> None:
    rows = random_rows([70, 9], [1, 1], 4, 2, 64, 16, torch.float32, generator)
    fused = torch.randn(2, 8, 64, generator=generator)
    args = (rows.key_cache, rows.value_cache, rows.block_table, rows.kv_lengths, 0.1)
    assert torch.equal(paged_decode(fused[:, 1:5], *args), paged_decode(fused[:, 1:5].contiguous(), *args))


def test_padding_tokens_after_the_last_row_are_left_alone(generator) -> None:
    rows = random_rows([70, 9, 40], [30, 9, 33], 4, 2, 64, 16, torch.float32, generator)
    args = (rows.key_cache, rows.value_cache, rows.block_table)
    padded = torch.cat((rows.query, torch.full((100, 4, 64), float("nan"))))
    out = torch.full_like(padded, 5.0)
    got = paged_prefill(padded, *args, rows.cu_query, rows.kv_lengths, 0.1, out=out)
    assert_close(got[:72], paged_prefill_torch(rows.query, *args, rows.cu_query, rows.kv_lengths, 0.1))
    assert (got[72:] == 5.0).all()


def test_padding_rows_without_tokens_are_left_alone(generator) -> None:
    rows = random_rows([70, 0, 9, 0, 0], [30, 0, 9, 0, 0], 4, 2, 64, 16, torch.float32, generator, poisoned=True)
    check(rows, False, None, None)


@pytest.mark.parametrize("kernel", [paged_decode, paged_prefill])
def test_what_does_not_fit_is_refused(kernel, generator) -> None:
    rows = random_rows([8], [1], 4, 2, 32, 8, torch.float32, generator)
    table = (rows.block_table, rows.kv_lengths, 1.0)
    if kernel is paged_prefill:
        table = (rows.block_table, rows.cu_query, rows.kv_lengths, 1.0)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
        kernel(rows.query[:, :3], rows.key_cache, rows.value_cache, *table)
    turned = rows.key_cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="key_cache has stride 2"):
        kernel(rows.query, turned, rows.value_cache, *table)


@st.composite
def problems(draw):
    kv_heads = draw(st.integers(1, 3))
    rows = draw(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=4))
    return {
        "lengths": [length for length, _ in rows],
        "counts": [min(count, length) for length, count in rows],
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 7)),
        "head_dim": draw(st.sampled_from([32, 40, 64, 80, 96])),
        "page_size": draw(st.integers(4, 70)),
        "dtype": draw(st.sampled_from(list(DTYPES.values()))),
        "window": draw(st.none() | st.integers(1, 100)),
        "softcap": draw(st.sampled_from([None, 5.0, 50.0])),
        "splits": draw(st.sampled_from([None, 1, 2, 5])),
        "seed": draw(st.integers(0, 1000)),
        "interleaved": draw(st.booleans()),
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(problems())
def test_any_shape(problem) -> None:
    for decode in (True, False):
        rows = random_rows(
            problem["lengths"],
            [1] * len(problem["counts"]) if decode else problem["counts"],
            problem["heads"],
            problem["kv_heads"],
            problem["head_dim"],
            problem["page_size"],
            problem["dtype"],
            torch.Generator().manual_seed(problem["seed"]),
            problem["window"],
            poisoned=True,
            interleaved=problem["interleaved"],
        )
        check(rows, decode, problem["window"], problem["softcap"], problem["splits"])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(problems(), st.integers(0, 70), st.integers(0, 9), st.integers(0, 200))
def test_prefill_rows_begin_and_end_anywhere(problem, before, padding_rows, behind) -> None:
    """As in a captured step: tokens of other rows before them, rows that are not there and padding tokens behind. What
    lies outside the rows is NaN and stays as it was."""
    rows = random_rows(
        problem["lengths"], problem["counts"], problem["heads"], problem["kv_heads"], problem["head_dim"],
        problem["page_size"], problem["dtype"], torch.Generator().manual_seed(problem["seed"]), problem["window"],
        poisoned=True, interleaved=problem["interleaved"],
    )  # fmt: skip
    heads, dim = rows.query.shape[1:]
    caches, options = (rows.key_cache, rows.value_cache), (0.2, problem["window"], problem["softcap"])
    want = paged_prefill_torch(rows.query, *caches, rows.block_table, rows.cu_query, rows.kv_lengths, *options)

    def around(tensor: torch.Tensor, value: float) -> torch.Tensor:
        first, last = (torch.full((n, heads, dim), value, dtype=tensor.dtype) for n in (before, behind))
        return torch.cat((first, tensor, last))

    trash = torch.zeros((padding_rows, rows.block_table.shape[1]), dtype=torch.int32)
    table = torch.cat((rows.block_table, trash))
    lengths = torch.cat((rows.kv_lengths, torch.zeros(padding_rows, dtype=torch.int32)))
    cu_query = before + torch.cat((rows.cu_query, rows.cu_query[-1:].expand(padding_rows)))
    out = around(torch.full_like(rows.query, 5.0), 7.0)
    got = paged_prefill(around(rows.query, float("nan")), *caches, table, cu_query, lengths, *options, out=out)
    assert_close(got[before : before + len(rows.query)], want)
    assert (got[:before] == 7.0).all()
    assert (got[before + len(rows.query) :] == 7.0).all()
