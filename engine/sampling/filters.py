"""Temperature and the filters of random choice, in the order of transformers' ``generate``: temperature, top-k, top-p,
min-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_TOP_P = 2.0
"""A top-p that no sum of probabilities reaches, whatever it is rounded to."""


@dataclass(frozen=True, slots=True)
class FilterGroup:
    """Rows that are filtered together: ``rows`` [g] int64 among those that sample, None if all; ``widest`` their
    largest top-k."""

    rows: torch.Tensor | None
    widest: int


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows that sample, and their settings.

    Attributes:
        rows: [n] int64 rows of the logits.
        temperature, top_p, min_p: [n] float32; `NO_TOP_P` and 0 = off.
        top_k: [n] int64, vocabulary size = off.
        keys: [n] int64 noise keys.
        num_rows: ``n``.
        filters: the rows that use top-k or top-p.
        uses_min_p: whether any row does.
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    keys: torch.Tensor
    num_rows: int
    filters: tuple[FilterGroup, ...]
    uses_min_p: bool


def warp(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """Logits [n, vocabulary] of the rows that sample, scaled, with -inf where a filter leaves a token out."""
    scaled = logits / random.temperature[:, None]
    for group in random.filters:
        rows = group.rows
        if rows is None:
            scaled = filter_top_k_top_p(scaled, random.top_k, random.top_p, group.widest)
        else:
            kept = filter_top_k_top_p(scaled[rows], random.top_k[rows], random.top_p[rows], group.widest)
            scaled = scaled.index_copy(0, rows, kept)
    if random.uses_min_p:
        scaled = filter_min_p(scaled, random.min_p)
    return scaled


def filter_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, widest: int | None = None
) -> torch.Tensor:
    """Set to -inf what top-k, then top-p, leaves out. At least one token of a row always stays.

    Only the ``widest`` most likely tokens of a row are sorted. Tokens beyond them can stay only by a tie with the k-th;
    top-p, which breaks ties at will, keeps or drops those together.

    Args:
        logits: [rows, vocabulary] float32.
        top_k: [rows] int64 >= 1, vocabulary size = off.
        top_p: [rows] float32, 1 or more = off.
        widest: the largest of ``top_k``; None = not known.
    """
    vocab = logits.shape[-1]
    values, order = logits.sort(dim=-1, descending=True) if widest in (None, vocab) else logits.topk(widest, dim=-1)
    rank = torch.arange(values.shape[-1], device=logits.device)
    least = values.gather(-1, (top_k - 1)[:, None])
    values = values.masked_fill(values < least, float("-inf"))
    weights = (values - values[:, :1]).exp()
    tied = (logits == least).sum(-1, keepdim=True) - (values == least).sum(-1, keepdim=True)
    total = weights.sum(-1, keepdim=True) + tied * (least - values[:, :1]).exp()
    # Keep a token if what comes before it has not yet reached p: the one that crosses p stays.
    reached = weights.cumsum(-1) / total
    limit = torch.where(top_p < 1, top_p, NO_TOP_P)[:, None]
    values = values.masked_fill((reached - weights / total >= limit) & (rank > 0), float("-inf"))
    base = logits.masked_fill((logits < least) | (reached[:, -1:] >= limit), float("-inf"))
    return base.scatter(-1, order, values)


def filter_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf tokens less than ``min_p`` [rows] times as likely as the row's most likely one."""
    probabilities = logits.softmax(dim=-1)
    floor = min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probabilities < floor, float("-inf"))
