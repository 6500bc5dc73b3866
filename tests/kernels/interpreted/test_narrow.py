"""The narrow linear layer against the skinny one's twin; rows around the inputs and the output hold NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.narrow import MAX_ROWS, MIN_ROWS, NarrowTile, narrow_linear, narrow_tiles


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [9, 16, 17, 40, 64])
def test_its_own_tiles(rows: int, dtype: torch.dtype, check_linear: Any) -> None:
    for tile in narrow_tiles(rows):
        check_linear(narrow_linear, rows, 80, 384, dtype, rows > 16, tile)


@given(
    rows=st.integers(1, MAX_ROWS),
    columns=st.integers(1, 90),
    steps=st.integers(1, 5),
    biased=st.booleans(),
    tile=st.builds(NarrowTile, st.sampled_from([16, 32, 64]), st.sampled_from([16, 64]), st.just(4), st.just(3)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_shape(rows, columns, steps, biased, tile, seed, check_linear: Any) -> None:
    check_linear(narrow_linear, rows, columns, steps * tile.depth, torch.bfloat16, biased, tile, seed)


def test_no_rows_and_what_it_refuses() -> None:
    weight = torch.zeros(8, 128, dtype=torch.bfloat16)
    assert narrow_linear(weight[:0], weight).shape == (0, 8)
    assert narrow_tiles(MIN_ROWS - 1) == narrow_tiles(MAX_ROWS + 1) == ()
    with pytest.raises(ValueError, match="at most 64"):
        narrow_linear(torch.zeros(65, 128, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match="all bf16 or all fp16"):
        narrow_linear(torch.zeros(4, 128), weight)
    with pytest.raises(ValueError, match="multiple of 128"):
        narrow_linear(weight[:, :120], weight[:, :120].contiguous())
    with pytest.raises(ValueError, match="contiguous"):
        narrow_linear(weight, weight.T)
