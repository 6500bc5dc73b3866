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
def _pick_kernel(
    peaks, places, output, slots, last_token, chunks, SCATTER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    x = tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    _, best = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(places + row * chunks + best)
    tl.store(output + row, token.to(tl.int64))
    if SCATTER:
        tl.store(last_token + tl.load(slots + row).to(tl.int64), token)


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
        slots, last_token: [rows] int32 and [slots] int32; ``last_token[slots]`` is set as well. Both or none.

    Returns:
        [rows] int64.

    Raises:
        ValueError: a strided last dimension, or one of ``slots`` and ``last_token`` without the other.
    """
    rows, vocab = logits.shape
    if logits.stride(-1) != 1:
        raise ValueError(f"logits have stride {logits.stride(-1)} in their last dimension; it must be contiguous")
    if (slots is None) != (last_token is None):
        raise ValueError("give slots and last_token both, or neither")
    out = logits.new_empty(rows, dtype=torch.int64) if out is None else out
    if rows == 0:
        return out
    dependent = after_predecessor(logits.device)
    chunks = triton.cdiv(vocab, CHUNK)
    peaks = logits.new_empty((rows, chunks), dtype=torch.float32)
    places = logits.new_empty((rows, chunks), dtype=torch.int32)
    _chunk_kernel[(chunks, rows)](logits, peaks, places, logits.stride(0), vocab, CHUNK=CHUNK, num_warps=8, **dependent)
    _pick_kernel[(rows,)](
        peaks,
        places,
        out,
        places if slots is None else slots,
        places if last_token is None else last_token,
        chunks,
        SCATTER=slots is not None,
        BLOCK=triton.next_power_of_2(chunks),
        num_warps=1,
        **dependent,
    )
    return out


def greedy_argmax_torch(
    logits: torch.Tensor, slots: torch.Tensor | None = None, last_token: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of `greedy_argmax`."""
    tokens = logits.argmax(-1)
    if slots is not None and last_token is not None:
        last_token[slots.long()] = tokens.int()
    return tokens
