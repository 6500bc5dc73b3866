"""The loop: schedule, launch, collect, hand over.

A step is planned and committed on the host, started on the device, and its tokens are collected one step later when
async batching is on (so that planning step N+1 overlaps running step N), at once otherwise.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from engine.cache import PagedCache
from engine.model_shape import ModelShape
from engine.requests import GenerationOutput, Request, RequestStatus
from engine.resolution import ResolvedConfig
from engine.runner import LaunchedStep, ModelRunner
from engine.scheduler import SCHEDULERS, SchedulerLimits, StepPlan
from engine.stats import EngineStats, StepRecord


class EngineCore:
    """Runs requests to their end. Single-threaded; knows nothing of threads, queues or consumers.

    Args:
        model: a transformers causal LM in eval mode.
        shape, config: its sizes and the resolved settings.
        stats: where steps are counted.
        deliver: called once a step with the outputs it produced.
    """

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        config: ResolvedConfig,
        stats: EngineStats,
        deliver: Callable[[list[GenerationOutput]], None],
    ) -> None:
        self.config, self.stats, self._deliver = config, stats, deliver
        self.cache = PagedCache(config.layout, config.num_blocks, config.allow_block_sharing)
        limits = SchedulerLimits(config.max_batch_tokens, config.max_requests_per_batch, config.safety_margin)
        self.scheduler = SCHEDULERS[config.scheduler_type](self.cache, limits)
        self.runner = ModelRunner(model, shape, config)
        self.requests: dict[str, Request] = {}
        self._launched: deque[tuple[LaunchedStep, StepRecord]] = deque()
        self._depth = 1 if config.use_async_batching else 0
        self._check = os.environ.get("ENGINE_CHECK") == "1"
        stats.kv_blocks_total = config.num_blocks

    def warm_up(self) -> None:
        """Do once what the first steps would otherwise wait for (graph capture)."""
        self.runner.warm_up()

    def close(self) -> None:
        """Release the device's memory and leave the model as it was found."""
        self.runner.close()

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._launched)

    def add(self, request: Request) -> None:
        """Take a validated request with its children; each ends in exactly one terminal output."""
        for member in (request, *request.children):
            self.requests[member.request_id] = member
        self.scheduler.add(request)

    def step(self) -> None:
        """One turn of the loop."""
        started = time.perf_counter_ns()
        plan = self.scheduler.schedule()
        if plan.rows:
            self._note_admissions(plan)
            launched = self.runner.launch(plan)
            self._launched.append((launched, self._describe(plan, launched, started)))
        if self._launched and (len(self._launched) > self._depth or not plan.rows):
            self._collect(*self._launched.popleft())
        elif not plan.rows and self.scheduler.has_work:
            raise RuntimeError("the scheduler has requests but can run none of them")
        if self._check:
            self.scheduler.check()

    def cancel(self, request_id: str, reason: str = "cancelled by the client") -> None:
        """End a request with what it has generated; unknown or ended ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, RequestStatus.CANCELLED, reason)
            self._deliver([GenerationOutput(request)])

    def fail_all(self, reason: str) -> None:
        """End every live request as failed; blocks are whole again, launched steps are forgotten."""
        self._launched.clear()
        requests = list(self.requests.values())
        for request in requests:
            self._end(request, RequestStatus.FAILED, reason)
        if requests:
            self._deliver([GenerationOutput(request) for request in requests])

    def _collect(self, launched: LaunchedStep, record: StepRecord) -> None:
        chosen = zip(*launched.wait(), strict=True)
        outputs = []
        for row, (token, logprob, top) in zip(launched.rows, chosen, strict=True):
            request = row.request
            request.num_in_flight -= 1
            if request.is_over:  # it ended while this step was on its way: a wasted row, never an extra token
                continue
            over = request.append(token, logprob, top)
            if over:
                self._end(request, RequestStatus.FINISHED)
            else:
                self.cache.register(request)
            if over or request.streaming:
                outputs.append(GenerationOutput(request))
        # Counted before anything is handed over: who sees the last token sees the whole log.
        record.step_ms = (time.perf_counter_ns() - record.t_ns) / 1e6
        if outputs:
            self._deliver(outputs)

    def _end(self, request: Request, status: RequestStatus, error: str | None = None) -> None:
        del self.requests[request.request_id]
        if request.tables:
            self.cache.register(request)
        self.scheduler.remove(request)
        request.end(status, error)
        self.stats.recomputed_tokens += request.recomputed_tokens
        if status is RequestStatus.FINISHED:
            self.stats.finished += 1
        elif status is RequestStatus.CANCELLED:
            self.stats.cancelled += 1
        else:
            self.stats.failed += 1

    def _note_admissions(self, plan: StepPlan) -> None:
        self.stats.prefix_query_tokens += plan.prefix_query_tokens
        self.stats.prefix_hit_tokens += plan.prefix_hit_tokens
        self.stats.forks += plan.num_forked
        now = time.perf_counter()
        for request in plan.admitted:
            request.admitted_time = now

    def _describe(self, plan: StepPlan, launched: LaunchedStep, started: int) -> StepRecord:
        decode = prefill_rows = prefill_tokens = kv_tokens = 0
        for row in plan.rows:
            end = row.start + row.count
            kv_tokens += end
            if row.start >= row.request.num_prompt and row.count == 1:
                decode += 1
            else:
                prefill_rows += 1
                prefill_tokens += row.count
        record = StepRecord(
            step=self.stats.steps,
            t_ns=started,
            kind="decode" if not prefill_rows else "mixed" if decode else "prefill",
            decode_rows=decode,
            prefill_rows=prefill_rows,
            prefill_tokens=prefill_tokens,
            padded_rows=launched.padded_rows,
            kv_tokens=kv_tokens,
            running=plan.num_running,
            waiting=plan.num_waiting,
            free_blocks=plan.num_available_blocks,
            preempted=plan.num_preempted,
            admission_held=plan.admission_held,
            graph=launched.replayed,
            schedule_ms=(time.perf_counter_ns() - started) / 1e6,
        )
        self.stats.record(record)
        return record
