"""One simulated engine: the engine's loop turn by turn, with a clock that is told how long things take.

The turns are those of :class:`engine.core.EngineCore`: take requests in, plan a step, launch it, collect the step
before it (or this one, without async batching), hand tokens over. Who computes what is decided by the engine's own
scheduler and cache; only the forward pass and the tokens' values are missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.requests import Request, RequestStatus
from engine.sampling.params import SamplingParams
from engine.scheduler import StepPlan, StepRows
from harness.record import Outcome
from harness.simulate.leap import leap
from harness.simulate.setup import EngineSetup, step_shape
from harness.simulate.step_log import StepLog
from harness.simulate.step_time import Cost, Kind, Spread, StepTimeModel, Work
from workloads.workload import ScheduledRequest

_GREEDY = SamplingParams()
_NO_EOS: frozenset[int] = frozenset()


@dataclass(slots=True)
class Served:
    """What became of a request; times in s on the virtual clock."""

    number: int
    request: Request
    sent_s: float
    admitted_s: float | None = None
    ended_s: float | None = None
    outcome: Outcome = Outcome.UNFINISHED
    error: str | None = None


@dataclass(slots=True)
class Launched:
    """A step that was launched and not collected yet."""

    rows: StepRows
    numbers: np.ndarray
    started_s: float
    ready_s: float
    log: list[float]


class Replica:
    """A simulated engine that serves requests sent to it.

    Args:
        setup: its settings.
        model: how long its steps take.
        rng: draws what the model does not explain; None = every step takes its expected time.
        leap: pass over equal decode steps at once (the result is the same, see :mod:`harness.simulate.leap`).

    Attributes:
        now_s: its clock.
        served: by number, what became of each request sent to it.
        ended: numbers of the requests that ended, in order.
    """

    def __init__(
        self,
        setup: EngineSetup,
        model: StepTimeModel,
        rng: np.random.Generator | None = None,
        leap: bool = True,
    ) -> None:
        self.setup, self.model, self.scheduler = setup, model, setup.scheduler()
        self.now_s = 0.0
        self.log = StepLog()
        self.served: dict[int, Served] = {}
        self.ended: list[int] = []
        self.launched: deque[Launched] = deque()
        self.depth = 1 if setup.overlapped else 0
        self.inbox: deque[Served] = deque()
        self.free_s = 0.0  # when the device has nothing left to do
        self.buckets = setup.buckets()
        self.spread = Spread(rng)
        self._by_id: dict[str, Served] = {}
        self._leaps = leap
        costs = [*model.host.values(), *model.device.values(), model.between]
        self.means = {cost: cost.mean_ratio for cost in costs}
        self.largest = model.largest()
        self.preemptions = self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self.token_numbers: list[np.ndarray] = []
        self.token_times: list[np.ndarray] = []

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_work or self.launched or self.inbox)

    @property
    def outstanding(self) -> int:
        """Requests sent to it that have not ended."""
        return len(self._by_id)

    def send(self, number: int, wanted: ScheduledRequest, at_s: float, output_tokens: int | None = None) -> None:
        """A client sends a request; the loop takes it in at its next turn.

        Args:
            number: of the request, unique here.
            output_tokens: tokens until its end; None = its cap.
        """
        tokens = wanted.max_new_tokens if output_tokens is None else output_tokens
        request = Request.create(wanted.request_id, wanted.prompt_ids, tokens, _NO_EOS, _GREEDY)
        served = self.served[number] = Served(number, request, at_s)
        need = self.setup.layout.blocks_needed(request.max_tokens, self.setup.max_batch_tokens)
        if need > self.setup.num_blocks:
            served.ended_s, served.outcome = at_s, Outcome.REJECTED
            served.error = f"needs {need} KV blocks, the cache has {self.setup.num_blocks}"
            self.ended.append(number)
            return
        self.inbox.append(served)
        self._by_id[request.request_id] = served

    def advance(self, until_s: float) -> None:
        """Run every turn that begins before ``until_s``."""
        while self.has_work and self.now_s < until_s:
            self.turn(until_s)

    def turn(self, until_s: float) -> None:
        """One turn of the loop, or several equal ones."""
        if not self.scheduler.has_work and not self.launched:
            self.now_s = max(self.now_s, self.inbox[0].sent_s)
        while self.inbox and self.inbox[0].sent_s <= self.now_s:
            self.scheduler.add(self.inbox.popleft().request)
        if self._leaps and not self.inbox and leap(self, until_s):
            return
        started = self.now_s
        plan = self.scheduler.schedule()
        self._note(plan)
        if plan.rows:
            self._launch(plan, started)
        if self.launched and (len(self.launched) > self.depth or not plan.rows):
            self._collect(self.launched.popleft())
        elif not plan.rows and self.scheduler.has_work:
            raise RuntimeError("the scheduler has requests but can run none of them")
        self.now_s += self.ms(self.model.between, Work(0, len(plan.rows), 0, 0)) / 1000

    def ms(self, cost: Cost, work: Work) -> float:
        """Time of a part of a step, spread included."""
        return cost.fitted_ms(work) * self.spread.draw(cost, self.means[cost])

    def beyond(self, kind: Kind, work: Work) -> bool:
        """Whether a step is larger than any of its kind that was measured."""
        tokens, rows, keys = self.largest[kind]
        return work.tokens > tokens or work.rows > rows or work.keys > keys

    def numbers_of(self, requests: Sequence[Request]) -> np.ndarray:
        """[requests] the numbers they were sent with."""
        return np.array([self._by_id[r.request_id].number for r in requests], dtype=np.int64)

    def kind_of(self, rows: StepRows) -> tuple[Kind, int, int]:
        """Kind of a step, query tokens it is padded by, and pages of its block tables."""
        shape = step_shape(rows, len(self.setup.layout.groups))
        bucket = None if self.buckets is None else self.buckets.find(shape)
        prefill = rows.num_decode < len(rows)
        if bucket is None:
            return Kind(prefill, False), 0, shape.width
        return Kind(prefill, True), bucket.tokens - shape.tokens, bucket.width

    def _note(self, plan: StepPlan) -> None:
        self.preemptions += plan.num_preempted
        self.prefix_query_tokens += plan.prefix_query_tokens
        self.prefix_hit_tokens += plan.prefix_hit_tokens
        for request in plan.admitted:
            self._by_id[request.request_id].admitted_s = self.now_s

    def _launch(self, plan: StepPlan, started: float) -> None:
        rows, page = plan.rows, self.setup.layout.page_size
        kind, padded, width = self.kind_of(rows)
        ends, tokens = rows.ends, int(rows.counts.sum())
        work = Work(tokens + padded, len(rows), int(ends.sum()), rows.prefill_pairs if kind.prefill else 0)
        known = self.model.kind_for(kind)
        host_ms = self.ms(self.model.host[known], work)
        self.now_s += host_ms / 1000
        device_ms = self.ms(self.model.device[known], work)
        done_ms = self.model.done_ms(known, 1000 * self.free_s, 1000 * started, 1000 * self.now_s, device_ms)
        self.free_s = done_ms / 1000
        log = [
            started,
            kind.prefill,
            rows.num_decode,
            len(rows) - rows.num_decode,
            tokens - rows.num_decode,
            padded,
            width,
            work.keys,
            work.pairs,
            plan.num_running,
            plan.num_waiting,
            plan.num_available_blocks,
            plan.num_allocated_blocks,
            plan.num_evicted_blocks,
            int((-ends % page).sum()) * len(self.setup.layout.groups),
            plan.num_preempted,
            plan.admission_held,
            kind.graph,
            host_ms,
            plan.num_offloaded,
            plan.num_restored,
            self.beyond(known, work),
        ]
        sampled = rows.sampled()
        self.launched.append(Launched(sampled, self.numbers_of(sampled.requests), started, self.free_s, log))

    def _collect(self, step: Launched) -> None:
        self.now_s = max(self.now_s, step.ready_s)
        collected = self.scheduler.collect(step.rows, np.zeros(len(step.rows), dtype=np.int64), self.now_s)
        self.log.add([*step.log, (self.now_s - step.started_s) * 1000])
        self.token_numbers.append(step.numbers)
        self.token_times.append(np.full(len(step.numbers), self.now_s))
        for request in collected.ended:
            self.scheduler.cache.register(request)
            self.scheduler.remove(request)
            request.end(RequestStatus.FINISHED)
            served = self._by_id.pop(request.request_id)
            served.ended_s, served.outcome = self.now_s, Outcome.OK_LENGTH
            self.ended.append(served.number)
