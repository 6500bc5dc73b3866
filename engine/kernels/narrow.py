"""A linear layer of 9 to 64 rows on tensor cores: bounded by reading the weights once, with too many sums for threads.

Weights are the left operand (their rows fill a tensor core's tile, the few input rows need no padding to 64 or 128), a
program owns a tile of weight rows over the whole depth, and several stages of asynchronous copies keep its share of the
memory's bandwidth in flight; the first weights are on their way into the L2 cache while the kernel before still runs.
Nothing is split over the depth: meant for layers with enough weight rows to fill the machine. fp32 sums, rounded once.

Bytes: ``columns * depth * itemsize``; inputs come from the L2 cache once a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.language import after_predecessor, dot_operand, prefetch, tl, triton, wait_for_predecessor

MIN_ROWS, MAX_ROWS = 9, 64


@dataclass(frozen=True, slots=True)
class NarrowTile:
    """Launch shape.

    Attributes:
        columns: weight rows of a program, a power of two from 16 up.
        depth: elements of each that a stage holds, a power of two from 16 up.
        warps: warps of a program.
        stages: depth of the software pipeline.
    """

    columns: int
    depth: int
    warps: int
    stages: int


def narrow_tiles(rows: int) -> tuple[NarrowTile, ...]:
    """Tiles worth timing: 64 or 32 weight rows; stages such that two programs share a multiprocessor's memory. None for
    numbers of rows that another kernel is for."""
    if not MIN_ROWS <= rows <= MAX_ROWS:
        return ()
    more = int(rows <= 32)
    return NarrowTile(64, 128, 4, 3 + more), NarrowTile(32, 128, 4, 4 + more)


@triton.jit(do_not_specialize=["rows"])
def _narrow_kernel(
    inputs,
    weight,
    bias,
    output,
    inputs_stride,
    output_stride,
    rows,
    columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    OPERAND: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    # Rows and columns past the end read the last one again: no mask in the loop.
    first = weight + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * depth
    if PDL:
        line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        prefetch(first + (tl.arange(0, DEPTH // line) * line)[None, :])
    wait_for_predecessor(PDL)
    weights = first + k[None, :]
    values = inputs + tl.minimum(row, rows - 1)[None, :] * inputs_stride + k[:, None]
    sums = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        w = tl.load(weights + start, eviction_policy="evict_first")
        x = tl.load(values + start)
        sums = tl.dot(w.to(OPERAND), x.to(OPERAND), sums)
    if BIASED:
        sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    live = (row[None, :] < rows) & (column[:, None] < columns)
    tl.store(output + row[None, :] * output_stride + column[:, None], sums, mask=live)


def narrow_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: NarrowTile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``inputs @ weight.T + bias``; the twin is `engine.kernels.skinny.skinny_linear_torch`.

    Args:
        inputs: [rows, depth] bf16 or fp16, last dimension contiguous; at most `MAX_ROWS` rows, the depth a multiple of
            the tile's (a mask in the loop would cost the pipeline).
        weight: [columns, depth] contiguous, of the same dtype.
        bias: [columns] or None.
        tile: launch shape; None = the first of `narrow_tiles`.
        out: [rows, columns] to write to, last dimension contiguous.

    Raises:
        ValueError: another dtype, too many rows, a ragged depth, or a strided last dimension.
    """
    rows, depth = inputs.shape
    columns = weight.shape[0]
    if rows > MAX_ROWS or inputs.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != inputs.dtype:
        raise ValueError(
            f"{rows} rows of {inputs.dtype} and weights of {weight.dtype} are given; this kernel takes at most "
            f"{MAX_ROWS}, all bf16 or all fp16: use torch's linear"
        )
    if inputs.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"inputs have strides {inputs.stride()}, weights {weight.stride()}; rows must be contiguous, weights whole"
        )
    tile = narrow_tiles(max(rows, MIN_ROWS))[0] if tile is None else tile
    if depth % tile.depth:
        raise ValueError(f"the depth is {depth}; with {tile} it must be a multiple of {tile.depth}")
    out = inputs.new_empty((rows, columns)) if out is None else out
    if rows == 0:
        return out
    _narrow_kernel[(triton.cdiv(columns, tile.columns),)](
        inputs,
        weight,
        bias,
        out,
        inputs.stride(0),
        out.stride(0),
        rows,
        columns,
        depth,
        ROWS=max(16, triton.next_power_of_2(rows)),
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BIASED=bias is not None,
        OPERAND=dot_operand(inputs.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **after_predecessor(inputs.device),
    )
    return out
