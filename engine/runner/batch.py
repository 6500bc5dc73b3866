"""Host-side state of the running batch, indexed by slot, and the packed inputs of a step.

Everything a step needs goes to the device in one int32 buffer and one copy. The block tables are kept as arrays that
follow the requests' tables by their new entries only, so nothing is built from Python lists of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cache import CacheLayout
from engine.scheduler import ScheduledRow

IN_FLIGHT = -1
"""Stands for an input id that is still on the device: the last token sampled in the row's slot."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's inputs, exact for a step that is launched, rounded up to a bucket for one that is replayed.

    Attributes:
        decodes: rows with one query token, which come first.
        prefills: rows with more, behind them.
        prefill_tokens: query tokens of those.
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

    def sections(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each section of the packed buffer, in order."""
        ends = self.prefills + 1 if self.prefills else 0
        return (
            ("ids", (self.tokens,)),
            ("positions", (self.tokens,)),
            ("kv_slots", (self.groups, self.tokens)),
            ("slots", (self.rows,)),
            ("kv_lengths", (self.rows,)),
            ("tables", (self.groups, self.rows, self.width)),
            ("cu_query", (ends,)),
            ("cu_kv", (ends,)),
            ("sample_index", (self.samples,)),
            ("sample_slots", (self.samples,)),
        )

    @property
    def size(self) -> int:
        """int32 elements of the whole buffer."""
        return sum(int(np.prod(shape)) for _, shape in self.sections())

    def carve(self, buffer: Any) -> dict[str, Any]:
        """Views of the sections of a flat int32 buffer (numpy array or tensor)."""
        views, start = {}, 0
        for name, shape in self.sections():
            count = 1
            for extent in shape:
                count *= extent
            views[name] = buffer[start : start + count].reshape(shape)
            start += count
        return views


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
        self._filled = [[0] * (max_requests + 1) for _ in range(self._groups)]
        self._owner: list[object] = [None] * (max_requests + 1)

    def follow(self, rows: Sequence[ScheduledRow]) -> int:
        """Take over what is new in the rows' block tables; returns the widest one's pages."""
        widest = 1
        for row in rows:
            request = row.request
            slot, tables = request.slot, request.tables
            if self._owner[slot] is not tables:  # the slot has a new owner, or its owner was readmitted
                self._owner[slot] = tables
                for filled in self._filled:
                    filled[slot] = 0
            for group, table in enumerate(tables):
                have, pages = self._filled[group][slot], len(table)
                if pages > widest:
                    widest = pages
                if pages > have:
                    if pages > self._tables.shape[2]:
                        self._widen(pages)
                    self._tables[group, slot, have:pages] = table[have:]
                    self._filled[group][slot] = pages
        return widest

    def _widen(self, pages: int) -> None:
        wider = np.zeros((*self._tables.shape[:2], max(pages, 2 * self._tables.shape[2])), dtype=np.int32)
        wider[:, :, : self._tables.shape[2]] = self._tables
        self._tables = wider

    def fill(self, shape: StepShape, views: dict[str, np.ndarray], rows: Sequence[ScheduledRow]) -> int:
        """Write a step's inputs into the packed buffer's views; returns how many of the rows sample.

        Rows are in order: those with one query token, then the others. Where the shape has room for more of either
        kind, padding rows fill it up: they read and write the trash block, and their samples land in the padding slot.
        """
        count = len(rows)
        slots = np.fromiter((row.request.slot for row in rows), np.int32, count)
        starts = np.fromiter((row.start for row in rows), np.int32, count)
        lengths = np.fromiter((row.count for row in rows), np.int32, count)
        decodes = int((lengths == 1).sum()) if shape.prefills else count
        # Where each row lies among the shape's rows: padding may stand between the two kinds.
        places = np.arange(count)
        places[decodes:] += shape.decodes - decodes

        views["slots"][:] = self.padding_slot
        views["slots"][places] = slots
        views["kv_lengths"][: shape.decodes] = 1
        views["kv_lengths"][shape.decodes :] = 0
        views["kv_lengths"][places] = starts + lengths
        width = min(shape.width, self._tables.shape[2])
        views["tables"][:] = 0
        views["tables"][:, places, :width] = self._tables[:, slots, :width]

        self._fill_decodes(shape, views, rows[:decodes], slots[:decodes], starts[:decodes])
        self._fill_prefills(shape, views, rows[decodes:], slots[decodes:])

        ends = np.cumsum(lengths) - 1
        ends[decodes:] += shape.decodes - decodes
        sampling = np.fromiter((row.samples for row in rows), bool, count)
        chosen = int(sampling.sum())
        views["sample_index"][:chosen] = ends[sampling]
        views["sample_index"][chosen:] = 0
        views["sample_slots"][:chosen] = slots[sampling]
        views["sample_slots"][chosen:] = self.padding_slot
        return chosen

    def _fill_decodes(
        self,
        shape: StepShape,
        views: dict[str, np.ndarray],
        rows: Sequence[ScheduledRow],
        slots: np.ndarray,
        starts: np.ndarray,
    ) -> None:
        count, page = len(rows), self._page_size
        ids, kv_slots = views["ids"], views["kv_slots"]
        for i, row in enumerate(rows):
            tokens, start = row.request.tokens, row.start
            ids[i] = tokens[start] if start < len(tokens) else IN_FLIGHT
        ids[count : shape.decodes] = 0
        views["positions"][:count] = starts
        views["positions"][count : shape.decodes] = 0
        pages, offsets = np.divmod(starts, page)
        kv_slots[:, :count] = self._tables[:, slots, pages] * page + offsets
        kv_slots[:, count : shape.decodes] = self._trash(shape.decodes - count)

    def _fill_prefills(
        self, shape: StepShape, views: dict[str, np.ndarray], rows: Sequence[ScheduledRow], slots: np.ndarray
    ) -> None:
        page = self._page_size
        ids, positions, kv_slots = views["ids"], views["positions"], views["kv_slots"]
        first = shape.decodes
        for row, slot in zip(rows, slots, strict=True):
            span = slice(first, first + row.count)
            ids[span] = row.request.tokens[row.start : row.start + row.count]
            where = np.arange(row.start, row.start + row.count, dtype=np.int32)
            positions[span] = where
            kv_slots[:, span] = self._tables[:, slot, where // page] * page + where % page
            first += row.count
        ids[first:] = 0
        positions[first:] = 0
        kv_slots[:, first:] = self._trash(shape.tokens - first)
        if shape.prefills:
            # Padding rows have no query and no key: the running sums stand still.
            for name, sizes in (("cu_query", [r.count for r in rows]), ("cu_kv", [r.start + r.count for r in rows])):
                views[name][0] = 0
                np.cumsum(sizes, out=views[name][1 : len(rows) + 1])
                views[name][len(rows) + 1 :] = views[name][len(rows)]

    def _trash(self, count: int) -> np.ndarray:
        """Places in the trash block for padding tokens."""
        return np.arange(count, dtype=np.int32) % self._page_size
