"""The running requests as arrays by slot.

In most rows of most steps nothing happens but the next token. What is done to those is done to all of them at once, on
these arrays; a request's own Python is run only where something more happens: a new page, a page to offer to the prefix
cache, a possible end. Numpy, no torch: the simulator runs it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np

from engine.requests import Request, RequestStatus
from engine.sampling.logprobs import TopTokens
from engine.scheduler.plan import IN_FLIGHT, StepRows
from engine.slot_counters import SlotCounters
from engine.step_outputs import StepOutputs

EOS_WIDTH = 4
"""EOS ids of a request that are looked for in arrays. One with more is asked itself after each token."""

NEVER = np.iinfo(np.int64).max


class RunningSlots(SlotCounters):
    """Counters, stop rules and table sizes of the running requests. While a request runs its counters are here and
    nowhere else: `Request.num_computed` and `Request.num_in_flight` read and write them.

    Args:
        max_requests: slots.

    Attributes:
        owners: the request in each slot.
        order: slots of the running requests, in the order in which they were admitted.
        tenancy, num_computed, num_in_flight: see `SlotCounters`.
        num_prompt, num_known: tokens of the prompt, and all that are on the host.
        limit: tokens at which it ends.
        newest: the last token on the host.
        decoding: whether it has sampled all it knows, or has that on its way (`RequestStatus.DECODING`).
        pages: pages of its block tables.
        settled_until: a token computed before this position leaves the block tables as they are; 0 = not known.
        register_at: known and computed tokens at which the prefix cache wants to hear of the next page.
        asks: whether to ask the request after each token whether it ends.
        streaming, timed: whether it wants an output for each token, and the time of each.
        recomputed_tokens, preemptions: as in `engine.requests.Request`; both stand still while it runs.
        eos: [slots, EOS_WIDTH] ids that end it, -1 where it has fewer.
    """

    def __init__(self, max_requests: int) -> None:
        super().__init__(max_requests)
        self.owners: list[Request | None] = [None] * max_requests
        self.order = np.empty(0, dtype=np.int64)
        self.num_prompt = np.zeros(max_requests, dtype=np.int64)
        self.num_known = np.zeros(max_requests, dtype=np.int64)
        self.limit = np.zeros(max_requests, dtype=np.int64)
        self.newest = np.zeros(max_requests, dtype=np.int64)
        self.decoding = np.zeros(max_requests, dtype=bool)
        self.pages = np.zeros(max_requests, dtype=np.int64)
        self.settled_until = np.zeros(max_requests, dtype=np.int64)
        self.register_at = np.full(max_requests, NEVER)
        self.asks = np.zeros(max_requests, dtype=bool)
        self.streaming = np.zeros(max_requests, dtype=bool)
        self.timed = np.zeros(max_requests, dtype=bool)
        self.recomputed_tokens = np.zeros(max_requests, dtype=np.int64)
        self.preemptions = np.zeros(max_requests, dtype=np.int64)
        self.eos = np.full((max_requests, EOS_WIDTH), -1, dtype=np.int64)
        self._free = list(range(max_requests - 1, -1, -1))
        self._stays = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def occupy(self, request: Request) -> None:
        """Give a request with block tables a slot; there is a free one."""
        slot = self._free.pop()
        self._stays += 1
        self.owners[slot] = request
        self.order = np.append(self.order, slot)
        self.tenancy[slot] = self._stays
        self.num_computed[slot], self.num_in_flight[slot] = request.num_computed, request.num_in_flight
        self.num_known[slot], self.newest[slot] = len(request.tokens), request.tokens[-1]
        self.decoding[slot] = request.status is RequestStatus.DECODING
        self.pages[slot], self.settled_until[slot], self.register_at[slot] = len(request.tables[0]), 0, NEVER
        for name, value in _standing(request).items():
            getattr(self, name)[slot] = value
        request.slot, request.slots = slot, self

    def vacate(self, request: Request) -> None:
        """Take a request's slot back; its counters are its own again."""
        slot, computed, in_flight = request.slot, request.num_computed, request.num_in_flight
        self.owners[slot] = None
        self.order = self.order[self.order != slot]
        self.tenancy[slot] = 0
        self.decoding[slot] = False
        self._free.append(slot)
        request.slot, request.slots = -1, None
        request.num_computed, request.num_in_flight = computed, in_flight

    def set_status(self, request: Request, status: RequestStatus) -> None:
        """Let a running request enter a state."""
        request.status = status
        self.decoding[request.slot] = status is RequestStatus.DECODING

    def note_tables(self, request: Request, settled_until: int) -> None:
        """Take over the size of a running request's block tables."""
        self.pages[request.slot] = len(request.tables[0])
        self.settled_until[request.slot] = settled_until

    def note_registered(self, request: Request, page_size: int) -> None:
        """Take over how many of a running request's pages the prefix cache has heard of."""
        self.register_at[request.slot] = min((request.num_registered + 1) * page_size, NEVER)

    def ready(self) -> np.ndarray:
        """Slots whose newest token waits to be computed and may be followed by another, oldest owner first."""
        known = self.num_known + self.num_in_flight
        ready = self.decoding & (self.num_computed < known) & (known < self.limit)
        return self.order[ready[self.order]]

    def requests(self, slots: np.ndarray) -> list[Request]:
        """Owners of occupied slots."""
        owners: list[Any] = self.owners
        return list(map(owners.__getitem__, slots.tolist()))

    def prefilling(self) -> list[Request]:
        """Running requests that do not decode yet, oldest first."""
        return self.requests(self.order[~self.decoding[self.order]])

    def compute_newest(self, slots: np.ndarray) -> StepRows:
        """Rows in which occupied slots compute their newest token and sample the next; the counters run ahead to it."""
        starts = self.num_computed[slots]
        ids = np.where(self.num_in_flight[slots] > 0, IN_FLIGHT, self.newest[slots])
        self.num_computed[slots] += 1
        self.num_in_flight[slots] += 1
        requests = self.requests(slots)
        count = len(requests)
        generated = starts >= self.num_prompt[slots]
        num_decode = int(generated.sum())
        if num_decode < count:  # sequences that share a prompt compute its last token themselves
            for request in compress(requests, (~generated).tolist()):
                request.prefill_steps += 1
        return StepRows(
            requests,
            slots,
            self.tenancy[slots],
            self.pages[slots],
            starts,
            np.ones(count, dtype=np.int64),
            np.ones(count, dtype=bool),
            ids,
            count,
            num_decode,
        )

    def append(
        self,
        rows: StepRows,
        tokens: np.ndarray,
        now: float,
        logprobs: Sequence[float] | None,
        tops: Sequence[TopTokens | None] | None,
    ) -> np.ndarray:
        """`Request.append` for rows of requests that run; returns by row whether the request may have come to its
        end."""
        slots = rows.slots
        for request, token in zip(rows.requests, tokens.tolist(), strict=True):
            request.tokens.append(token)
        if logprobs is not None:
            for request, logprob in zip(rows.requests, logprobs, strict=True):
                request.logprobs.append(logprob)
        if tops is not None:
            for request, top in zip(rows.requests, tops, strict=True):
                if top is not None:
                    request.top_logprobs.append(top)
        for request in compress(rows.requests, self.timed[slots].tolist()):
            assert request.timestamps is not None
            request.timestamps.append(now)
        known = self.num_known[slots] + 1
        self.num_known[slots] = known
        self.num_in_flight[slots] -= 1
        self.newest[slots] = tokens
        stops = (self.eos[slots] == tokens[:, None]).any(axis=1)
        ends: np.ndarray = stops | (known >= self.limit[slots]) | self.asks[slots]
        return ends

    def outputs(self, rows: StepRows, over: np.ndarray) -> StepOutputs:
        """What consumers are told of rows of requests that run, after their tokens were appended.

        Args:
            rows: the rows.
            over: [rows] bool, which of the requests came to their end; they are told whether or not they stream.
        """
        told = self.streaming[rows.slots] | over
        requests, slots = rows.requests, rows.slots
        if not told.all():
            heard = np.flatnonzero(told)
            if not len(heard):
                return StepOutputs.none()
            requests, slots, over = [requests[row] for row in heard.tolist()], slots[heard], over[heard]
        return StepOutputs(
            requests, self.num_known[slots], self.recomputed_tokens[slots], self.preemptions[slots], over
        )

    def to_register(self, slots: np.ndarray) -> np.ndarray:
        """Places in ``slots`` whose owners have a full page that the prefix cache has not heard of."""
        full = np.minimum(self.num_computed[slots], self.num_known[slots])
        return np.flatnonzero(full >= self.register_at[slots])

    def check(self, running: list[Request]) -> None:
        """Raise RuntimeError if slots are lost or shared, or if an array disagrees with a request."""
        slots = [request.slot for request in running]
        if sorted(slots + self._free) != list(range(len(self.owners))):
            raise RuntimeError("slots are lost or shared")
        if slots != self.order.tolist() or any(self.owners[r.slot] is not r or r.slots is not self for r in running):
            raise RuntimeError("slots are not their owners', or not in the order of admission")
        if self.tenancy[self._free].any() or self.decoding[self._free].any():
            raise RuntimeError("an empty slot counts as taken")
        if not running:
            return
        expected: dict[str, list[Any]] = {
            "num_known": [len(request.tokens) for request in running],
            "newest": [request.tokens[-1] for request in running],
            "decoding": [request.status is RequestStatus.DECODING for request in running],
            "pages": [len(request.tables[-1]) for request in running],
        }
        standing = [_standing(request) for request in running]
        expected.update({name: [values[name] for values in standing] for name in standing[0]})
        for name, values in expected.items():
            wrong = np.flatnonzero((getattr(self, name)[slots] != np.array(values)).reshape(len(running), -1).any(1))
            if len(wrong):
                raise RuntimeError(f"{name} of request {running[wrong[0]].request_id!r} is not what its slot says")


def _standing(request: Request) -> dict[str, Any]:
    """What of a request does not change while it runs, by array."""
    eos = sorted(request.eos_token_ids)[:EOS_WIDTH]
    return {
        "num_prompt": request.num_prompt,
        "limit": request.num_prompt + request.max_new_tokens,
        "asks": bool(request.sampling.stop_sequences) or len(request.eos_token_ids) > EOS_WIDTH,
        "streaming": request.streaming,
        "timed": request.timestamps is not None,
        "recomputed_tokens": request.recomputed_tokens,
        "preemptions": request.preemptions,
        "eos": eos + [-1] * (EOS_WIDTH - len(eos)),
    }
