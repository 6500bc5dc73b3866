"""Host memory for preempted requests: which host block keeps which page. Accounting only, no tensors.

A preempted request whose computed pages find room here is not computed again: its blocks are copied out before others
write to them, and copied back into new blocks when it is readmitted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from engine.cache.block_pool import TRASH_BLOCK
from engine.cache.paged_cache import PagedCache
from engine.requests import Request

BlockPairs = list[tuple[int, int]]
"""Whole blocks to copy, (from, to)."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """What is kept of one request.

    Attributes:
        num_computed: positions whose keys and values it stands for.
        groups: per layer group, the first page kept (those before have slid out of the window) and the host blocks of
            the pages from there on.
        shareable: whether its pages may be offered to the prefix cache again.
    """

    num_computed: int
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    shareable: bool

    @property
    def blocks(self) -> list[int]:
        return [block for _, blocks in self.groups for block in blocks]


class HostBlocks:
    """Host blocks 0 … num_blocks - 1 and the requests whose pages they keep, all of a request's or none.

    Args:
        cache: whose blocks are copied.
        num_blocks: blocks of the host pool; 0 = nothing is ever kept.
    """

    def __init__(self, cache: PagedCache, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._cache = cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._copies: dict[str, _Copy] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def kept_tokens(self, request: Request) -> int:
        """Positions of a request that need no computing because they are kept here."""
        copy = self._copies.get(request.request_id)
        return 0 if copy is None else copy.num_computed

    def keep(self, request: Request) -> BlockPairs | None:
        """Find room for a running request's computed pages.

        Returns:
            (device block, host block) to copy before the device blocks are written again; None, and nothing is kept, if
            there is no room or nothing was computed.
        """
        page, end = self._cache.layout.page_size, request.num_computed
        pages = -(-end // page)
        firsts = [
            0 if group.window is None else max(0, end - group.window + 1) // page for group in self._cache.layout.groups
        ]
        need = sum(pages - first for first in firsts)
        if end == 0 or need > len(self._free):
            return None
        pairs: BlockPairs = []
        groups = []
        for table, first in zip(request.tables, firsts, strict=True):
            blocks = tuple(self._free.pop() for _ in range(pages - first))
            pairs += zip(table[first:pages], blocks, strict=True)
            groups.append((first, blocks))
        self._copies[request.request_id] = _Copy(end, tuple(groups), request.num_registered != sys.maxsize)
        return pairs

    def restore(self, request: Request) -> BlockPairs | None:
        """Give an opened request device blocks for its kept pages, behind those that the prefix cache still holds. The
        host blocks stay reserved until `release`.

        Returns:
            (host block, device block) to copy before the next step computes, nothing if nothing is kept; None, and
            nothing is allocated, if blocks are lacking.
        """
        copy = self._copies.get(request.request_id)
        if copy is None:
            return []
        lacking = [
            blocks[max(0, len(table) - first) :]
            for table, (first, blocks) in zip(request.tables, copy.groups, strict=True)
        ]
        pool = self._cache.pool
        if sum(map(len, lacking)) > pool.num_available:
            return None
        pairs: BlockPairs = []
        for table, (first, _), blocks in zip(request.tables, copy.groups, lacking, strict=True):
            table.extend([TRASH_BLOCK] * (first - len(table)))
            own = pool.allocate(len(blocks))
            table.extend(own)
            pairs += zip(blocks, own, strict=True)
        if not copy.shareable:
            request.num_registered = sys.maxsize
        return pairs

    def release(self, request: Request) -> None:
        """Free what is kept of a request; harmless if nothing is."""
        copy = self._copies.pop(request.request_id, None)
        if copy is not None:
            self._free += reversed(copy.blocks)

    def check(self, waiting: Iterable[Request]) -> None:
        """Raise RuntimeError if host blocks leak, are kept twice, or are kept for others than ``waiting`` requests."""
        held = [block for copy in self._copies.values() for block in copy.blocks]
        if sorted(held + self._free) != list(range(self.num_blocks)):
            raise RuntimeError("host blocks are lost or kept twice")
        known = {request.request_id: request.num_computed for request in waiting}
        for request_id, copy in self._copies.items():
            if known.get(request_id) != copy.num_computed:
                raise RuntimeError(f"host blocks are kept for {request_id!r}, which does not wait for them")
