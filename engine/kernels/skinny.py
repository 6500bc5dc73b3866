"""A linear layer of one to eight rows: bounded by reading the weights once.

A program owns a few weight rows and walks along them; every weight is read once, 16 bytes a thread, marked to leave the
cache first, and multiplied with all rows of the input, which stay in the cache. Sums are kept per lane in fp32 and
added up at the end, so nothing is exchanged between threads on the way. The first weights are on their way into the L2
cache while the kernel before still runs.

Bytes: ``columns * depth * itemsize``. Source of the shape: GEMV kernels of SGLang and vLLM for Hopper, in words only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.language import after_predecessor, cdiv, next_power_of_2, prefetch, tl, triton, wait_for_predecessor

MAX_ROWS = 8


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """Launch shape.

    Attributes:
        columns: weight rows of a program, a power of two.
        depth: elements of each that are loaded at a time, a power of two.
        warps: warps of a program.
    """

    columns: int
    depth: int
    warps: int


def skinny_tiles(rows: int) -> tuple[SkinnyTile, ...]:
    """Tiles worth timing: 16 bytes a thread side by side along a weight row (256 elements a warp), or the compiler
    exchanges values between threads inside the loop; and a thread's fp32 sums must stay in registers. None for more
    than `MAX_ROWS` rows."""
    block = next_power_of_2(rows)
    tiles = [SkinnyTile(c, 256 * w, w) for c, w in ((4, 2), (2, 4), (8, 2), (4, 1), (2, 2), (1, 4), (1, 2))]
    return tuple(t for t in tiles if min(8, 2 * block) <= block * t.columns <= 8)[:4]


@triton.jit
def _skinny_kernel(
    inputs,
    weight,
    bias,
    output,
    inputs_stride,
    output_stride,
    columns,
    depth,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)[:, None, None]
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :, None]
    k = tl.arange(0, DEPTH)[None, None, :]
    # Columns past the end read the last one again: no mask in the loop.
    first = weight + tl.minimum(column, columns - 1).to(tl.int64) * depth
    if PDL:
        line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        prefetch(first + tl.minimum(tl.arange(0, DEPTH // line) * line, depth - 1)[None, None, :])
    wait_for_predecessor(PDL)
    weights = first + k
    values = inputs + tl.minimum(row, ROWS - 1) * inputs_stride + k
    sums = tl.zeros((BLOCK_ROWS, COLUMNS, DEPTH), dtype=tl.float32)
    whole = depth // DEPTH * DEPTH
    for start in range(0, whole, DEPTH):
        w = tl.load(weights + start, eviction_policy="evict_first").to(tl.float32)
        sums += w * tl.load(values + start).to(tl.float32)
    if whole < depth:
        live = k < depth - whole
        w = tl.load(weights + whole, mask=live, other=0.0, eviction_policy="evict_first").to(tl.float32)
        sums += w * tl.load(values + whole, mask=live, other=0.0).to(tl.float32)
    result = tl.sum(sums, 2)
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    if BIASED:
        result += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(output + row * output_stride + column, result, mask=(row < ROWS) & (column < columns))


def skinny_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: SkinnyTile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``inputs @ weight.T + bias`` for few rows, summed in fp32 and rounded once.

    Args:
        inputs: [rows, depth] fp32, bf16 or fp16, last dimension contiguous; at most `MAX_ROWS` rows.
        weight: [columns, depth] contiguous, of any float dtype.
        bias: [columns] or None.
        tile: launch shape; None = the first of `skinny_tiles`.
        out: [rows, columns] to write to, last dimension contiguous.

    Raises:
        ValueError: too many rows, or a strided last dimension.
    """
    rows, depth = inputs.shape
    columns = weight.shape[0]
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are given; this kernel takes at most {MAX_ROWS}: use torch's linear")
    if inputs.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"inputs have strides {inputs.stride()}, weights {weight.stride()}; rows must be contiguous, weights whole"
        )
    out = inputs.new_empty((rows, columns)) if out is None else out
    if rows == 0:
        return out
    tile = skinny_tiles(rows)[0] if tile is None else tile
    _skinny_kernel[(cdiv(columns, tile.columns),)](
        inputs,
        weight,
        bias,
        out,
        inputs.stride(0),
        out.stride(0),
        columns,
        depth,
        ROWS=rows,
        BLOCK_ROWS=next_power_of_2(rows),
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BIASED=bias is not None,
        num_warps=tile.warps,
        **after_predecessor(inputs.device),
    )
    return out


def skinny_linear_torch(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of `skinny_linear`."""
    summed = inputs.float() @ weight.float().T
    return (summed if bias is None else summed + bias.float()).to(inputs.dtype)
