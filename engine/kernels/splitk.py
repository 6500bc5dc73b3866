"""A linear layer of 3 to 128 rows on tensor cores, its sum over the depth split over programs and merged in the kernel.

Weights are the left operand: their rows fill a tensor core's tile, the few input rows need no padding to 64 or 128.
Output tiles alone do not fill a GPU, so a tile's depth is shared by ``splits`` programs. Each leaves its fp32 part in
memory, and who draws a tile's last ticket adds them up, always in the order of the splits: no second kernel, and the
same bits whoever is last. Copies are the tensor memory accelerator's, which also fills with zeros what lies past the
end of rows, columns and depth. The weights that a program begins with are on their way into the L2 cache while the
kernel before still runs. The kernel behind is let in when the products are done, not at once: what a program of it asks
for while this kernel streams its weights is evicted before it is used, and programs that come early crowd on the
multiprocessors that happen to have room.

Bytes: ``columns * depth * itemsize``; inputs come from the L2 cache once a tile of columns, parts go through it once.
fp32 sums, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from engine.kernels.language import (
    after_predecessor,
    cdiv,
    descriptor,
    dot_operand,
    next_power_of_2,
    prefetch_rows,
    release_successor,
    tl,
    triton,
    wait_for_predecessor,
)

MIN_ROWS, MAX_ROWS = 3, 128
MAX_SPLITS = 16
AHEAD = 16 << 10
"""Bytes of weights that a program asks for beforehand: 2 MB of a machine."""
MERGE_VALUES = 128
"""Values of other programs' parts that a merging thread loads at a time."""


@dataclass(frozen=True, slots=True)
class SplitTile:
    """Launch shape.

    Attributes:
        rows: input rows of a program, a power of two from 16 up.
        columns: weight rows of a program, a power of two from 16 up.
        depth: elements of each that a stage holds, a power of two from 16 up.
        warps: warps of a program.
        stages: depth of the software pipeline.
        splits: programs that share a tile's depth, at most `MAX_SPLITS`.
        ahead: bytes of its weights that a program asks the L2 cache for beforehand.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int
    ahead: int


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """What the programs of a tile share. For launches that follow one another on the device.

    Attributes:
        parts: fp32, at least `parts_needed`; holds anything before and after.
        tickets: int32, at least `tickets_needed`, all zero, which they are again afterwards.
    """

    parts: torch.Tensor
    tickets: torch.Tensor


_SHAPES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((64, 256, 4, 4), (64, 128, 4, 3), (128, 64, 4, 5)),
    32: ((64, 128, 4, 7), (128, 64, 4, 4)),
    64: ((64, 128, 4, 6), (128, 64, 4, 4)),
    128: ((64, 128, 4, 4),),
}
"""Columns, depth, warps and stages worth timing, by rows of a program: those that won, or nearly, among 37 on an H200.
Products of few columns are for the first; the others' smaller stages let several programs share a multiprocessor."""


def splitk_tiles(rows: int, columns: int, depth: int, processors: int = 132) -> tuple[SplitTile, ...]:
    """Tiles worth timing: split as often as every program has a multiprocessor for itself, half as often, and unsplit.
    None for numbers of rows that other kernels are for."""
    if not MIN_ROWS <= rows <= MAX_ROWS:
        return ()
    block = max(16, next_power_of_2(rows))
    found: dict[SplitTile, None] = {}
    for own_columns, own_depth, warps, stages in _SHAPES[block]:
        tiles = cdiv(columns, own_columns)
        most = max(1, min(processors // tiles, cdiv(depth, own_depth) // 2, MAX_SPLITS))
        for splits in (most, cdiv(most, 2), 1):
            found[SplitTile(block, own_columns, own_depth, warps, stages, splits, AHEAD)] = None
    return tuple(found)


def tickets_needed(rows: int, columns: int, tile: SplitTile) -> int:
    """Output tiles that are split, 0 if none is."""
    return 0 if tile.splits == 1 else cdiv(rows, tile.rows) * cdiv(columns, tile.columns)


def parts_needed(rows: int, columns: int, tile: SplitTile) -> int:
    """fp32 values that the parts of a product take."""
    return tickets_needed(rows, columns, tile) * tile.splits * tile.rows * tile.columns


# One compilation for all splits and sizes.
@triton.jit(do_not_specialize=["rows", "splits", "ahead"])
def _splitk_kernel(
    inputs,
    weights,
    first_weight,
    bias,
    output,
    parts,
    tickets,
    output_stride,
    rows,
    columns,
    depth,
    splits,
    ahead,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD_WIDTH: tl.constexpr,
    MERGE: tl.constexpr,
    BIASED: tl.constexpr,
    OPERAND: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of one tile are neighbours, so that they run at the same time.
    split = tl.program_id(0)
    own_column = tl.arange(0, COLUMNS)
    own_row = tl.arange(0, ROWS)
    column_start = tl.program_id(1) * COLUMNS
    row_start = tl.program_id(2) * ROWS
    column = column_start + own_column
    row = row_start + own_row
    steps = tl.cdiv(depth, DEPTH)
    begin = steps * split // splits * DEPTH
    end = steps * (split + 1) // splits * DEPTH
    if PDL and ahead > 0:
        # Pieces past the end of a row are taken from its end.
        piece = tl.minimum(begin + tl.arange(0, AHEAD_WIDTH) * ahead, depth - ahead)
        start = tl.minimum(column, columns - 1).to(tl.int64) * depth
        prefetch_rows(first_weight + start[:, None] + piece[None, :], ahead)
    wait_for_predecessor(PDL, RELEASE=False)
    sums = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for at in range(begin, end, DEPTH):
        w = weights.load([column_start, at])
        x = inputs.load([row_start, at])
        sums = tl.dot(w.to(OPERAND), x.to(OPERAND).T, sums)
    release_successor(PDL)
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    last = splits == 1
    if splits > 1:
        cell = parts + (tile * splits).to(tl.int64) * (COLUMNS * ROWS) + own_column[:, None] * ROWS + own_row[None, :]
        tl.store(cell + split * (COLUMNS * ROWS), sums)
        tl.debug_barrier()  # every thread's part is written before one of them draws the ticket
        last = tl.atomic_add(tickets + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(tickets + tile, 0)  # as the next launch expects it
            sums = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
            for part in range(0, splits, MERGE):
                for other in tl.static_range(MERGE):
                    # Other programs wrote these: they are in the L2 cache, a copy in this one's L1 may be old.
                    there = part + other < splits
                    sums += tl.load(
                        cell + (part + other) * (COLUMNS * ROWS), mask=there, other=0.0, cache_modifier=".cg"
                    )
    if last:
        if BIASED:
            sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
        live = (row[None, :] < rows) & (column[:, None] < columns)
        tl.store(output + row[None, :].to(tl.int64) * output_stride + column[:, None], sums, mask=live)


def splitk_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: SplitTile,
    scratch: SplitScratch,
    out: torch.Tensor | None = None,
    compile_only: bool = False,
) -> torch.Tensor:
    """``inputs @ weight.T + bias``; the twin is `engine.kernels.skinny.skinny_linear_torch`.

    Args:
        inputs: [rows, depth] bf16 or fp16, last dimension contiguous, rows 16 bytes apart or a multiple of it.
        weight: [columns, depth] contiguous, of the same dtype.
        bias: [columns] or None.
        tile: launch shape.
        scratch: what the programs of a tile share; may be as small as `parts_needed` and `tickets_needed` say.
        out: [rows, columns] to write to, last dimension contiguous.
        compile_only: compile the kernel, on any thread, and launch nothing: the result holds anything.

    Raises:
        ValueError: another dtype, sizes or addresses that are not a multiple of 16 bytes, too many splits, or too
            little scratch.
    """
    rows, depth = inputs.shape
    columns = weight.shape[0]
    if inputs.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != inputs.dtype:
        raise ValueError(
            f"inputs of {inputs.dtype} and weights of {weight.dtype} are given; this kernel takes all bf16 or all "
            "fp16: use torch's linear"
        )
    if inputs.stride(-1) != 1 or not weight.is_contiguous() or inputs.stride(0) % 8 or depth % 8:
        raise ValueError(
            f"inputs have strides {inputs.stride()}, weights {tuple(weight.shape)} {weight.stride()}; rows must be "
            "contiguous and a multiple of 16 bytes apart, weights whole"
        )
    if not 1 <= tile.splits <= MAX_SPLITS:
        raise ValueError(f"{tile.splits} splits are given; 1 to {MAX_SPLITS} are possible")
    parts, tickets = parts_needed(rows, columns, tile), tickets_needed(rows, columns, tile)
    if scratch.parts.numel() < parts or scratch.tickets.numel() < tickets:
        raise ValueError(
            f"{scratch.parts.numel()} values and {scratch.tickets.numel()} tickets of scratch are given; {tile} needs "
            f"{parts} and {tickets}"
        )
    out = inputs.new_empty((rows, columns)) if out is None else out
    if rows == 0:
        return out
    width = max(1, 32 * tile.warps // tile.columns)
    share = cdiv(depth, tile.depth) // tile.splits * tile.depth
    ahead = min(tile.ahead // (2 * tile.columns), share, depth) // width // 8 * 8
    grid = (tile.splits, cdiv(columns, tile.columns), cdiv(rows, tile.rows))
    launch = partial(_splitk_kernel.warmup, grid=grid) if compile_only else _splitk_kernel[grid]
    launch(
        descriptor(inputs, [tile.rows, tile.depth]),
        descriptor(weight, [tile.columns, tile.depth]),
        weight,
        bias,
        out,
        scratch.parts,
        scratch.tickets,
        out.stride(0),
        rows,
        columns,
        depth,
        tile.splits,
        ahead,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        AHEAD_WIDTH=width,
        MERGE=min(max(MERGE_VALUES * 32 * tile.warps // (tile.rows * tile.columns), 1), 8),
        BIASED=bias is not None,
        OPERAND=dot_operand(inputs.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **after_predecessor(inputs.device),
    )
    return out
