"""One simulated engine: the engine's loop turn by turn, with a clock that is told how long things take.

The turns are those of :class:`engine.core.EngineCore`: take requests in, plan a step, launch it, collect the step
before it (or this one, without async batching), hand tokens over. Who computes what is decided by the engine's own
scheduler and cache; only the forward pass and the tokens' values are missing.
"""

from __future__ import annotations

import numpy as np

from engine.requests import Request, RequestStatus
from engine.sampling.params import SamplingParams
from engine.scheduler import StepPlan
from harness.record import Outcome
from harness.simulate.leap import leap
from harness.simulate.setup import EngineSetup
from harness.simulate.state import EngineState, Launched, Served
from harness.simulate.step_time import StepTimeModel, Work
from workloads.workload import ScheduledRequest

_GREEDY = SamplingParams()
_NO_EOS: frozenset[int] = frozenset()


class Replica(EngineState):
    """A simulated engine that serves requests sent to it.

    Args:
        setup, model, rng: as of :class:`EngineState`.
        leap: pass over equal decode steps at once (the result is the same, see :mod:`harness.simulate.leap`).
    """

    def __init__(
        self,
        setup: EngineSetup,
        model: StepTimeModel,
        rng: np.random.Generator | None = None,
        leap: bool = True,
    ) -> None:
        super().__init__(setup, model, rng)
        self._leaps = leap
        self.preemptions = self.prefix_query_tokens = self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_work or self.launched or self.inbox)

    @property
    def begins_s(self) -> float:
        """When its next turn begins; an idle engine sleeps until it has seen a request and woken."""
        if self.scheduler.has_work or self.launched or not self.inbox:
            return self.now_s
        return max(self.now_s, self._seen_s(self.inbox[0]) + self.model.wake_ms / 1000)

    @property
    def outstanding(self) -> int:
        """Requests sent to it that have not ended."""
        return len(self.by_id)

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
        self.by_id[request.request_id] = served

    def advance(self, until_s: float) -> None:
        """Run every turn that begins before ``until_s``."""
        while self.has_work and self.begins_s < until_s:
            self.turn(until_s)

    def turn(self, until_s: float) -> None:
        """One turn of the loop, or several equal ones."""
        self.now_s = self.begins_s
        while self.inbox and self._seen_s(self.inbox[0]) <= self.now_s:
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

    def _seen_s(self, served: Served) -> float:
        """When the loop can see a request: its client has to hand it over first."""
        return served.sent_s + self.model.send_ms / 1000

    def _note(self, plan: StepPlan) -> None:
        self.preemptions += plan.num_preempted
        self.prefix_query_tokens += plan.prefix_query_tokens
        self.prefix_hit_tokens += plan.prefix_hit_tokens
        for request in plan.admitted:
            self.by_id[request.request_id].admitted_s = self.now_s

    def _launch(self, plan: StepPlan, started: float) -> None:
        rows, page = plan.rows, self.setup.layout.page_size
        kind, padded, width, places = self.kind_of(rows)
        ends, tokens = rows.ends, int(rows.counts.sum())
        pairs, prefills = rows.prefill_pairs if kind.prefill else 0, len(rows) - rows.num_decode
        work = Work(tokens + padded, len(rows), int(ends.sum()), pairs, places, prefills)
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
            prefills,
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
        if len(step.numbers):  # without a token to fetch nobody waits for the device, and the next step queues behind
            self.now_s = max(self.now_s, step.ready_s)
        collected = self.scheduler.collect(step.rows, np.zeros(len(step.rows), dtype=np.int64), self.now_s)
        self.log.add([*step.log, (self.now_s - step.started_s) * 1000])
        got_s = self.now_s
        if len(step.numbers):
            got_s = float(self.hand_over(step.numbers, np.array([self.now_s]))[0])
        for request in collected.ended:
            self.scheduler.cache.register(request)
            self.scheduler.remove(request)
            request.end(RequestStatus.FINISHED)
            served = self.by_id.pop(request.request_id)
            served.ended_s, served.outcome = got_s, Outcome.OK_LENGTH
            self.ended.append(served.number)
