"""Greedy choice in two stages: one program for a row's whole vocabulary would leave most of the machine idle.

Stage 1 finds each chunk's largest logit and where it is, stage 2 (`pick_largest`, shared with random choice) the
largest of those. The lowest index wins a tie in both, as in torch. A NaN counts as +inf.

Bytes: ``rows * vocab * itemsize``, read once.
"""

from __future__ import annotations

import torch

from engine.kernels.language import after_predecessor, cdiv, next_power_of_2, tl, triton, wait_for_predecessor

CHUNK = 4096


@triton.jit
def _chunk_kernel(logits, peaks, places, logits_stride, vocab, CHUNK: tl.constexpr, PDL: tl.constexpr):
    wait_for_predecessor(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * logits_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    store_chunk(x, peaks, places, row, chunk, CHUNK)


@triton.jit
def store_chunk(x, peaks, places, row, chunk, CHUNK: tl.constexpr):
    """Stage 1's result for the values ``x`` [CHUNK] of one chunk."""
    x = tl.where(x != x, float("inf"), x)
    peak, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    cell = row * tl.num_programs(0) + chunk
    tl.store(peaks + cell, peak)
    tl.store(places + cell, chunk * CHUNK + place)


# Slices of a step's packed inputs lie anywhere and may be left out: no such difference makes another kernel to compile.
@triton.jit(do_not_specialize=["output", "targets", "slots", "last_token", "mapped", "scatter"])
def _pick_kernel(
    peaks,
    places,
    output,
    targets,
    slots,
    last_token,
    chunks,
    mapped,
    scatter,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    x = tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    _, best = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(places + row * chunks + best)
    target = row
    if mapped != 0:
        target = tl.load(targets + row)
    tl.store(output + target, token.to(tl.int64))
    if scatter != 0:
        tl.store(last_token + tl.load(slots + target).to(tl.int64), token)


def greedy_argmax(
    logits: torch.Tensor,
    out: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    last_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """Index of each row's largest logit.

    Args:
        logits: [rows, vocab] fp32, bf16 or fp16, last dimension contiguous.
        out: [rows] int64 to write to.
        slots, last_token: [rows] and [slots] integers; ``last_token[slots]`` is set as well. Both or none.

    Returns:
        [rows] int64.

    Raises:
        ValueError: a strided last dimension, or one of ``slots`` and ``last_token`` without the other.
    """
    rows, vocab = logits.shape
    require_contiguous_rows(logits)
    out = logits.new_empty(rows, dtype=torch.int64) if out is None else out
    if rows == 0:
        return out
    peaks, places = chunk_results(logits, rows)
    _chunk_kernel[(peaks.shape[1], rows)](
        logits,
        peaks,
        places,
        logits.stride(0),
        vocab,
        CHUNK=CHUNK,
        num_warps=8,
        **after_predecessor(logits.device),
    )
    return pick_largest(peaks, places, out, None, slots, last_token)


def require_contiguous_rows(logits: torch.Tensor) -> None:
    """ValueError if the last dimension is strided."""
    if logits.stride(-1) != 1:
        raise ValueError(f"logits have stride {logits.stride(-1)} in their last dimension; it must be contiguous")


def chunk_results(logits: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for stage 1: largest value and its place, [rows, chunks] float32 and int32."""
    shape = (rows, cdiv(logits.shape[1], CHUNK))
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def pick_largest(
    peaks: torch.Tensor,
    places: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None,
    slots: torch.Tensor | None,
    last_token: torch.Tensor | None,
) -> torch.Tensor:
    """Stage 2: the place of each row's largest chunk.

    Args:
        peaks, places: [n, chunks] from `chunk_results`, filled.
        out: int64; ``out[rows]`` is set.
        rows: [n] int64, None = all in turn.
        slots, last_token: ``last_token[slots[rows]]`` is set as well. Both or none.

    Raises:
        ValueError: one of ``slots`` and ``last_token`` without the other.
    """
    if (slots is None) != (last_token is None):
        raise ValueError("give slots and last_token both, or neither")
    count, chunks = peaks.shape
    _pick_kernel[(count,)](
        peaks,
        places,
        out,
        out if rows is None else rows,
        out if slots is None else slots,
        out if last_token is None else last_token,
        chunks,
        int(rows is not None),
        int(slots is not None),
        BLOCK=next_power_of_2(chunks),
        num_warps=1,
        **after_predecessor(out.device),
    )
    return out


def greedy_argmax_torch(
    logits: torch.Tensor, slots: torch.Tensor | None = None, last_token: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of `greedy_argmax`."""
    tokens = logits.argmax(-1)
    if slots is not None and last_token is not None:
        last_token.index_copy_(0, slots.long(), tokens.to(last_token.dtype))
    return tokens
