"""Many equal decode steps at once.

Between two events (a request that comes or ends, a page that is filled, a prefix that is registered) the scheduler
plans the same rows again and again. Such a stretch is passed over in one go: the counters of the running requests are
set to what the steps would have left, and the steps' times are taken from the same model. What comes out is what the
scheduler would have done step by step; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.scheduler import StepRows
from engine.scheduler.slots import RunningSlots
from harness.simulate.state import EngineState
from harness.simulate.step_log import COLUMNS
from harness.simulate.step_time import Kind, Work

MIN_STEPS = 3
"""Fewer equal steps than these are not worth it."""


def leap(state: EngineState, until_s: float) -> bool:
    """Pass over the equal decode steps that begin before ``until_s``; False, and nothing has changed, if there are
    too few."""
    scheduler = state.scheduler
    slots = scheduler.slots
    count = len(scheduler.running)
    if not 0 < count <= scheduler.limits.max_batch_tokens or len(state.launched) != state.depth:
        return False
    if scheduler.waiting and count < scheduler.limits.max_requests:
        return False  # the next step may admit somebody
    ready = slots.ready()
    if len(ready) != count:
        return False
    if state.depth:
        before = state.launched[0].rows
        same = len(before) == count and np.array_equal(before.slots, ready)
        if not same or not np.array_equal(before.tenancies, slots.tenancy[ready]):
            return False
        if before.num_decode != count:
            return False
    steps = _equal_steps(slots, ready, state.depth)
    if steps < MIN_STEPS:
        return False
    _pass(state, ready, steps, until_s)
    return True


def _equal_steps(slots: RunningSlots, ready: np.ndarray, in_flight: int) -> int:
    """Turns in which the rows decode, nobody ends, no table changes and no page is offered to the prefix cache."""
    known, computed, limit = slots.num_known[ready], slots.num_computed[ready], slots.limit[ready]
    return int(
        min(
            (limit - known - max(in_flight, 1)).min(),
            (slots.settled_until[ready] - computed).min(),
            (slots.register_at[ready] - np.minimum(computed, known)).min() - 1,
        )
    )


def _pass(state: EngineState, ready: np.ndarray, most: int, until_s: float) -> None:
    model, scheduler, layout = state.model, state.scheduler, state.setup.layout
    slots, count, depth = scheduler.slots, len(ready), state.depth
    first = _rows(slots, ready)
    kind, padded, width, _ = state.kind_of(first)
    known, keys = model.kind_for(kind), int(first.ends.sum())
    numbers = state.numbers_of(first.requests)
    pending = state.launched[0] if depth else None
    times = _run_clock(state, known, Work(count + padded, count, keys, 0), most, until_s)
    steps = len(times.began_s)
    largest = state.largest[known][2]

    slots.num_computed[ready] += steps
    slots.num_known[ready] += steps
    slots.newest[ready] = 0
    zeros = [0] * steps
    for request in first.requests:
        request.tokens.extend(zeros)
    state.hand_over(numbers, times.collected_s)

    at = np.arange(steps)
    values: dict[str, Any] = {
        "t_s": times.began_s,
        "decode_rows": count,
        "padded_rows": padded,
        "table_pages": width,
        "kv_tokens": keys + at * count,
        "running": count,
        "waiting": len(scheduler.waiting),
        "free_blocks": scheduler.cache.pool.num_available,
        "unused_slots": (int((-first.ends % layout.page_size).sum()) - at * count) * len(layout.groups),
        "graph": kind.graph,
        "schedule_ms": times.host_ms,
        "beyond": state.beyond(known, Work(count + padded, count, keys, 0)) | (keys + at * count > largest),
    }
    table = np.zeros((steps, len(COLUMNS)))
    for name, value in values.items():
        table[:, COLUMNS.index(name)] = value
    if pending is None:
        table[:, -1] = (times.collected_s - times.began_s) * 1000
        state.log.add_many(table)
        return
    # The step launched before is collected in the first turn; the last one launched stays for the next turn.
    state.log.add([*pending.log, (times.collected_s[0] - pending.started_s) * 1000])
    table[:-1, -1] = (times.collected_s[1:] - times.began_s[:-1]) * 1000
    state.log.add_many(table[:-1])
    pending.rows, pending.numbers = replace(first, starts=first.starts + steps - 1), numbers
    pending.started_s, pending.ready_s = float(times.began_s[-1]), times.ready_s
    pending.log = table[-1, :-1].tolist()


@dataclass(frozen=True, slots=True)
class _Times:
    """By turn, in s: when its scheduling began and when it collected; ``ready_s``: when the last step is done."""

    began_s: np.ndarray
    collected_s: np.ndarray
    host_ms: np.ndarray
    ready_s: float


def _run_clock(state: EngineState, kind: Kind, work: Work, most: int, until_s: float) -> _Times:
    """Let the state's clock run over up to ``most`` turns whose work grows by a key a row."""
    model, overlapped = state.model, state.depth > 0
    host, device, between = model.host[kind], model.device[kind], model.between
    ratios = state.spread.peek((host, device, between), most)
    host_ms, device_ms = host.fitted_ms(work), device.fitted_ms(work)
    between_ms = between.fitted_ms(Work(0, work.rows, 0, 0))
    host_more, device_more = host.key_ms * work.rows, device.key_ms * work.rows
    began: list[float] = []
    collected: list[float] = []
    hosts: list[float] = []
    now, free = state.now_s, state.free_s
    previous = state.launched[0].ready_s if overlapped else 0.0
    for host_ratio, device_ratio, between_ratio in zip(*ratios, strict=True):
        if began and now >= until_s:
            break
        began.append(now)
        part = host_ms * host_ratio
        hosts.append(part)
        now += part / 1000
        free = model.done_ms(kind, 1000 * free, 1000 * began[-1], 1000 * now, device_ms * device_ratio) / 1000
        now = max(now, previous if overlapped else free)
        previous = free
        collected.append(now)
        now += between_ms * between_ratio / 1000
        host_ms += host_more
        device_ms += device_more
    state.spread.skip(3 * len(began))
    state.now_s, state.free_s = now, free
    return _Times(np.array(began), np.array(collected), np.array(hosts), free)


def _rows(slots: RunningSlots, ready: np.ndarray) -> StepRows:
    """What the scheduler plans for these slots: one token each."""
    count, starts = len(ready), slots.num_computed[ready]
    ones = np.ones(count, dtype=np.int64)
    return StepRows(
        slots.requests(ready),
        ready,
        slots.tenancy[ready],
        slots.pages[ready],
        starts,
        ones,
        ones.astype(bool),
        slots.newest[ready],
        count,
        int((starts >= slots.num_prompt[ready]).sum()),
    )
