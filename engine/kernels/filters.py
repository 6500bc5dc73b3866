"""Top-k, top-p and min-p without sorting: where each row is cut.

A cut is a value and an id: tokens above the value stay, of those equal to it the ones up to the id. It is found by
search, in two kernels:

1. `_survey_kernel` reads the logits once: the largest value of every 64 neighbours, and each chunk's sum of weights.
2. `_cut_kernel`, a program a row. Once k of those largest values (or enough weight for p) lie at or above a bound, the
   cut does too; so only neighbourhoods that reach the bound are looked at again: about k of them, or all where the
   distribution is flat. In these the cut is searched between a lowest and a highest possible value: each pass weighs
   what lies above four values between them, two evenly spaced and two evenly spaced in the floats' own order, which
   narrows the range to 2/5 at worst, and ends as soon as one value that occurs is left.

Sums are fp32 in a fixed order that depends on the row alone.

Bytes: ``rows * vocab * itemsize`` once, and once more a pass (some 5 to 8) where the distribution is flat.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.argmax import CHUNK, require_contiguous_rows
from engine.kernels.cut_search import key_value, order_key, place_of, search, weigh
from engine.kernels.language import after_predecessor, cdiv, next_power_of_2, tl, triton, wait_for_predecessor

NEIGHBOURS = 64
TILE = 32
"""Neighbourhoods looked at together."""
BOUND_STEPS = 20
"""Halvings of the floats' order for the bound: to 2**-11 of the value."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """What filters leave of rows: token i stays if ``logit > value``, or ``logit == value`` and ``i <= last_id``.

    Attributes:
        values: [n] float32, before temperature.
        last_ids: [n] int32.
    """

    values: torch.Tensor
    last_ids: torch.Tensor


@triton.jit
def _scale(temperature):
    """What turns a difference of logits into an exponent of 2."""
    return 1.4426950408889634 / temperature


@triton.jit(do_not_specialize=["rows", "temperature", "top_k", "top_p", "min_p", "mapped"])  # see engine.kernels.argmax
def _survey_kernel(
    logits,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    tops,
    peaks,
    sums,
    logits_stride,
    vocab,
    neighbourhoods,
    mapped,
    CHUNK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    chunk = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    filtered = (tl.load(top_k + item) < vocab) | (tl.load(top_p + item) < 1) | (tl.load(min_p + item) > 0)
    if filtered:
        row = item
        if mapped != 0:
            row = tl.load(rows + item)
        groups: tl.constexpr = CHUNK // NEIGHBOURS
        group = chunk * groups + tl.arange(0, groups)
        index = group[:, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, :]
        x = tl.load(logits + row * logits_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x != x, float("-inf"), x)
        top = tl.max(x, 1)
        tl.store(tops + item * neighbourhoods + group, top, mask=group < neighbourhoods)
        peak = tl.max(top, 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2((x - base) * _scale(tl.load(temperature + item)))
        cell = item * tl.num_programs(0) + chunk
        tl.store(peaks + cell, peak)
        tl.store(sums + cell, tl.sum(tl.sum(weights, 1), 0))


@triton.jit(do_not_specialize=["rows", "temperature", "top_k", "top_p", "min_p", "mapped"])
def _cut_kernel(
    logits,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    tops,
    peaks,
    sums,
    chosen,
    cut_values,
    cut_ids,
    logits_stride,
    vocab,
    neighbourhoods,
    chunks,
    mapped,
    TILE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    BOUND_STEPS: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    item = tl.program_id(0).to(tl.int64)
    k, p, m = tl.load(top_k + item), tl.load(top_p + item), tl.load(min_p + item)
    value = tl.full((), float("-inf"), tl.float32)
    last = tl.full((), 0, tl.int32) + vocab
    if (k < vocab) | (p < 1) | (m > 0):
        degree = tl.load(temperature + item)
        scale = _scale(degree)
        cell = tl.arange(0, CHUNK_BLOCK)
        chunk_peaks = tl.load(peaks + item * chunks + cell, mask=cell < chunks, other=float("-inf"))
        chunk_sums = tl.load(sums + item * chunks + cell, mask=cell < chunks, other=0.0)
        peak = tl.max(chunk_peaks, 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(chunk_sums * tl.exp2((chunk_peaks - base) * scale), 0)
        if (k < vocab) | (p < 1):
            row = item
            if mapped != 0:
                row = tl.load(rows + item)
            logits += row * logits_stride
            chosen += item * neighbourhoods
            highest = order_key(peak).to(tl.int64)

            group = tl.arange(0, BLOCK)
            live = group < neighbourhoods
            top = tl.load(tops + item * neighbourhoods + group, mask=live, other=float("-inf"))
            key = order_key(top)
            counted = tl.where(k < vocab, 1.0, tl.exp2((top - base) * scale))
            goal = tl.where(k < vocab, k.to(tl.float32), p * total)
            low = tl.full((), -2139095041, tl.int64)  # of -inf
            high = highest
            for _ in range(BOUND_STEPS):
                middle = low + (high - low + 1) // 2
                reached = tl.sum(tl.where(live & (key >= middle.to(tl.int32)), counted, 0.0), 0) >= goal
                low = tl.where(reached, middle, low)
                high = tl.where(reached, high, middle - 1)
            reaches = live & (key >= low.to(tl.int32))
            place = tl.cumsum(reaches.to(tl.int32), 0) - 1
            tl.store(chosen + place, group, mask=reaches)
            count = tl.sum(reaches.to(tl.int32), 0)
            tl.debug_barrier()  # what the threads chose is written before others read it

            if k < vocab:
                low = search(logits, chosen, count, vocab, low, highest, goal, base, scale, False, TILE, NEIGHBOURS)
            if p < 1:
                if k < vocab:
                    above, equal = weigh(logits, chosen, count, vocab, key_value(low), base, scale, TILE, NEIGHBOURS)
                    total = above + equal * tl.exp2((key_value(low) - base) * scale)
                goal = p * total
                low = search(logits, chosen, count, vocab, low, highest, goal, base, scale, True, TILE, NEIGHBOURS)
                above, equal = weigh(logits, chosen, count, vocab, key_value(low), base, scale, TILE, NEIGHBOURS)
                wanted = tl.maximum(tl.ceil((goal - above) / tl.exp2((key_value(low) - base) * scale)), 1.0)
                if equal > wanted:
                    last = place_of(logits, chosen, count, vocab, key_value(low), wanted, TILE, NEIGHBOURS)
            value = key_value(low)
        if m > 0:
            floor = peak + degree * tl.log(m)
            last = tl.where(floor > value, vocab, last)
            value = tl.maximum(value, floor)
    tl.store(cut_values + item, value)
    tl.store(cut_ids + item, last)


def filter_cuts(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> Cuts:
    """Where top-k, then top-p, then min-p cut each row; at least one token of a row stays.

    Top-k keeps every token that ties with the k-th. Top-p keeps a token if those before it, larger logits first and
    lower ids first among equals, do not yet have the probability p. min-p compares with the row's largest logit.

    Args:
        logits: [*, vocab] fp32, bf16 or fp16, last dimension contiguous, before temperature. NaN is left out.
        temperature: [n] float32, above 0.
        top_k: [n] int64 >= 1, vocab or more = off.
        top_p: [n] float32, 1 or more = off.
        min_p: [n] float32, 0 = off.
        rows: [n] int64 which rows of ``logits``; None = all of them.

    Raises:
        ValueError: a strided last dimension.
    """
    require_contiguous_rows(logits)
    count, vocab = len(temperature), logits.shape[1]
    cuts = Cuts(temperature.new_empty(count), temperature.new_empty(count, dtype=torch.int32))
    if count == 0:
        return cuts
    dependent = after_predecessor(logits.device)
    chunks, neighbourhoods = cdiv(vocab, CHUNK), cdiv(vocab, NEIGHBOURS)
    tops = temperature.new_empty((count, neighbourhoods))
    peaks, sums = temperature.new_empty((count, chunks)), temperature.new_empty((count, chunks))  # both aligned
    chosen = temperature.new_empty((count, neighbourhoods), dtype=torch.int32)
    settings = (top_k if rows is None else rows, temperature, top_k, top_p, min_p)
    _survey_kernel[(chunks, count)](
        logits,
        *settings,
        tops,
        peaks,
        sums,
        logits.stride(0),
        vocab,
        neighbourhoods,
        int(rows is not None),
        CHUNK=CHUNK,
        NEIGHBOURS=NEIGHBOURS,
        num_warps=8,
        **dependent,
    )
    _cut_kernel[(count,)](
        logits,
        *settings,
        tops,
        peaks,
        sums,
        chosen,
        cuts.values,
        cuts.last_ids,
        logits.stride(0),
        vocab,
        neighbourhoods,
        chunks,
        int(rows is not None),
        TILE=TILE,
        NEIGHBOURS=NEIGHBOURS,
        BOUND_STEPS=BOUND_STEPS,
        CHUNK_BLOCK=next_power_of_2(chunks),
        BLOCK=next_power_of_2(neighbourhoods),
        num_warps=16,
        maxnreg=64,  # two programs on a multiprocessor, one at work while the other waits for memory
        **dependent,
    )
    return cuts


def filter_cuts_torch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    rows: torch.Tensor | None = None,
    widest: int | None = None,
) -> Cuts:
    """Twin of `filter_cuts`, by sorting. The same but for the rounding of sums (top-p) and of a logarithm (min-p).

    Args:
        widest: the largest of ``top_k``, so that no more are sorted; None = not known.
    """
    x = (logits if rows is None else logits[rows]).float()
    vocab = x.shape[1]
    if widest is None or widest >= vocab:
        values = x.sort(dim=-1, descending=True).values
    else:
        values = x.topk(widest, dim=-1).values
    peak = values[:, :1]
    least = values.gather(-1, (top_k.clamp(max=values.shape[1]) - 1)[:, None])
    degree = temperature[:, None]
    weights = ((values - peak) / degree).exp().masked_fill(values < least, 0.0)
    unsorted = (x == least).sum(-1, keepdim=True) - (values == least).sum(-1, keepdim=True)  # ties with the k-th
    total = weights.sum(-1, keepdim=True) + unsorted * ((least - peak) / degree).exp()
    goal = torch.where(top_p < 1, top_p, float("inf"))[:, None] * total
    before = weights.cumsum(-1) - weights
    kept = (before < goal) & (values >= least)
    value = values.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0))
    above = weights.masked_fill(values <= value, 0.0).sum(-1, keepdim=True)
    wanted = ((goal - above) / ((value - peak) / degree).exp()).ceil().clamp(min=1)
    rank = (x == value).cumsum(-1, dtype=torch.int32)
    last = torch.where(rank[:, -1:] > wanted, (rank < wanted).sum(-1, keepdim=True), vocab)
    floor = peak + degree * min_p[:, None].log()
    last = torch.where(floor > value, vocab, last)
    return Cuts(torch.maximum(value, floor)[:, 0], last[:, 0].int())


def kept_torch(logits: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """[n, vocab] bool: what the cuts leave of ``logits`` [n, vocab]."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    x, value = logits.float(), cuts.values[:, None]
    return (x > value) | ((x == value) & (ids <= cuts.last_ids[:, None]))
