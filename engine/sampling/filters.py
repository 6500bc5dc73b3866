"""Temperature and the filters of random choice, in the order of transformers' ``generate``: temperature, top-k, top-p,
min-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine import kernels
from engine.kernels import Cuts


@dataclass(frozen=True, slots=True)
class FilterGroup:
    """Rows that are sorted together: ``rows`` [g] int64 among those that sample, None if all; ``widest`` their largest
    top-k."""

    rows: torch.Tensor | None
    widest: int


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows that sample, and their settings.

    Attributes:
        rows: [n] int64 rows of the logits.
        temperature, top_p, min_p: [n] float32; 1 and 0 = off.
        top_k: [n] int64, vocabulary size = off.
        keys: [n] int64 noise keys.
        num_rows: ``n``.
        sorts: the rows that use top-k or top-p.
        filtered: whether any row uses top-k, top-p or min-p.
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    keys: torch.Tensor
    num_rows: int
    sorts: tuple[FilterGroup, ...]
    filtered: bool


def cuts_by_search(logits: torch.Tensor, random: RandomRows, rows: torch.Tensor | None) -> Cuts:
    """Where the filters cut ``logits[rows]``, by the kernels; ``rows`` [n] int64, None = all."""
    return kernels.filter_cuts(logits, random.temperature, random.top_k, random.top_p, random.min_p, rows)


def cuts_by_sorting(logits: torch.Tensor, random: RandomRows, rows: torch.Tensor | None) -> Cuts:
    """`cuts_by_search` by the kernels' twin, which sorts no more of a row than its group needs."""
    temperature, top_k, top_p, min_p = random.temperature, random.top_k, random.top_p, random.min_p
    if len(random.sorts) == 1 and random.sorts[0].rows is None:
        return kernels.filter_cuts_torch(logits, temperature, top_k, top_p, min_p, rows, random.sorts[0].widest)
    own = logits if rows is None else logits[rows]
    values = own.amax(-1).float() + temperature * min_p.log()
    last_ids = torch.full_like(values, logits.shape[1], dtype=torch.int32)
    for group in random.sorts:
        m = group.rows
        assert m is not None, "a group of all rows is the only one"
        cuts = kernels.filter_cuts_torch(own, temperature[m], top_k[m], top_p[m], min_p[m], m, group.widest)
        values, last_ids = values.index_copy(0, m, cuts.values), last_ids.index_copy(0, m, cuts.last_ids)
    return Cuts(values, last_ids)


def warp(logits: torch.Tensor, temperature: torch.Tensor, cuts: Cuts | None) -> torch.Tensor:
    """Logits [n, vocabulary] scaled, float32, with -inf where the cuts leave a token out."""
    scaled = logits.float() / temperature[:, None]
    return scaled if cuts is None else scaled.masked_fill(~kernels.kept_torch(logits, cuts), float("-inf"))
