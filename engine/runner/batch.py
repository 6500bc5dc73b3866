"""Host-side state of the running batch, indexed by slot, and the packed inputs of a step.

Everything a step needs goes to the device in one int32 buffer and one copy. The block tables are kept as arrays that
follow the requests' tables by their new entries only, so nothing is built from Python lists of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from engine.cache import CacheLayout
from engine.scheduler import StepRows


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's inputs, exact for a step that is launched, rounded up to a bucket for one that is replayed.

    Rows that decode come first, each with one query token; prefill rows stand behind them, and their tokens behind
    those tokens. In a step that is replayed there may be room for more decode rows than it has: then padding rows stand
    between the two kinds, but no padding tokens; those come last.

    Attributes:
        decodes: rows with one query token.
        prefills: rows with more.
        prefill_tokens: query tokens of those; in a step that is replayed, room for tokens beyond ``decodes``.
        samples: rows whose next token is chosen.
        width: pages of the block tables.
        groups: layer groups.
    """

    decodes: int
    prefills: int
    prefill_tokens: int
    samples: int
    width: int
    groups: int

    @property
    def rows(self) -> int:
        return self.decodes + self.prefills

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill_tokens

    def indices(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each section of int64, what tensors are indexed with: no kernel has to widen them."""
        return (
            ("kv_slots", (self.groups, self.tokens)),
            ("slots", (self.rows,)),
            ("sample_index", (self.samples,)),
            ("sample_slots", (self.samples,)),
        )

    def numbers(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each section of int32, behind those."""
        ends = self.prefills + 1 if self.prefills else 0
        return (
            ("ids", (self.tokens,)),
            ("positions", (self.tokens,)),
            ("kv_lengths", (self.rows,)),
            ("tables", (self.groups, self.rows, self.width)),
            ("cu_query", (ends,)),
            ("cu_kv", (ends,)),
        )

    @property
    def size(self) -> int:
        """int32 elements of the whole buffer."""
        return _places(self)[-1][1].stop

    def carve(self, buffer: Any) -> dict[str, Any]:
        """Views of the sections of a flat int32 buffer (numpy array or tensor) that begins at a multiple of 8 bytes."""
        index = torch.int64 if isinstance(buffer, torch.Tensor) else np.int64
        views = {}
        for name, place, extents, is_index in _places(self):
            view = buffer[place]
            if is_index:
                view = view.view(index)
            views[name] = view if len(extents) == 1 else view.reshape(extents)
        return views


@lru_cache(maxsize=1024)
def _places(shape: StepShape) -> tuple[tuple[str, slice, tuple[int, ...], bool], ...]:
    """Name, place in the flat buffer, extents and whether it is of int64, by section. Most steps have the shape of the
    one before."""
    places, start = [], 0
    for sections, width in ((shape.indices(), 2), (shape.numbers(), 1)):
        for name, extents in sections:
            end = start + width * prod(extents)
            places.append((name, slice(start, end), extents, width == 2))
            start = end
    return tuple(places)


class BatchState:
    """Block tables of the running requests as arrays, by group and slot.

    Args:
        layout: shape of the cache.
        max_requests: slots. One more, the last, belongs to padding rows.
    """

    def __init__(self, layout: CacheLayout, max_requests: int) -> None:
        self._page_size = layout.page_size
        self._groups = len(layout.groups)
        self.padding_slot = max_requests
        self._tables = np.zeros((self._groups, max_requests + 1, 8), dtype=np.int32)
        self._filled = np.zeros(max_requests + 1, dtype=np.int64)
        self._tenancy = np.zeros(max_requests + 1, dtype=np.int64)

    def follow(self, rows: StepRows) -> int:
        """Take over what is new in the rows' block tables; returns the widest one's pages."""
        widest = int(rows.pages.max(initial=1))
        if widest > self._tables.shape[2]:
            self._widen(widest)
        strangers = self._tenancy[rows.slots] != rows.tenancies
        for row in np.flatnonzero(strangers | (self._filled[rows.slots] != rows.pages)).tolist():
            slot, pages = rows.slots[row], rows.pages[row]
            have = 0 if strangers[row] else self._filled[slot]
            for group, table in enumerate(rows.requests[row].tables):
                self._tables[group, slot, have:pages] = table[have:pages]
            self._filled[slot], self._tenancy[slot] = pages, rows.tenancies[row]
        return widest

    def _widen(self, pages: int) -> None:
        wider = np.zeros((*self._tables.shape[:2], max(pages, 2 * self._tables.shape[2])), dtype=np.int32)
        wider[:, :, : self._tables.shape[2]] = self._tables
        self._tables = wider

    def fill(self, shape: StepShape, views: dict[str, np.ndarray], rows: StepRows) -> None:
        """Write a step's inputs into the packed buffer's views.

        Where the shape has room for more rows of one token, or for more others, padding rows fill it up: they read the
        trash block, padding tokens behind the step's own write it, and their samples land in the padding slot. Where
        both kinds have room, padding rows of one token name tokens of prefill rows, to which their result is not given.
        """
        count, singles = len(rows), rows.num_single
        # Rows of the shape, and which of the step's they are: padding may stand between the two kinds.
        end = shape.decodes + count - singles
        spans = [(slice(0, singles), slice(0, singles), slice(singles, shape.decodes))]
        if shape.prefills:
            spans.append((slice(shape.decodes, end), slice(singles, count), slice(end, shape.rows)))
        width = min(shape.width, self._tables.shape[2])
        for kind, (own, members, padding) in enumerate(spans):
            slots = rows.slots[members]
            views["slots"][own] = slots
            views["slots"][padding] = self.padding_slot
            views["kv_lengths"][own] = rows.ends[members]
            views["kv_lengths"][padding] = 0 if kind else 1
            views["tables"][:, own, :width] = self._tables[:, slots, :width]
            views["tables"][:, own, width:] = 0
            views["tables"][:, padding] = 0
        self._fill_singles(shape, views, rows)
        self._fill_chunks(shape, views, rows)

        last = np.cumsum(rows.counts) - 1
        chosen = rows.samples
        samples = np.count_nonzero(chosen)
        views["sample_index"][:samples] = last[chosen]
        views["sample_index"][samples:] = 0
        views["sample_slots"][:samples] = rows.slots[chosen]
        views["sample_slots"][samples:] = self.padding_slot

    def _fill_singles(self, shape: StepShape, views: dict[str, np.ndarray], rows: StepRows) -> None:
        count, page = rows.num_single, self._page_size
        ids, positions, kv_slots = views["ids"], views["positions"], views["kv_slots"]
        slots, starts = rows.slots[:count], rows.starts[:count]
        pages, offsets = np.divmod(starts, page)
        ids[:count], positions[:count] = rows.ids[:count], starts
        kv_slots[:, :count] = self._tables[:, slots, pages] * page + offsets

    def _fill_chunks(self, shape: StepShape, views: dict[str, np.ndarray], rows: StepRows) -> None:
        page = self._page_size
        ids, positions, kv_slots = views["ids"], views["positions"], views["kv_slots"]
        first = singles = rows.num_single
        for row in range(singles, len(rows)):
            slot, start, count = rows.slots[row], int(rows.starts[row]), int(rows.counts[row])
            span = slice(first, first + count)
            ids[span] = rows.requests[row].tokens[start : start + count]
            where = np.arange(start, start + count, dtype=np.int32)
            positions[span] = where
            kv_slots[:, span] = self._tables[:, slot, where // page] * page + where % page
            first += count
        if first < shape.tokens:
            ids[first:] = 0
            positions[first:] = 0
            kv_slots[:, first:] = self._trash(shape.tokens - first)
        if not shape.prefills:
            return
        # Padding rows have no query and no key: the running sums stand still.
        chunks = len(rows) - singles
        for name, start, sizes in (
            ("cu_query", singles, rows.counts[singles:]),
            ("cu_kv", 0, rows.ends[singles:]),
        ):
            sums = views[name]
            sums[0] = start
            sums[1 : chunks + 1] = start + np.cumsum(sizes)
            sums[chunks + 1 :] = sums[chunks]

    def _trash(self, count: int) -> np.ndarray:
        """Places in the trash block for padding tokens."""
        return np.arange(count, dtype=np.int32) % self._page_size
