"""The split linear layer against the skinny one's twin; rows around the inputs, the output and the scratch hold NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.splitk import (
    MAX_ROWS,
    MIN_ROWS,
    SplitScratch,
    SplitTile,
    parts_needed,
    splitk_linear,
    splitk_tiles,
    tickets_needed,
)

BF16 = torch.bfloat16


def scratch_for(rows: int, columns: int, tile: SplitTile) -> SplitScratch:
    """Exactly as much as is needed."""
    parts, tickets = parts_needed(rows, columns, tile), tickets_needed(rows, columns, tile)
    return SplitScratch(torch.full((parts,), float("nan")), torch.zeros(tickets, dtype=torch.int32))


def twice(inputs: Any, weight: Any, bias: Any, tile: SplitTile, out: Any) -> None:
    """Launch on fresh scratch and again on what that left behind: the same bits, and tickets for the next."""
    scratch = scratch_for(inputs.shape[0], weight.shape[0], tile)
    splitk_linear(inputs, weight, bias, tile, scratch, out=out)
    before = out.clone()
    assert not scratch.tickets.any()
    splitk_linear(inputs, weight, bias, tile, scratch, out=out)
    assert torch.equal(out, before)
    assert not scratch.tickets.any()


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize(("rows", "columns"), [(3, 200), (16, 130), (17, 130), (40, 72), (100, 72), (128, 40)])
def test_its_own_tiles(rows: int, columns: int, dtype: torch.dtype, check_linear: Callable[..., None]) -> None:
    tiles = splitk_tiles(rows, columns, 776)
    assert max(tile.splits for tile in tiles) > 1
    for tile in tiles:
        check_linear(twice, rows, columns, 776, dtype, rows > 16, tile)


@given(
    rows=st.integers(1, 80),
    columns=st.integers(1, 90),
    eighths=st.integers(1, 40),
    biased=st.booleans(),
    tile=st.builds(
        SplitTile,
        st.sampled_from([16, 32, 64]),
        st.sampled_from([16, 32, 64]),
        st.sampled_from([16, 64]),
        st.just(4),
        st.just(3),
        st.integers(1, 9),
        st.just(0),
    ),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_shape(rows, columns, eighths, biased, tile, seed, check_linear: Callable[..., None]) -> None:
    check_linear(twice, rows, columns, 8 * eighths, BF16, biased, tile, seed)


def test_parts_are_added_in_their_order() -> None:
    """1, 2^24 and -2^24 in three parts give 0 in fp32 added from the left, 1 in any other order."""
    tile = SplitTile(16, 16, 16, 1, 2, 3, 0)
    inputs, weight = torch.zeros(1, 48, dtype=BF16), torch.zeros(16, 48, dtype=BF16)
    inputs[0, ::16] = 1.0
    weight[:, 0], weight[:, 16], weight[:, 32] = 1.0, 2.0**24, -(2.0**24)
    assert splitk_linear(inputs, weight, None, tile, scratch_for(1, 16, tile)).tolist() == [[0.0] * 16]
    weight = weight.roll(16, 1)
    assert splitk_linear(inputs, weight, None, tile, scratch_for(1, 16, tile)).tolist() == [[1.0] * 16]


def test_tiles_fill_the_machine() -> None:
    for rows in (8, 32, 64, 128):
        for columns, depth in ((2560, 4096), (6144, 2560), (2560, 9728), (4096, 14336)):
            programs = [
                -(-columns // tile.columns) * tile.splits for tile in splitk_tiles(rows, columns, depth, processors=132)
            ]
            assert programs
            assert max(programs) > 0.7 * 132, (rows, columns, depth, programs)
    assert {tile.splits for tile in splitk_tiles(64, 151936, 2560)} == {1}


def test_no_rows_and_what_it_refuses() -> None:
    weight = torch.zeros(24, 128, dtype=BF16)
    tile = SplitTile(16, 16, 16, 4, 3, 2, 0)
    scratch = scratch_for(16, 24, tile)
    assert splitk_linear(weight[:0], weight, None, tile, scratch).shape == (0, 24)
    assert splitk_tiles(MIN_ROWS - 1, 24, 128) == splitk_tiles(MAX_ROWS + 1, 24, 128) == ()
    with pytest.raises(ValueError, match="all bf16 or all fp16"):
        splitk_linear(torch.zeros(4, 128), weight, None, tile, scratch)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        splitk_linear(weight[:, :124], weight[:, :124].contiguous(), None, tile, scratch)
    with pytest.raises(ValueError, match="contiguous"):
        splitk_linear(weight, weight.T, None, tile, scratch)
    with pytest.raises(ValueError, match="1 to 16 are possible"):
        splitk_linear(weight, weight, None, SplitTile(16, 16, 16, 4, 3, 17, 0), scratch)
    with pytest.raises(ValueError, match="tickets of scratch are given"):
        splitk_linear(weight[:17], weight, None, tile, scratch)
