"""Block tables of requests: grow, share, slide, release. Accounting only, no tensors: the simulator runs it too."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from engine.cache.block_pool import TRASH_BLOCK, BlockPool
from engine.cache.layout import CacheLayout
from engine.requests import Request


class PagedCache:
    """Gives requests the blocks they need and takes them back.

    Args:
        layout: shape of the cache.
        num_blocks: blocks of the pool.
        share_prefixes: allow reuse of full blocks with the same content; in force only if the layout can.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, share_prefixes: bool = True) -> None:
        self.layout = layout
        self.pool = BlockPool(num_blocks)
        self.share_prefixes = share_prefixes and layout.can_share_prefixes
        self._identities: dict[str, list[int]] = {}

    @property
    def free_fraction(self) -> float:
        """Share of the pool that could be allocated now."""
        return self.pool.num_available / self.pool.num_blocks

    def open(self, request: Request) -> int:
        """Give a request its tables, filled with the longest cached prefix of full blocks; returns its tokens.

        At least one token is always left to compute: without a query there is nothing to sample from.
        """
        request.tables = tuple([] for _ in self.layout.groups)
        request.num_registered = 0
        identities = self._identities[request.request_id] = []
        if not self.share_prefixes:
            return 0
        page, tokens = self.layout.page_size, request.tokens
        table = request.tables[0]
        parent = 0
        for start in range(0, len(tokens) - page, page):
            found = self.pool.find(parent, tuple(tokens[start : start + page]))
            if found is None:
                break
            block, parent = found
            self.pool.acquire(block)
            table.append(block)
            identities.append(parent)
        request.num_registered = len(table)
        return len(table) * page

    def fork(self, parent: Request, child: Request) -> list[tuple[int, int]] | None:
        """Give a child its parent's blocks up to the last prompt token, which it computes itself.

        Whole pages are shared by reference. The page that the child goes on writing is a block of its own in every
        layer group; what it takes over is to be copied.

        Returns:
            (from, to) blocks to copy, or None, and nothing is held, if blocks are lacking.
        """
        pages, offset = divmod(parent.num_prompt - 1, self.layout.page_size)
        need = len(parent.tables) if offset else 0
        if need > self.pool.num_available:
            return None
        child.tables = tuple(table[:pages] for table in parent.tables)
        for table in child.tables:
            for block in table:
                if block != TRASH_BLOCK:  # a page behind a sliding window
                    self.pool.acquire(block)
        copies = []
        if offset:
            for table, own in zip(parent.tables, child.tables, strict=True):
                own.extend(self.pool.allocate(1))
                copies.append((table[pages], own[-1]))
        identities = self._identities[parent.request_id][:pages]
        self._identities[child.request_id] = identities
        never = parent.num_registered == sys.maxsize
        child.num_registered = sys.maxsize if never else len(identities)
        return copies

    def has_room(self, request: Request, num_tokens: int, chunk: int) -> bool:
        """Whether an open request could grow to ``num_tokens`` positions, ``chunk`` at a time, without any other giving
        way."""
        held = sum(len(table) for table in request.tables)
        return self.layout.blocks_needed(num_tokens, chunk) - held <= self.pool.num_available

    def extend(self, request: Request, end: int) -> bool:
        """Make room for positions up to ``end`` (exclusive), all layer groups or none; False if blocks are lacking.

        Pages that have slid out of a window, as seen from the first position still to be computed, are given back.
        """
        pages = -(-end // self.layout.page_size)
        tables = request.tables
        if len(tables) == 1 and self.layout.groups[0].window is None:  # the common case, once a row a step
            need = pages - len(tables[0])
            if need <= 0:
                return True
            if need > self.pool.num_available:
                return False
            tables[0].extend(self.pool.allocate(need))
            return True
        for group, table in zip(self.layout.groups, tables, strict=True):
            if group.window is not None:
                self._slide(table, request.num_computed - group.window + 1)
        needs = [max(0, pages - len(table)) for table in tables]
        if sum(needs) > self.pool.num_available:
            return False
        for table, need in zip(tables, needs, strict=True):
            table.extend(self.pool.allocate(need))
        return True

    def settled_until(self, request: Request) -> int:
        """The first position whose computation, one token at a time, will change the request's tables: it begins a page
        or lets one slide out of a window. Call it when room has been made for what is to be computed next."""
        page = self.layout.page_size
        until = len(request.tables[0]) * page
        for group in self.layout.groups:
            if group.window is not None:
                behind = max(0, request.num_computed - group.window + 1) // page  # pages that have slid out
                until = min(until, (behind + 1) * page + group.window - 1)
        return until

    def _slide(self, table: list[int], first_visible: int) -> None:
        last = min(first_visible // self.layout.page_size, len(table)) - 1
        stale = []
        while last >= 0 and table[last] != TRASH_BLOCK:
            stale.append(table[last])
            table[last] = TRASH_BLOCK
            last -= 1
        self.pool.release(stale)

    def register(self, request: Request) -> None:
        """Make the request's full, computed pages findable. Only ids already on the host count; a request without
        blocks has none."""
        if not self.share_prefixes or not request.tables:
            return
        page = self.layout.page_size
        full = min(request.num_computed, len(request.tokens)) // page
        if full <= request.num_registered:
            return
        identities = self._identities[request.request_id]
        for i in range(request.num_registered, full):
            parent = identities[-1] if identities else 0
            ids = tuple(request.tokens[i * page : (i + 1) * page])
            identities.append(self.pool.register(request.tables[0][i], parent, ids))
        request.num_registered = full

    def close(self, request: Request) -> None:
        """Take back every block of a request; harmless if it has none."""
        for table in request.tables:
            self.pool.release(table)
        request.tables = ()
        self._identities.pop(request.request_id, None)

    def forget_prefixes(self, running: Iterable[Request]) -> None:
        """Make every cached prefix unfindable (after a weight update). What the running requests computed so far mixes
        old and new weights, so their pages are never offered either."""
        self.pool.forget_all()
        for request in running:
            request.num_registered = sys.maxsize

    def check(self, running: Iterable[Request]) -> None:
        """Raise RuntimeError if blocks leak or are shared wrongly."""
        self.pool.check(block for request in running for table in request.tables for block in table)
