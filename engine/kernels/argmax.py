"""Greedy choice in two stages: one program for a row's whole vocabulary would leave most of the machine idle.

Stage 1 finds each chunk's largest logit and where it is, stage 2 the largest of those. The lowest index wins a tie in
both, as in torch. A NaN counts as +inf.

Bytes: ``rows * vocab * itemsize``, read once.
"""

from __future__ import annotations

import torch

from engine.kernels.language import after_predecessor, tl, triton, wait_for_predecessor

CHUNK = 4096


@triton.jit
def _chunk_kernel(logits, peaks, places, logits_stride, vocab, CHUNK: tl.constexpr, PDL: tl.constexpr):
    wait_for_predecessor(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * logits_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    peak, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    cell = row * tl.num_programs(0) + chunk
    tl.store(peaks + cell, peak)
    tl.store(places + cell, chunk * CHUNK + place)


@triton.jit
def _pick_kernel(peaks, places, output, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    x = tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    _, best = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(output + row, tl.load(places + row * chunks + best).to(tl.int64))


def greedy_argmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Index of each row's largest logit.

    Args:
        logits: [rows, vocab] fp32, bf16 or fp16, last dimension contiguous.
        out: [rows] int64 to write to.

    Returns:
        [rows] int64.

    Raises:
        ValueError: a strided last dimension.
    """
    rows, vocab = logits.shape
    if logits.stride(-1) != 1:
        raise ValueError(f"logits have stride {logits.stride(-1)} in their last dimension; it must be contiguous")
    out = logits.new_empty(rows, dtype=torch.int64) if out is None else out
    if rows == 0:
        return out
    chunks = triton.cdiv(vocab, CHUNK)
    dependent = after_predecessor(logits.device)
    peaks = logits.new_empty((rows, chunks), dtype=torch.float32)
    places = logits.new_empty((rows, chunks), dtype=torch.int32)
    _chunk_kernel[(chunks, rows)](logits, peaks, places, logits.stride(0), vocab, CHUNK=CHUNK, num_warps=8, **dependent)
    _pick_kernel[(rows,)](peaks, places, out, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1, **dependent)
    return out


def greedy_argmax_torch(logits: torch.Tensor) -> torch.Tensor:
    """Twin of `greedy_argmax`."""
    return logits.argmax(-1)
