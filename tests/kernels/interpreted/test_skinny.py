"""The skinny linear layer against its twin; rows around the inputs and the output hold NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.skinny import MAX_ROWS, SkinnyTile, skinny_linear, skinny_tiles


@pytest.mark.parametrize(
    ("dtype", "biased"),
    [(torch.float32, False), (torch.float16, True), (torch.bfloat16, False), (torch.bfloat16, True)],
)
@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_every_number_of_rows(rows: int, biased: bool, dtype: torch.dtype, check_linear: Any) -> None:
    check_linear(skinny_linear, rows, 9, 600, dtype, biased, None)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_tile(rows: int, check_linear: Any) -> None:
    for tile in skinny_tiles(rows):
        check_linear(skinny_linear, rows, 5, 1100, torch.bfloat16, False, tile)


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
def test_any_shape(rows, columns, depth, dtype, biased, tile, seed, check_linear: Any) -> None:
    check_linear(skinny_linear, rows, columns, depth, dtype, biased, tile, seed)


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
