"""Who computes how many tokens in the next step.

Requests, arrays of counters and block accounting: no torch, no clock. The engine's loop and the simulator drive this
very class.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import ClassVar

import numpy as np

from engine.cache import BlockPairs, HostBlocks, PagedCache
from engine.requests import Request, RequestStatus
from engine.sampling.logprobs import TopTokens
from engine.scheduler.plan import Collected, ScheduledRow, StepPlan, StepRows
from engine.scheduler.policy import Phase, SchedulerLimits
from engine.scheduler.slots import NEVER, RunningSlots

_NO_SLOTS = np.empty(0, dtype=np.int64)


class Scheduler:
    """Fills steps by letting each request's computed tokens chase its known tokens.

    A policy is a subclass that names the order of the phases. Within a phase requests go in order of arrival. When
    blocks run out, the youngest running request is preempted: its blocks are released and it returns to the head of the
    queue. If the host has room for them they are copied there and back later; if not, it is computed again (but for
    what the prefix cache still holds).

    A running request never loses its place to a younger one, and the oldest can always take what it needs, so every
    request that fits the pool alone finishes.

    Args:
        cache: the blocks that requests are given.
        limits: budgets of a step.
        num_host_blocks: room on the host for the blocks of preempted requests; 0 = they are computed again.

    Attributes:
        phases: what a step is filled with, in this order.
        default_safety_margin: `SchedulerLimits.safety_margin` where the user leaves it open.
        waiting, running: requests by id, in the order in which they go.
        slots: counters of the running ones.
        host: host blocks, and who has them.
        preemptions: so far.
    """

    phases: ClassVar[tuple[Phase, ...]]
    default_safety_margin: ClassVar[float]

    def __init__(self, cache: PagedCache, limits: SchedulerLimits, num_host_blocks: int = 0) -> None:
        self.cache = cache
        self.host = HostBlocks(cache, num_host_blocks)
        self.limits = limits
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: OrderedDict[str, Request] = OrderedDict()
        self.preemptions = 0
        self.slots = RunningSlots(limits.max_requests)
        self._num_held = 0  # children that wait for their parent
        # State of the step being planned:
        self._decodes = _NO_SLOTS  # slots that compute their newest token
        self._chunks: dict[str, tuple[Request, int]] = {}  # prefilling requests, and how many tokens they compute
        self._budget = 0
        self._plan = StepPlan()
        self._restored: dict[str, BlockPairs] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; its children wait beside it. The caller has checked that it fits the pool alone."""
        self.waiting[request.request_id] = request
        self._num_held += len(request.children)

    def remove(self, request: Request) -> None:
        """Take out a request that is over, wherever it is; its blocks and slot are free at once."""
        if self.running.pop(request.request_id, None) is not None:
            self._vacate(request)
        elif request.parent is not None:
            request.parent.children.remove(request)
            request.parent = None
            self._num_held -= 1
        else:
            self.waiting.pop(request.request_id, None)
            self.host.release(request)
        if request.children:
            self._queue_children(self._release_children(request))

    def schedule(self, max_tokens: int | None = None, only: Collection[str] | None = None) -> StepPlan:
        """Plan one step and commit it: blocks are allocated and ``num_computed`` runs ahead to the planned positions.

        Args:
            max_tokens: a smaller token budget for this step only.
            only: ids of running requests; nobody else takes part, and nobody is admitted.

        An empty plan means that nothing can run before a launched step is collected (or that there is nothing to do).
        """
        self._decodes, self._chunks, self._restored = _NO_SLOTS, {}, {}
        self._budget, self._plan = max_tokens or self.limits.max_batch_tokens, StepPlan()
        allocations, evictions = self.cache.pool.allocations, self.cache.pool.evictions
        for phase in self.phases:
            match phase:
                case Phase.DECODE:
                    self._continue_decodes(only)
                case Phase.PREFILL:
                    self._continue_prefills(only)
                case Phase.ADMIT if only is None:
                    self._admit()
        plan = self._plan
        for request_id, pairs in self._restored.items():
            plan.restores += pairs
            plan.num_restored += 1
            self.host.release(self.running[request_id])
        plan.rows = self._commit()
        plan.num_running, plan.num_waiting = len(self.running), len(self.waiting) + self._num_held
        plan.num_available_blocks = self.cache.pool.num_available
        plan.num_allocated_blocks = self.cache.pool.allocations - allocations
        plan.num_evicted_blocks = self.cache.pool.evictions - evictions
        return plan

    def undo(self, plan: StepPlan) -> None:
        """Take back the newest plan because its step was not computed: what its rows compute is to be computed still.
        Blocks stay with their requests; children that had taken over blocks, now empty, are queued."""
        for child in plan.forked:
            del self.running[child.request_id]
            self._vacate(child)
            child.num_computed, child.status = 0, RequestStatus.PENDING
        self._queue_children(plan.forked)
        rows = plan.rows
        self.slots.num_computed[rows.slots] -= rows.counts
        self.slots.num_in_flight[rows.slots] -= rows.samples
        for row in rows:
            if not row.is_decode:
                row.request.prefill_steps -= 1
                if row.samples:
                    self.slots.set_status(row.request, RequestStatus.PREFILLING)

    def collect(
        self,
        rows: StepRows,
        tokens: np.ndarray,
        now: float,
        logprobs: Sequence[float] | None = None,
        tops: Sequence[TopTokens | None] | None = None,
    ) -> Collected:
        """Give the requests the tokens that a step has chosen, and offer pages that they fill to the prefix cache.

        Args:
            rows: the step's sampled rows.
            tokens: [rows] ids.
            now: seconds, for the requests that note when their tokens come.
            logprobs, tops: by row, log probabilities and most likely tokens; None if nobody asked.
        """
        stays = self.slots.tenancy[rows.slots] == rows.tenancies
        collected = Collected()
        if not stays.all():  # some do not run any more: they are over, or were preempted and wait for this token
            for row in np.flatnonzero(~stays).tolist():
                request = rows.requests[row]
                request.num_in_flight -= 1
                if request.is_over:  # a wasted row, never an extra token
                    continue
                logprob, top = None if logprobs is None else logprobs[row], None if tops is None else tops[row]
                request.append(int(tokens[row]), now, logprob, top)
                if collected.asks(request) or request.streaming:
                    collected.late.append(request)
            kept = np.flatnonzero(stays)
            rows, tokens = rows.pick(kept), tokens[kept]
            logprobs = None if logprobs is None else [logprobs[row] for row in kept.tolist()]
            tops = None if tops is None else [tops[row] for row in kept.tolist()]
        over = np.zeros(len(rows), dtype=bool)
        for row in np.flatnonzero(self.slots.append(rows, tokens, now, logprobs, tops)).tolist():
            over[row] = collected.asks(rows.requests[row])
        for row in self.slots.to_register(rows.slots).tolist():
            self.cache.register(rows.requests[row])
            self._note_registered(rows.requests[row])
        collected.heard = self.slots.outputs(rows, over)
        return collected

    def _continue_decodes(self, only: Collection[str] | None) -> None:
        ready = self.slots.ready()
        if only is not None:
            ready = ready[[request.request_id in only for request in self.slots.requests(ready)]]
        while len(ready) and self._budget:
            rows, ready = ready[: self._budget], ready[self._budget :]
            preemptions = self.preemptions
            begin = self.slots.num_computed[rows] >= self.slots.settled_until[rows]
            for slot in rows[begin].tolist():
                request = self.slots.owners[slot]
                if request is not None:  # not preempted by an older one a moment ago
                    self._make_room(request, request.num_computed + 1)
            if self.preemptions > preemptions:
                rows, ready = rows[self.slots.decoding[rows]], ready[self.slots.decoding[ready]]
            self._decodes = np.concatenate((self._decodes, rows))
            self._budget -= len(rows)

    def _continue_prefills(self, only: Collection[str] | None) -> None:
        for request in self.slots.prefilling():
            if self._budget == 0:
                return
            if only is not None and request.request_id not in only:
                continue
            if request.request_id not in self.running:  # preempted by an older one a moment ago
                continue
            needs = min(request.needs, self._budget)
            if needs == 0 or self._margin_holds():
                continue
            if self._make_room(request, request.num_computed + needs):
                self._take(request, needs)

    def _commit(self) -> StepRows:
        """Let the counters run ahead to what is planned, and put the rows in order."""
        rows = self.slots.compute_newest(self._decodes)
        chunks = [self._commit_chunk(request, count) for request, count in self._chunks.values()]
        return rows.followed_by(StepRows.of(chunks)) if chunks else rows

    def _commit_chunk(self, request: Request, count: int) -> ScheduledRow:
        start = request.num_computed
        request.num_computed = start + count
        samples = request.num_computed == request.num_tokens
        if samples:
            request.num_in_flight += 1
            self.slots.set_status(request, RequestStatus.DECODING)
            self._plan.prefilled.append(request)
            if request.children:
                self._fork(request)
        row = ScheduledRow(request, start, count, samples)
        request.prefill_steps += not row.is_decode
        return row

    def _admit(self) -> None:
        if self._plan.num_preempted:  # its blocks are for those it gave way to
            return
        while self.waiting and self._budget and len(self.running) < self.limits.max_requests:
            request = next(iter(self.waiting.values()))
            if request.num_in_flight or self._margin_holds():
                return
            cached, kept = self.cache.open(request), self.host.kept_tokens(request)
            start = max(cached, kept)
            needs = min(request.num_tokens - start, self._budget)
            # All of the prompt must find room now, not only its first chunk: a half-prefilled request that stalls
            # holds blocks and gives nothing back.
            lacking = not self.cache.has_room(request, request.num_tokens, self.limits.max_batch_tokens)
            restores = None if lacking and self.running else self.host.restore(request)
            if restores is None or not self.cache.extend(request, start + needs):
                self.cache.close(request)
                return
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
            request.num_computed = start
            request.status = RequestStatus.PREFILLING
            if request.preemptions:
                request.recomputed_tokens += max(0, request.num_lost - start)
            self._occupy(request)
            if kept:
                self._restored[request.request_id] = restores
            elif self.cache.share_prefixes:
                self._plan.prefix_query_tokens += request.num_tokens
                self._plan.prefix_hit_tokens += cached
            if request.preemptions == 0:
                request.cached_tokens = cached
                self._plan.admitted.append(request)
            self._take(request, needs)

    def _fork(self, parent: Request) -> None:
        """Let a parent's children run on its blocks, now that the step that completes its prompt is planned; those that
        find no room are queued and computed from the start, but for what the prefix cache holds."""
        children = self._release_children(parent)
        for i, child in enumerate(children):
            full = len(self.running) >= self.limits.max_requests
            copies = None
            if not (full or self._plan.num_preempted or self._margin_holds()):
                copies = self.cache.fork(parent, child)
            if copies is None:
                self._queue_children(children[i:])
                return
            self.running[child.request_id] = child
            child.num_computed = child.cached_tokens = parent.num_prompt - 1
            child.status = RequestStatus.DECODING
            self._occupy(child)
            self._plan.admitted.append(child)
            self._plan.prefilled.append(child)
            self._plan.copies += copies
            self._plan.forked.append(child)

    def _release_children(self, parent: Request) -> list[Request]:
        children, parent.children = parent.children, []
        for child in children:
            child.parent = None
        self._num_held -= len(children)
        return children

    def _queue_children(self, children: list[Request]) -> None:
        """At the head, in order: they came with their parent, before what waits now."""
        for child in reversed(children):
            self.waiting[child.request_id] = child
            self.waiting.move_to_end(child.request_id, last=False)

    def _take(self, request: Request, count: int) -> None:
        self._chunks[request.request_id] = (request, count)
        self._budget -= count

    def _margin_holds(self) -> bool:
        """Whether the safety margin stops prefills now. Never when nothing decodes: then waiting would not help."""
        if self.cache.free_fraction >= self.limits.safety_margin:
            return False
        if not self.slots.decoding.any():
            return False
        self._plan.admission_held = True
        return True

    def _make_room(self, request: Request, end: int) -> bool:
        """Extend a running request, preempting younger ones if need be; False if it had to give way itself."""
        while not self.cache.extend(request, end):
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            if victim is request:
                return False
        self.slots.note_tables(request, self.cache.settled_until(request))
        return True

    def _preempt(self, request: Request) -> None:
        _, count = self._chunks.pop(request.request_id, (None, 0))
        others = self._decodes[self._decodes != request.slot]
        self._budget += count + len(self._decodes) - len(others)
        self._decodes = others
        del self.running[request.request_id]
        request.num_lost = request.num_computed
        request.num_computed = self._keep_on_host(request)
        self._vacate(request)
        request.status = RequestStatus.PENDING
        request.preemptions += 1
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        self.preemptions += 1
        self._plan.num_preempted += 1

    def _keep_on_host(self, request: Request) -> int:
        """Offload a request that is about to lose its blocks, if the host has room; returns the positions kept. A token
        in flight does not matter: what computes it was launched before the copy, and it waits for it to be admitted."""
        if self._restored.pop(request.request_id, None) is not None:  # by this very plan: its copy is still there
            return self.host.kept_tokens(request)
        pairs = self.host.keep(request)
        if pairs is None:
            return 0
        self._plan.offloads += pairs
        self._plan.num_offloaded += 1
        self._plan.offloaded_tokens += request.num_computed
        return request.num_computed

    def forget_prefixes(self) -> None:
        """After a weight update: what was computed so far is never offered to others, and what is kept on the host is
        given up, to be computed again with the new weights."""
        self.cache.forget_prefixes(self.running.values())
        for request in self.running.values():
            self._note_registered(request)
        for request in self.waiting.values():
            self.host.release(request)
            request.num_computed = 0

    def _occupy(self, request: Request) -> None:
        """Give an opened request a slot."""
        self.slots.occupy(request)
        self._note_registered(request)

    def _note_registered(self, request: Request) -> None:
        if self.cache.share_prefixes:
            self.slots.note_registered(request, self.cache.layout.page_size)

    def _vacate(self, request: Request) -> None:
        self.cache.close(request)
        self.slots.vacate(request)

    def check(self) -> None:
        """Raise RuntimeError if blocks, slots or counters are inconsistent."""
        running = list(self.running.values())
        self.cache.check(running)
        self.slots.check(running)
        for request in running:
            if not 0 <= request.num_computed <= request.num_tokens or request.num_in_flight < 0:
                raise RuntimeError(f"request {request.request_id!r} has impossible counters")
            if request.status is RequestStatus.DECODING and request.num_tokens - request.num_computed > 1:
                raise RuntimeError(f"request {request.request_id!r} decodes and lacks more than its newest token")
            if self.slots.settled_until[request.slot] > self.cache.settled_until(request):
                raise RuntimeError(f"request {request.request_id!r} would outgrow its block tables unnoticed")
            due = request.num_registered if self.cache.share_prefixes else sys.maxsize
            if self.slots.register_at[request.slot] != min((due + 1) * self.cache.layout.page_size, NEVER):
                raise RuntimeError(f"request {request.request_id!r} would fill pages that the prefix cache misses")
        self.host.check(self.waiting.values())
        for request in self.waiting.values():
            if request.num_computed != self.host.kept_tokens(request):
                raise RuntimeError(f"waiting request {request.request_id!r} counts positions that nobody keeps")
            if request.tables or request.slot != -1 or request.parent is not None:
                raise RuntimeError(f"waiting request {request.request_id!r} still holds blocks or a slot")
