"""What a step computes: its rows as arrays, and what was decided on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from engine.cache import BlockPairs
from engine.requests import Request
from engine.step_outputs import StepOutputs

IN_FLIGHT = -1
"""Stands for an input id that is still on the device: the last token sampled in the row's slot."""


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's part in a step: positions ``start`` … ``start + count - 1`` are computed; ``samples`` if its next
    token is chosen from the last of them."""

    request: Request
    start: int
    count: int
    samples: bool

    @property
    def is_decode(self) -> bool:
        """Whether all it computes is the newest generated token."""
        return self.count == 1 and self.start >= self.request.num_prompt


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of a step, those that compute one token first. Iterating gives them as `ScheduledRow`.

    Attributes:
        requests: by row.
        slots, tenancies: [rows] int64, the requests' slots and stays there when the step was planned.
        pages: [rows] int64, pages of their block tables.
        starts, counts: [rows] int64, first position to compute and how many.
        samples: [rows] bool, whether the next token is chosen.
        ids: [rows] int64, the token at ``starts``, `IN_FLIGHT` where the device knows better; only meant for the rows
            of one token.
        num_single: rows of one token.
        num_decode: those of them whose token was generated.
    """

    requests: list[Request]
    slots: np.ndarray
    tenancies: np.ndarray
    pages: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    ids: np.ndarray
    num_single: int
    num_decode: int

    @classmethod
    def none(cls) -> StepRows:
        """No rows."""
        return _NO_ROWS

    @classmethod
    def of(cls, rows: Iterable[ScheduledRow]) -> StepRows:
        """Rows of running requests."""
        rows = sorted(rows, key=lambda row: row.count > 1)
        requests = [row.request for row in rows]
        ids = []
        for row in rows:
            tokens = row.request.tokens
            ids.append(tokens[row.start] if row.start < len(tokens) else IN_FLIGHT)
        return cls(
            requests,
            _ints(request.slot for request in requests),
            _ints(request.tenancy for request in requests),
            _ints(len(request.tables[0]) for request in requests),
            _ints(row.start for row in rows),
            _ints(row.count for row in rows),
            np.array([row.samples for row in rows], dtype=bool),
            _ints(ids),
            sum(row.count == 1 for row in rows),
            sum(row.is_decode for row in rows),
        )

    def followed_by(self, others: StepRows) -> StepRows:
        """Rows of one token with others behind them."""
        return StepRows(
            self.requests + others.requests,
            np.concatenate((self.slots, others.slots)),
            np.concatenate((self.tenancies, others.tenancies)),
            np.concatenate((self.pages, others.pages)),
            np.concatenate((self.starts, others.starts)),
            np.concatenate((self.counts, others.counts)),
            np.concatenate((self.samples, others.samples)),
            np.concatenate((self.ids, others.ids)),
            self.num_single + others.num_single,
            self.num_decode + others.num_decode,
        )

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, row: int) -> ScheduledRow:
        return ScheduledRow(self.requests[row], int(self.starts[row]), int(self.counts[row]), bool(self.samples[row]))

    def __iter__(self) -> Iterator[ScheduledRow]:
        return map(self.__getitem__, range(len(self)))

    @property
    def ends(self) -> np.ndarray:
        """[rows] int64, the position behind the last one computed."""
        ends: np.ndarray = self.starts + self.counts
        return ends

    @property
    def prefill_pairs(self) -> int:
        """Pairs of a query and a key it sees, over the rows behind the first `num_decode`."""
        starts, counts = self.starts[self.num_decode :], self.counts[self.num_decode :]
        return int((counts * starts + counts * (counts + 1) // 2).sum())

    def sampled(self) -> StepRows:
        """The rows whose next token is chosen."""
        return self if self.samples.all() else self.pick(np.flatnonzero(self.samples))

    def pick(self, rows: np.ndarray) -> StepRows:
        """Some of the rows, in ascending order."""
        requests = [self.requests[row] for row in rows.tolist()]
        starts, counts = self.starts[rows], self.counts[rows]
        decode = (counts == 1) & (starts >= _ints(request.num_prompt for request in requests))
        return StepRows(
            requests,
            self.slots[rows],
            self.tenancies[rows],
            self.pages[rows],
            starts,
            counts,
            self.samples[rows],
            self.ids[rows],
            int((counts == 1).sum()),
            int(decode.sum()),
        )


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


_NO_ROWS = StepRows.of(())


@dataclass(slots=True)
class StepPlan:
    """What one forward pass computes, and what was decided on the way.

    Attributes:
        num_allocated_blocks, num_evicted_blocks: blocks given out, and those of them whose cached prefix was given up.
        admitted: requests that left the queue for the first time.
        prefilled: requests whose known tokens are all computed by it, so that they decode from here on.
        copies: (from, to) blocks to copy once the step is computed.
        offloads: (device block, host block) to copy before the step is computed, also if it has no rows.
        restores: (host block, device block) to copy after those, and before the step is computed.
        num_offloaded, num_restored: requests that these belong to.
        offloaded_tokens: computed positions that left the device.
        forked: children that took over their parent's blocks.
        prefix_query_tokens, prefix_hit_tokens: of the requests that left the queue, known tokens and how many of them
            the prefix cache held.
    """

    rows: StepRows = field(default_factory=StepRows.none)
    num_preempted: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_available_blocks: int = 0
    num_allocated_blocks: int = 0
    num_evicted_blocks: int = 0
    admission_held: bool = False
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    admitted: list[Request] = field(default_factory=list)
    prefilled: list[Request] = field(default_factory=list)
    copies: BlockPairs = field(default_factory=list)
    forked: list[Request] = field(default_factory=list)
    offloads: BlockPairs = field(default_factory=list)
    restores: BlockPairs = field(default_factory=list)
    num_offloaded: int = 0
    num_restored: int = 0
    offloaded_tokens: int = 0

    @property
    def num_forked(self) -> int:
        return len(self.forked)


@dataclass(slots=True)
class Collected:
    """What the tokens of a step changed. The requests named here still run, or wait: the caller ends them.

    Attributes:
        ended: requests that came to their end.
        failed: requests whose own rules for stopping raised, and what. It concerns nobody else.
        heard: what there is to hand over of requests that ran when the tokens came.
        late: requests with something to hand over that did not, because they had been preempted.
    """

    ended: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    heard: StepOutputs = field(default_factory=StepOutputs.none)
    late: list[Request] = field(default_factory=list)

    def asks(self, request: Request) -> bool:
        """Ask a request whether its newest token was its last one, and note it if so."""
        try:
            ends = request.comes_to_its_end()
        except Exception as error:
            self.failed.append((request, error))
            return True
        if ends:
            self.ended.append(request)
        return ends
