"""The skinny linear layer against its twin; rows around the inputs and the output hold NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.skinny import MAX_ROWS, SkinnyTile, skinny_linear, skinny_linear_torch, skinny_tiles

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # the interpreter truncates to bf16


def check(
    rows: int, columns: int, depth: int, dtype: torch.dtype, biased: bool, tile: SkinnyTile | None, seed: int = 0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    padded = torch.full((rows + 2, depth + 3), float("nan"), dtype=dtype)
    padded[1:-1, :depth] = torch.randn(rows, depth, generator=generator).to(dtype)
    inputs = padded[1:-1, :depth]
    weight = torch.randn(columns, depth, generator=generator).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype) if biased else None
    buffer = torch.full((rows + 2, columns + 1), float("nan"), dtype=dtype)
    out = buffer[1:-1, :columns]
    skinny_linear(inputs, weight, bias, tile, out=out)
    want = skinny_linear_torch(inputs, weight, bias)
    assert torch.isfinite(out).all()
    error = (out.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-9)
    assert error <= TOLERANCE[dtype]
    assert buffer[[0, -1]].isnan().all()
    assert buffer[:, columns:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "biased"),
    [(torch.float32, False), (torch.float16, True), (torch.bfloat16, False), (torch.bfloat16, True)],
)
@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_every_number_of_rows(rows: int, biased: bool, dtype: torch.dtype) -> None:
    check(rows, 9, 600, dtype, biased, None)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_tile(rows: int) -> None:
    for tile in skinny_tiles(rows):
        check(rows, 5, 1100, torch.bfloat16, False, tile)


@given(
    rows=st.integers(1, MAX_ROWS),
    columns=st.integers(1, 40),
    depth=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    biased=st.booleans(),
    tile=st.builds(SkinnyTile, st.sampled_from([1, 2, 4, 8]), st.sampled_from([16, 64, 256]), st.just(4)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_shape(rows, columns, depth, dtype, biased, tile, seed) -> None:
    check(rows, columns, depth, dtype, biased, tile, seed)


def test_sums_stay_in_registers_and_loads_are_wide() -> None:
    for rows in range(1, MAX_ROWS + 1):
        tiles = skinny_tiles(rows)
        assert tiles
        for tile in tiles:
            assert tile.depth == 256 * tile.warps  # 16 bytes of bf16 a thread
            assert rows * tile.columns * tile.depth // (32 * tile.warps) <= 64


def test_no_rows_and_what_it_refuses() -> None:
    weight = torch.zeros(8, 16)
    assert skinny_linear(torch.zeros(0, 16), weight).shape == (0, 8)
    with pytest.raises(ValueError, match="at most 8"):
        skinny_linear(torch.zeros(9, 16), weight)
    with pytest.raises(ValueError, match="contiguous"):
        skinny_linear(torch.zeros(2, 16), torch.zeros(16, 8).T)
