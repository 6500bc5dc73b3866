"""Random choice by the Gumbel-max trick: the argmax of scaled logits with Gumbel noise is a sample of their softmax.

One pass over the logits scales them, leaves out what `engine.kernels.filters` cut off and adds the noise; a chunk's
largest value goes through stage 2 of `engine.kernels.argmax`. Noise is a function of (key, vocabulary id) and of
nothing else: kernel and twin draw the same integers, their logarithms may differ in the last bit.

Bytes: ``rows * vocab * itemsize``, read once. The noise is some 70 instructions an element, more than the reading costs
from about 8 rows on; a chunk of which nothing is left draws none.
"""

from __future__ import annotations

import torch

from engine.kernels.argmax import CHUNK, chunk_results, pick_largest, require_contiguous_rows, store_chunk
from engine.kernels.filters import Cuts, kept_torch
from engine.kernels.language import after_predecessor, tl, triton, wait_for_predecessor
from engine.kernels.mixing import GOLDEN, MASK, mix, mix_words


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, one row a key.

    Args:
        keys: [rows] int64 in [0, 2**32).
        vocab_size: columns.

    Returns:
        [rows, vocab_size] float32; adding it to log probabilities and taking the argmax samples from them.
    """
    ids = torch.arange(vocab_size, device=keys.device, dtype=torch.int64)
    words = mix(keys[:, None] ^ mix((ids * GOLDEN) & MASK)[None, :])
    # 23 bits and a half: the largest float32 below 1 that is exact, so neither logarithm sees 0.
    uniform = ((words >> 9).to(torch.float32) + 0.5) * (1.0 / (1 << 23))
    return -torch.log(-torch.log(uniform))


@triton.jit(do_not_specialize=["rows", "temperature", "keys", "mapped"])  # see engine.kernels.argmax
def _gumbel_kernel(
    logits,
    rows,
    temperature,
    keys,
    cut_values,
    cut_ids,
    peaks,
    places,
    logits_stride,
    vocab,
    mapped,
    CUT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    chunk = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    row = item
    if mapped != 0:
        row = tl.load(rows + item)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * logits_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    if CUT:
        value, last = tl.load(cut_values + item), tl.load(cut_ids + item)
        x = tl.where((x > value) | ((x == value) & (index <= last)), x, float("-inf"))
    if not CUT or tl.max(x, 0) > float("-inf"):
        words = mix_words(index.to(tl.uint32) * 0x9E3779B9)
        words = mix_words(words ^ tl.load(keys + item).to(tl.uint32))
        uniform = ((words >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
        x = tl.div_rn(x, tl.full((CHUNK,), 0.0, tl.float32) + tl.load(temperature + item)) - tl.log(-tl.log(uniform))
    store_chunk(x, peaks, places, item, chunk, CHUNK)


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    cuts: Cuts | None = None,
    rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    last_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """A sample of ``softmax(logits[rows] / temperature)`` a row, drawn from the row's own stream.

    Args:
        logits: [*, vocab] fp32, bf16 or fp16, last dimension contiguous.
        temperature: [n] float32, above 0.
        keys: [n] int64 noise keys.
        cuts: where the rows' filters cut, None if none has any.
        rows: [n] int64 which rows of ``logits`` sample; None = all of them. The others are not touched.
        out: int64, one for each row of ``logits``; ``out[rows]`` is set. Needed with ``rows``.
        slots, last_token: one for each row of ``logits``, and [slots], integers; ``last_token[slots[rows]]`` is set as
            well. Both or none.

    Returns:
        ``out``.

    Raises:
        ValueError: a strided last dimension, ``rows`` without ``out``, or one of ``slots`` and ``last_token`` alone.
    """
    require_contiguous_rows(logits)
    out = _output(logits, rows, out)
    count = len(keys)
    if count == 0:
        return out
    peaks, places = chunk_results(logits, count)
    _gumbel_kernel[(peaks.shape[1], count)](
        logits,
        keys if rows is None else rows,
        temperature,
        keys,
        peaks if cuts is None else cuts.values,
        places if cuts is None else cuts.last_ids,
        peaks,
        places,
        logits.stride(0),
        logits.shape[1],
        int(rows is not None),
        CUT=cuts is not None,
        CHUNK=CHUNK,
        num_warps=8,
        **after_predecessor(logits.device),
    )
    return pick_largest(peaks, places, out, rows, slots, last_token)


def gumbel_argmax_torch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    cuts: Cuts | None = None,
    rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    last_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `gumbel_argmax`."""
    out = _output(logits, rows, out)
    own = logits if rows is None else logits[rows]
    scaled = own.float() / temperature[:, None]
    if cuts is not None:
        scaled = scaled.masked_fill(~kept_torch(own, cuts), float("-inf"))
    tokens = (scaled + gumbel_noise(keys, logits.shape[1])).argmax(-1)
    if rows is None:
        out.copy_(tokens)
    else:
        out.index_copy_(0, rows, tokens)
    if slots is not None and last_token is not None:
        own_slots = slots if rows is None else slots[rows]
        last_token.index_copy_(0, own_slots.long(), tokens.to(last_token.dtype))
    return out


def _output(logits: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    if out is not None:
        return out
    if rows is not None:
        raise ValueError("some rows sample: give the tokens of all in out, so that the others' stay as they are")
    return logits.new_empty(len(logits), dtype=torch.int64)
