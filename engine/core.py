"""One step: schedule, launch, collect, hand over. What happens between two steps is in `engine.loop`.

A step is planned and committed on the host, started on the device, and its tokens are collected one step later when
async batching is on (so that planning step N+1 overlaps running step N), at once otherwise.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.cache import TRASH_BLOCK, PagedCache
from engine.culprits import Culprit, cause_of, find_culprits
from engine.model_shape import ModelShape
from engine.requests import GenerationOutput, Request, RequestStatus
from engine.resolution import ResolvedConfig
from engine.runner import LaunchedStep, ModelRunner, Transfer
from engine.scheduler import SCHEDULERS, SchedulerLimits, StepPlan
from engine.stats import EngineStats, StepRecord
from engine.step_outputs import Outputs

logger = logging.getLogger(__name__)

Deliver = Callable[[Outputs, Sequence[Request]], None]
"""Takes outputs, and the requests whose terminal ones are among them."""


class EngineCore:
    """Runs requests to their end. Single-threaded; knows nothing of threads, queues or consumers.

    Args:
        model: a transformers causal LM in eval mode.
        shape, config: its sizes and the resolved settings.
        stats: where steps are counted.
        deliver: called once a step with the outputs it produced, in order, and the requests whose last are among them.
    """

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        config: ResolvedConfig,
        stats: EngineStats,
        deliver: Deliver,
    ) -> None:
        self.config, self.stats, self._deliver = config, stats, deliver
        self.cache = PagedCache(config.layout, config.num_blocks, config.allow_block_sharing)
        limits = SchedulerLimits(config.max_batch_tokens, config.max_requests_per_batch, config.safety_margin)
        self.scheduler = SCHEDULERS[config.scheduler_type](self.cache, limits, config.num_host_blocks)
        self.runner = ModelRunner(model, shape, config)
        self.requests: dict[str, Request] = {}
        self._launched: deque[tuple[LaunchedStep, StepRecord, Transfer | None]] = deque()
        self._depth = 1 if config.use_async_batching else 0
        self._blamed = False  # somebody was, and no step has succeeded since
        self._check = os.environ.get("ENGINE_CHECK") == "1"
        stats.kv_blocks_total, stats.host_blocks_total = config.num_blocks, config.num_host_blocks

    def warm_up(self) -> None:
        """Do once what the first steps would otherwise wait for (compilation, graph capture)."""
        self.runner.warm_up()
        self.stats.compile_s = self.runner.compile_s
        if self.runner.graphs is not None:
            self.stats.captured_steps = len(self.runner.graphs)
            self.stats.graph_pool_bytes = self.runner.graphs.pool_bytes

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
        """Plan and launch a step, and collect the one that is due."""
        started = time.perf_counter_ns()
        plan = self.scheduler.schedule()
        if self._start(plan, started) is not None:
            plan = self._start_smaller(plan, started)
        if self._launched and (len(self._launched) > self._depth or not plan.rows):
            self._collect(*self._launched.popleft())
        elif not plan.rows and self.scheduler.has_work:
            raise RuntimeError("the scheduler has requests but can run none of them")
        if self._check:
            self.scheduler.check()

    def _start(self, plan: StepPlan, started: int) -> str | None:
        """Launch a plan. If device memory runs out the plan is undone and the cause returned."""
        transfer = self.runner.transfer(plan)
        self._note(plan)
        if not plan.rows:
            return None
        try:
            launched = self.runner.launch(plan)
        except torch.OutOfMemoryError as error:
            self.scheduler.undo(plan)
            return str(error).partition("\n")[0]  # as text: the exception's frames hold the memory that is needed
        except Exception as error:
            self._end_culprits(plan, error)
            return None
        self._blamed = False
        self.stats.forks += len(plan.forked)
        self._launched.append((launched, self._describe(plan, launched, started), transfer))
        return None

    def _start_smaller(self, plan: StepPlan, started: int) -> StepPlan:
        """After running out of memory: once more with half the prefill tokens, or half the rows of a decode step. If
        that does not help the youngest request that prefills gives up, in a decode step the youngest of all.

        Returns:
            The smaller plan, whether or not it could be launched.
        """
        self.drain()  # the failed launch may have overwritten tokens on the device that are still to be fed back
        self.runner.release_unused()
        self.stats.oom_retries += 1
        decodes = plan.rows.num_decode
        prefill_tokens = int(plan.rows.counts.sum()) - decodes
        smaller = self.scheduler.schedule(
            decodes + max(1, prefill_tokens // 2) if prefill_tokens else max(1, decodes // 2)
        )
        shortage = self._start(smaller, started)
        if shortage is None:
            return smaller
        self.runner.release_unused()
        prefilling = {row.request.request_id for row in smaller.rows if not row.is_decode}
        candidates = prefilling or self.scheduler.running
        youngest = next(r for r in reversed(self.scheduler.running.values()) if r.request_id in candidates)
        self._end(youngest, RequestStatus.FAILED, f"oom_{'prefill' if prefilling else 'decode'}: {shortage}")
        self._deliver([GenerationOutput(youngest)], [youngest])
        return smaller

    def _end_culprits(self, plan: StepPlan, error: Exception) -> None:
        """After a step that failed for another reason than memory: fail the requests to blame. The others have lost
        nothing: what a failed step wrote is written again by the one that computes the same positions.

        A request that was alone in its step is to blame, too, unless there is no other, or somebody was blamed already
        and no step has succeeded since.

        Raises:
            ``error``: nobody can be told to be.
        """
        logger.warning("a step of %d requests failed; looking for the one to blame", len(plan.rows), exc_info=error)
        requests = plan.rows.requests
        self.scheduler.undo(plan)
        try:
            self.drain()  # the failed launch may have overwritten tokens on the device that are still to be fed back
            self.runner.synchronize()
        except Exception as device_error:
            raise error from device_error
        culprits: list[Culprit] = [(request, error) for request in requests]
        if len(requests) > 1:
            live = [request for request in requests if not request.is_over]
            culprits = find_culprits(live, error, self._launch_only, time.perf_counter)
        elif self._blamed or len(self.requests) == 1:
            raise error
        else:
            self._blamed = True
        for request, cause in culprits:
            if not request.is_over:
                logger.warning("request %r fails: %s", request.request_id, cause_of(cause))
                self._end(request, RequestStatus.FAILED, cause_of(cause))
                self._deliver([GenerationOutput(request)], [request])
        self.drain()

    def _launch_only(self, requests: Sequence[Request]) -> bool:
        """Launch a step of some running requests and see it through; if it raises they are as they were. False if there
        is nothing that they can compute now."""
        started = time.perf_counter_ns()
        plan = self.scheduler.schedule(only={request.request_id for request in requests})
        if not plan.rows:
            return False
        try:
            launched = self.runner.launch(plan)
            self.runner.synchronize()
        except Exception:
            self.scheduler.undo(plan)
            raise
        self._launched.append((launched, self._describe(plan, launched, started), None))
        return True

    def drain(self) -> None:
        """Collect every launched step: all tokens are on the host and the device has nothing left to do."""
        while self._launched:
            self._collect(*self._launched.popleft())

    def forget_prefixes(self) -> None:
        """The weights have changed: offer nothing computed so far to later requests, copy no old weights. Call it on a
        drained core."""
        self.scheduler.forget_prefixes()
        self.runner.refresh()

    def cancel(self, request_id: str) -> None:
        """End a request with what it has generated; unknown or ended ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, RequestStatus.CANCELLED, "cancelled by the client")
            self._deliver([GenerationOutput(request)], [request])

    def fail_all(self, reason: str) -> None:
        """End every live request as failed; blocks are whole again, launched steps are forgotten."""
        self._launched.clear()
        requests = list(self.requests.values())
        for request in requests:
            self._end(request, RequestStatus.FAILED, reason)
        if requests:
            self._deliver([GenerationOutput(request) for request in requests], requests)

    def _collect(self, launched: LaunchedStep, record: StepRecord, transfer: Transfer | None) -> None:
        tokens, logprobs, tops = launched.wait()
        collected = self.scheduler.collect(launched.rows, tokens, time.perf_counter(), logprobs, tops)
        for request in collected.ended:
            self._end(request, RequestStatus.FINISHED)
        for request, error in collected.failed:
            self._end(request, RequestStatus.FAILED, cause_of(error))
        # Counted before anything is handed over: who sees the last token sees the whole log.
        record.gpu_ms = launched.gpu_ms
        record.restore_ms = None if transfer is None else transfer.restore_ms
        record.step_ms = (time.perf_counter_ns() - record.t_ns) / 1e6
        outputs: Outputs = collected.heard
        if collected.late:  # they may run again any moment
            outputs = [*map(GenerationOutput, collected.late), *outputs]
        if outputs:
            self._deliver(outputs, [*collected.ended, *(request for request, _ in collected.failed)])

    def _end(self, request: Request, status: RequestStatus, error: str | None = None) -> None:
        del self.requests[request.request_id]
        if request.tables:
            self.cache.register(request)
            request.kv_blocks = sum(block != TRASH_BLOCK for table in request.tables for block in table)
        self.scheduler.remove(request)
        request.end(status, error)
        self.stats.recomputed_tokens += request.recomputed_tokens
        if status is RequestStatus.FINISHED:
            self.stats.finished += 1
        elif status is RequestStatus.CANCELLED:
            self.stats.cancelled += 1
        else:
            self.stats.failed += 1

    def _note(self, plan: StepPlan) -> None:
        self.stats.prefix_query_tokens += plan.prefix_query_tokens
        self.stats.prefix_hit_tokens += plan.prefix_hit_tokens
        self.stats.kv_blocks_allocated += plan.num_allocated_blocks
        self.stats.kv_blocks_evicted += plan.num_evicted_blocks
        self.stats.offloads += plan.num_offloaded
        self.stats.restores += plan.num_restored
        self.stats.offloaded_tokens += plan.offloaded_tokens
        if self.config.num_host_blocks:
            free, low = self.scheduler.host.num_free, self.stats.host_blocks_free_min
            self.stats.host_blocks_free_min = free if low is None else min(low, free)
        now = time.perf_counter()
        for request in plan.admitted:
            request.admitted_time = now

    def _describe(self, plan: StepPlan, launched: LaunchedStep, started: int) -> StepRecord:
        rows, ends = plan.rows, plan.rows.ends
        now = time.perf_counter_ns()
        for request in plan.prefilled:
            if request.decoding_time < 0:  # once: a preempted request prefills again
                request.decoding_time = now / 1e9
        decode, prefill_rows = rows.num_decode, len(rows) - rows.num_decode
        record = StepRecord(
            step=self.stats.steps,
            t_ns=started,
            kind="decode" if not prefill_rows else "mixed" if decode else "prefill",
            decode_rows=decode,
            prefill_rows=prefill_rows,
            prefill_tokens=int(rows.counts.sum()) - decode,
            padded_rows=launched.padded_rows,
            table_pages=launched.table_pages,
            decode_kernel_rows=launched.decode_kernel_rows,
            kv_tokens=int(ends.sum()),
            prefill_pairs=rows.prefill_pairs,
            running=plan.num_running,
            waiting=plan.num_waiting,
            free_blocks=plan.num_available_blocks,
            allocated_blocks=plan.num_allocated_blocks,
            evicted_blocks=plan.num_evicted_blocks,
            unused_slots=int((-ends % self.config.page_size).sum()) * len(self.config.layout.groups),
            preempted=plan.num_preempted,
            admission_held=plan.admission_held,
            graph=launched.replayed,
            offloaded=plan.num_offloaded,
            restored=plan.num_restored,
            offloaded_bytes=len(plan.offloads) * self.config.layout.block_bytes,
            restored_bytes=len(plan.restores) * self.config.layout.block_bytes,
            mask_bytes=launched.mask_bytes,
            schedule_ms=(now - started) / 1e6,
        )
        self.stats.record(record)
        return record
