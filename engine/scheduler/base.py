"""Who computes how many tokens in the next step.

Pure Python over requests and block accounting: no torch, no clock. The engine's loop and the simulator drive this very
class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar

from engine.cache import BlockPairs, HostBlocks, PagedCache
from engine.requests import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets of one step.

    Attributes:
        max_batch_tokens: query tokens of one forward pass.
        max_requests: requests running at once (each needs a slot and a row of logits).
        safety_margin: no prefill goes on while less than this share of the blocks is available and something decodes.
    """

    max_batch_tokens: int
    max_requests: int
    safety_margin: float


@dataclass(slots=True)
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


@dataclass(slots=True)
class StepPlan:
    """What one forward pass computes, and what was decided on the way.

    Attributes:
        num_allocated_blocks, num_evicted_blocks: blocks given out, and those of them whose cached prefix was given up.
        admitted: requests that left the queue for the first time.
        copies: (from, to) blocks to copy once the step is computed.
        offloads: (device block, host block) to copy before the step is computed, also if it has no rows.
        restores: (host block, device block) to copy after those, and before the step is computed.
        num_offloaded, num_restored: requests that these belong to.
        offloaded_tokens: computed positions that left the device.
        forked: children that took over their parent's blocks.
        prefix_query_tokens, prefix_hit_tokens: of the requests that left the queue, known tokens and how many of them
            the prefix cache held.
    """

    rows: list[ScheduledRow]
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


class Phase(Enum):
    """The three kinds of work a step is filled with; a policy is an order of them."""

    DECODE = auto()
    PREFILL = auto()
    ADMIT = auto()


class Scheduler:
    """Fills steps by letting each request's computed tokens chase its known tokens.

    A policy is a subclass that names the order of the phases. Within a phase requests go in order of arrival. When
    blocks run out, the youngest running request is preempted: its blocks are released and it returns to the head of the
    queue. If the host has room for them they are copied there and back later; if not, it is computed again (but for
    what the prefix cache still holds).

    A running request never loses its place to a younger one, and the oldest can always take what it needs, so every
    request that fits the pool alone finishes.
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
        self._num_held = 0  # children that wait for their parent
        self._free_slots = list(range(limits.max_requests - 1, -1, -1))
        # State of the step being planned:
        self._rows: dict[str, ScheduledRow] = {}
        self._budget = 0
        self._plan = StepPlan([])
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
        self._rows, self._budget, self._plan = {}, max_tokens or self.limits.max_batch_tokens, StepPlan([])
        self._restored = {}
        allocations, evictions = self.cache.pool.allocations, self.cache.pool.evictions
        for phase in self.phases:
            if phase is not Phase.ADMIT:
                self._continue_running(phase is Phase.DECODE, only)
            elif only is None:
                self._admit()
        plan = self._plan
        for request_id, pairs in self._restored.items():
            plan.restores += pairs
            plan.num_restored += 1
            self.host.release(self.running[request_id])
        for row in self._rows.values():
            request = row.request
            request.num_computed += row.count
            row.samples = request.num_computed == request.num_tokens
            if row.samples:
                request.num_in_flight += 1
                request.status = RequestStatus.DECODING
                if request.children:
                    self._fork(request)
            plan.rows.append(row)
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
        for row in plan.rows:
            request = row.request
            request.num_computed -= row.count
            if row.samples:
                request.num_in_flight -= 1
                if not row.is_decode:
                    request.status = RequestStatus.PREFILLING

    def _continue_running(self, decoding: bool, only: Collection[str] | None) -> None:
        for request in list(self.running.values()):
            if self._budget == 0:
                return
            if only is not None and request.request_id not in only:
                continue
            if (request.status is RequestStatus.DECODING) is not decoding:
                continue
            if request.request_id not in self.running:  # preempted by an older one a moment ago
                continue
            needs = min(request.needs, self._budget)
            if needs == 0 or (not decoding and self._margin_holds()):
                continue
            if self._make_room(request, request.num_computed + needs):
                self._take(request, needs)

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
            request.slot = self._free_slots.pop()
            request.num_computed = start
            request.status = RequestStatus.PREFILLING
            if kept:
                self._restored[request.request_id] = restores
            elif self.cache.share_prefixes:
                self._plan.prefix_query_tokens += request.num_tokens
                self._plan.prefix_hit_tokens += cached
            if request.preemptions == 0:
                request.cached_tokens = cached
                self._plan.admitted.append(request)
            else:
                request.recomputed_tokens += max(0, request.num_lost - start)
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
            child.slot = self._free_slots.pop()
            child.num_computed = child.cached_tokens = parent.num_prompt - 1
            child.status = RequestStatus.DECODING
            self._plan.admitted.append(child)
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
        self._rows[request.request_id] = ScheduledRow(request, request.num_computed, count, False)
        self._budget -= count

    def _margin_holds(self) -> bool:
        """Whether the safety margin stops prefills now. Never when nothing decodes: then waiting would not help."""
        if self.cache.free_fraction >= self.limits.safety_margin:
            return False
        if not any(r.status is RequestStatus.DECODING for r in self.running.values()):
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
        return True

    def _preempt(self, request: Request) -> None:
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self._budget += row.count
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
        for request in self.waiting.values():
            self.host.release(request)
            request.num_computed = 0

    def _vacate(self, request: Request) -> None:
        self.cache.close(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def check(self) -> None:
        """Raise RuntimeError if blocks, slots or counters are inconsistent."""
        self.cache.check(self.running.values())
        slots = [r.slot for r in self.running.values()] + self._free_slots
        if sorted(slots) != list(range(self.limits.max_requests)):
            raise RuntimeError("slots are lost or shared")
        for request in self.running.values():
            if not 0 <= request.num_computed <= request.num_tokens or request.num_in_flight < 0:
                raise RuntimeError(f"request {request.request_id!r} has impossible counters")
        self.host.check(self.waiting.values())
        for request in self.waiting.values():
            if request.num_computed != self.host.kept_tokens(request):
                raise RuntimeError(f"waiting request {request.request_id!r} counts positions that nobody keeps")
            if request.tables or request.slot != -1 or request.parent is not None:
                raise RuntimeError(f"waiting request {request.request_id!r} still holds blocks or a slot")
