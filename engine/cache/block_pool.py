"""Blocks of the KV cache: who holds them, which are free, which hold a reusable prefix."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

TRASH_BLOCK = 0
"""Never allocated. Padding rows write here and out-of-window table entries point here, so that neither can alias live
memory."""


class BlockPool:
    """Reference-counted blocks 1 … num_blocks, with an exact index of full blocks by content.

    A block is in exactly one state: *referenced* (held by at least one request), *cached* (held by none, its content
    still findable, evicted least recently used first) or *free*. ``free + cached + referenced == num_blocks`` always.

    The prefix index is exact, not a hash that could collide: a full block's key is the identity of the content before
    it and its own token ids. Identities are never reused, so a child of an evicted block can no longer be found and
    ages out.

    Args:
        num_blocks: blocks, the trash block not counted.

    Attributes:
        allocations, evictions: blocks given out so far, and those of them whose cached content was given up.

    Raises:
        ValueError: no blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * (num_blocks + 1)
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._identity_of: dict[int, int] = {}
        self._block_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._next_identity = 1
        self.allocations = 0
        self.evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, free ones first, then cached ones from the least recently used. The caller has checked
        `num_available`."""
        blocks = []
        self.allocations += count
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
                self.evictions += 1
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """Hold a block that is already referenced or cached."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks, given in the order of their pages; later pages become evictable before earlier ones, since
        a prefix is only findable through its beginning."""
        for block in reversed(list(blocks)):
            if block == TRASH_BLOCK:
                continue
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, parent: int, tokens: tuple[int, ...]) -> int:
        """Make a full block findable and return its content's identity.

        Args:
            block: a referenced block whose keys and values are written.
            parent: identity of the content before it, 0 at the start of a sequence.
            tokens: the ids it holds.

        If another block already holds the same content, that one stays the findable one.
        """
        key = (parent, tokens)
        known = self._block_of.get(key)
        if known is not None:
            return self._identity_of[known]
        identity = self._next_identity
        self._next_identity += 1
        self._block_of[key] = block
        self._key_of[block] = key
        self._identity_of[block] = identity
        return identity

    def find(self, parent: int, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """(block, identity) holding these ids after this parent, or None."""
        block = self._block_of.get((parent, tokens))
        return None if block is None else (block, self._identity_of[block])

    def forget_all(self) -> None:
        """Drop the whole prefix index (after a weight update); referenced blocks stay held."""
        for block in list(self._cached):
            self._free.append(block)
        self._cached.clear()
        self._key_of.clear()
        self._identity_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
        del self._identity_of[block]

    def check(self, held: Iterable[int] = ()) -> None:
        """Raise RuntimeError if an invariant is broken; ``held`` lists every block in every table, with repeats."""
        counts = [0] * (self.num_blocks + 1)
        for block in held:
            if block != TRASH_BLOCK:
                counts[block] += 1
        if counts[1:] != self._references[1:]:
            wrong = [b for b in range(1, self.num_blocks + 1) if counts[b] != self._references[b]]
            raise RuntimeError(f"blocks {wrong[:8]} are not referenced as often as the tables hold them")
        referenced = sum(1 for r in self._references if r > 0)
        total = len(self._free) + len(self._cached) + referenced
        if total != self.num_blocks:
            raise RuntimeError(
                f"free {len(self._free)} + cached {len(self._cached)} + referenced {referenced} != {self.num_blocks}"
            )
        loose = [b for b in (*self._free, *self._cached) if self._references[b]]
        if loose or len(set(self._free)) != len(self._free):
            raise RuntimeError(f"blocks {loose[:8]} are free and referenced, or free twice")
