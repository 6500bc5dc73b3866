"""Token deliveries as columns: appended while a run is measured, sliced by request afterwards.

A million deliveries kept as objects would be a million more objects for the garbage collector to walk, in pauses that
the measured latencies would hold. Here they are four growing arrays of machine integers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.signedinteger[Any]]

UNKNOWN = -1
"""Stored size of a delivery that held an unknown number of tokens; outside of arrays it is None."""


@dataclass(slots=True)
class TokenChunk:
    """Tokens that became usable by the consumer at one moment (k tokens in one delivery are one chunk).

    Attributes:
        token_ids: None if the backend cannot see them; then ``count`` says how many there were.
        count: tokens in a delivery without ids; None = not known.
    """

    time_ns: int
    token_ids: tuple[int, ...] | None
    count: int | None = None

    @property
    def size(self) -> int | None:
        """Number of tokens; None = not known."""
        return self.count if self.token_ids is None else len(self.token_ids)


class Deliveries(Sequence[TokenChunk]):
    """Deliveries of one request in order of arrival.

    Attributes:
        times_ns: [deliveries] ``perf_counter_ns``.
        sizes: [deliveries] tokens in each, :data:`UNKNOWN` where that is not known.
        token_ids: [tokens] of all deliveries; None if one of them came without ids.
    """

    __slots__ = ("sizes", "times_ns", "token_ids")

    def __init__(self, times_ns: IntArray, sizes: IntArray, token_ids: IntArray | None) -> None:
        self.times_ns = times_ns
        self.sizes = sizes
        self.token_ids = token_ids

    @classmethod
    def of(cls, chunks: Iterable[TokenChunk]) -> Deliveries:
        """``chunks`` as columns; returned as it is if it has them already."""
        if isinstance(chunks, Deliveries):
            return chunks
        given = list(chunks)
        sizes = [UNKNOWN if c.size is None else c.size for c in given]
        hidden = any(c.token_ids is None for c in given)
        ids = None if hidden else np.array([i for c in given for i in c.token_ids or ()], dtype=np.int64)
        return cls(np.array([c.time_ns for c in given], dtype=np.int64), np.array(sizes, dtype=np.int64), ids)

    def merged(self) -> Deliveries:
        """The same with deliveries of one moment as one; its size is unknown if one of theirs is."""
        first = np.flatnonzero(np.diff(self.times_ns, prepend=-1) != 0)
        if len(first) == len(self.times_ns):
            return self
        sizes = np.add.reduceat(self.sizes, first)
        unknown = np.logical_or.reduceat(self.sizes == UNKNOWN, first)
        return Deliveries(self.times_ns[first], np.where(unknown, UNKNOWN, sizes), self.token_ids)

    def __len__(self) -> int:
        return len(self.times_ns)

    def __iter__(self) -> Iterator[TokenChunk]:
        at = 0
        for time_ns, size in zip(self.times_ns.tolist(), self.sizes.tolist(), strict=True):
            if self.token_ids is None:
                yield TokenChunk(time_ns, None, None if size == UNKNOWN else size)
            else:
                yield TokenChunk(time_ns, tuple(self.token_ids[at : at + size].tolist()))
                at += size

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int or slice, as a list answers
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to lists, so as unhashable as they are


class DeliveryLog:
    """Deliveries of all requests in the order they came. Not thread-safe: its owner has the lock.

    Columns ``requests`` (index of the request), ``times_ns``, ``sizes`` and ``ids_seen`` have an entry a delivery,
    ``ids`` one a token whose id was seen. :data:`COLUMNS` names them with their types.
    """

    def __init__(self) -> None:
        self.requests = array("i")
        self.times_ns = array("q")
        self.sizes = array("i")
        self.ids_seen = array("i")
        self.ids = array("q")
        self.tokens = 0  # of known number

    def __len__(self) -> int:
        return len(self.times_ns)

    def add(self, request: int, token_ids: Sequence[int], time_ns: int) -> None:
        """Tokens with their ids; OverflowError for an id that no 64-bit integer holds (nothing is added then)."""
        n = len(token_ids)
        if n == 1:  # nearly always
            self.ids.append(token_ids[0])
        else:
            self.ids.extend(array("q", token_ids))
        self.requests.append(request)
        self.times_ns.append(time_ns)
        self.sizes.append(n)
        self.ids_seen.append(n)
        self.tokens += n

    def add_hidden(self, request: int, count: int | None, time_ns: int) -> None:
        """``count`` tokens (None = not known how many) whose ids the backend cannot see."""
        self.requests.append(request)
        self.times_ns.append(time_ns)
        self.sizes.append(UNKNOWN if count is None else count)
        self.ids_seen.append(0)
        self.tokens += count or 0

    def tail(self, deliveries: int, ids: int) -> dict[str, bytes]:
        """The columns from the entries ``deliveries`` and ``ids`` on, as bytes of their types."""
        start = {name: ids if name == "ids" else deliveries for name in COLUMNS}
        return {name: getattr(self, name)[start[name] :].tobytes() for name in COLUMNS}

    def by_request(self, n_requests: int) -> list[Deliveries]:
        """The deliveries of each request, in order."""
        # Views of the growing arrays, which cannot grow meanwhile; split copies what it gives out.
        return split(n_requests, {name: np.frombuffer(getattr(self, name), dtype) for name, dtype in COLUMNS.items()})


COLUMNS = {"requests": np.int32, "times_ns": np.int64, "sizes": np.int32, "ids_seen": np.int32, "ids": np.int64}
"""Columns of a :class:`DeliveryLog` and their types in memory and in a journal."""


def split(n_requests: int, columns: Mapping[str, IntArray]) -> list[Deliveries]:
    """Columns of all deliveries (see :class:`DeliveryLog`) as those of each request, order kept."""
    order = np.argsort(columns["requests"], kind="stable")
    bounds = np.searchsorted(columns["requests"][order], np.arange(n_requests + 1))
    times, sizes, seen = columns["times_ns"][order], columns["sizes"][order], columns["ids_seen"][order]
    ids = columns["ids"][_id_order(columns["ids_seen"], order, seen)]
    id_bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(seen)))
    found = []
    for first, last in pairwise(bounds.tolist()):
        complete = np.array_equal(seen[first:last], sizes[first:last])
        own = ids[id_bounds[first] : id_bounds[last]] if complete else None
        found.append(Deliveries(times[first:last], sizes[first:last], own))
    return found


def _id_order(ids_seen: IntArray, order: IntArray, seen: IntArray) -> IntArray:
    """Where the ids of the deliveries in ``order`` are among all ids; ``seen`` is ``ids_seen[order]``."""
    if bool((ids_seen == 1).all()):  # nearly always, and a quarter of the memory
        return order
    start = (np.cumsum(ids_seen) - ids_seen)[order]
    return np.repeat(start - (np.cumsum(seen) - seen), seen) + np.arange(int(seen.sum()))
