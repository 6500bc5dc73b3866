"""Drive a scheduler to the end without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engine.cache import TRASH_BLOCK, CacheLayout, PagedCache
from engine.requests import Request, RequestStatus
from engine.scheduler import SCHEDULERS, Scheduler, SchedulerLimits, StepPlan

Content = tuple[int, tuple[int, ...]]


def next_token(tokens: Sequence[int]) -> int:
    """A model in one line: the next token depends on all before it."""
    return (7 * sum(tokens) + len(tokens)) % 5


class Driver:
    """Plays the loop's part around a scheduler and checks, token by token, that attention would see the right keys.

    The cache's memory is modelled as what was written last at each place: the layer group and the ids up to and
    including that position (on which its keys depend).

    Args:
        windows: by layer, sliding window or None.
        depth: steps launched ahead of the one collected (1 = async batching).
    """

    def __init__(
        self,
        policy: str = "fifo",
        windows: Sequence[int | None] = (None, None),
        page_size: int = 4,
        num_blocks: int = 16,
        max_batch_tokens: int = 16,
        max_requests: int = 8,
        safety_margin: float = 0.0,
        share: bool = True,
        depth: int = 0,
        num_host_blocks: int = 0,
    ) -> None:
        self.cache = PagedCache(CacheLayout.build(windows, page_size, 2, 8, 4), num_blocks, share)
        self.limits = SchedulerLimits(max_batch_tokens, max_requests, safety_margin)
        self.scheduler: Scheduler = SCHEDULERS[policy](self.cache, self.limits, num_host_blocks)
        self.depth = depth
        self.plans: list[StepPlan] = []
        self.counts: list[dict[str, int]] = []
        self.finished: list[str] = []
        self.heard: list[tuple[str, int]] = []  # whose consumers were told, and of how many tokens
        self._launched: deque[StepPlan] = deque()
        self._memory: dict[tuple[int, int], Content] = {}
        self._host: dict[tuple[int, int], Content] = {}
        self._sequences: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        tokens = list(request.tokens)
        while len(tokens) < request.num_prompt + request.max_new_tokens:
            tokens.append(next_token(tokens))
        for member in (request, *request.children):
            self._sequences[member.request_id] = tokens
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        if not request.is_over:
            self.scheduler.remove(request)
            request.end(RequestStatus.CANCELLED)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        _copy(self._memory, self._host, plan.offloads, self.cache.layout.page_size)
        _copy(self._host, self._memory, plan.restores, self.cache.layout.page_size)
        if plan.rows:
            self._execute(plan)
            self._launched.append(plan)
            self.plans.append(plan)
            self.counts.append({row.request.request_id: row.count for row in plan.rows})
        if self._launched and (len(self._launched) > self.depth or not plan.rows):
            self._collect(self._launched.popleft())
        else:
            assert plan.rows or not self.scheduler.has_work, "requests are left and none of them can run"
        self.scheduler.check()
        return plan

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self._launched:
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def _execute(self, plan: StepPlan) -> None:
        page = self.cache.layout.page_size
        for row in plan.rows:
            request, end = row.request, row.start + row.count
            ids = self._sequences[request.request_id]
            assert end <= len(ids) - 1, "the last token is never fed back"
            for group, table in enumerate(request.tables):
                for position in range(row.start, end):
                    block = table[position // page]
                    assert block != TRASH_BLOCK
                    self._memory[block, position % page] = (group, tuple(ids[: position + 1]))
        for row in plan.rows:
            request, end = row.request, row.start + row.count
            ids = self._sequences[request.request_id]
            for group, table in enumerate(request.tables):
                window = self.cache.layout.groups[group].window
                first = 0 if window is None else max(0, row.start - window + 1)
                for position in range(first, end):
                    seen = self._memory[table[position // page], position % page]
                    assert seen == (group, tuple(ids[: position + 1])), "keys of another sequence, or overwritten"
        _copy(self._memory, self._memory, plan.copies, page)

    def _collect(self, plan: StepPlan) -> None:
        rows = plan.rows.sampled()
        # What is on its way for a request that is over may lie behind its last token: any id will do.
        padded = [(self._sequences[r.request_id] + [0], len(r.tokens)) for r in rows.requests]
        tokens = np.array([ids[known] for ids, known in padded], dtype=np.int64)
        collected = self.scheduler.collect(rows, tokens, now=float(len(self.plans)))
        for request in collected.ended:
            self.scheduler.remove(request)
            request.end(RequestStatus.FINISHED)
            self.finished.append(request.request_id)
        self.heard += [(r.request_id, len(r.tokens) - r.num_prompt) for r in collected.late]
        self.heard += [(o.request_id, o.num_generated) for o in collected.heard]


def _copy(
    source: dict[tuple[int, int], Content],
    target: dict[tuple[int, int], Content],
    blocks: Sequence[tuple[int, int]],
    page: int,
) -> None:
    for origin, copy in blocks:
        for offset in range(page):
            target.pop((copy, offset), None)
            if (origin, offset) in source:
                target[copy, offset] = source[origin, offset]


@pytest.fixture
def driver() -> Callable[..., Driver]:
    return Driver
