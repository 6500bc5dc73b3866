"""Each cause made on purpose in a timeline whose every other gap is 10 ms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics import compute_tables
from harness.metrics.attribution import WORST_SHARE, Cause, _worst
from harness.record import Outcome, RequestRecord, RunRecord, TokenChunk

MS = 1_000_000


class Timeline:
    """A process of steps of 10 ms, each giving one token to every request that takes part in it."""

    def __init__(self) -> None:
        self.now = 0.0  # ms
        self.steps: list[dict[str, Any]] = []
        self.stamps: dict[str, list[float]] = {}
        self.pauses: list[dict[str, Any]] = []

    def step(self, who: str, ms: float = 10.0, lag_ms: float = 0.1, **columns: Any) -> None:
        row: dict[str, Any] = {"kind": "decode", "decode_rows": len(who), "prefill_tokens": 0, "graph": True}
        self.steps.append({**row, "t_ns": round(self.now * MS), "step_ms": ms, **columns})
        self.now += ms
        for name in who:
            self.stamps.setdefault(name, []).append(self.now + lag_ms)

    def steady(self, who: str, n: int = 60) -> None:
        for _ in range(n):
            self.step(who)

    def record(self, **facts: dict[str, Any]) -> RunRecord:
        requests = []
        for name, stamps in self.stamps.items():
            own = {"t_submit_ns": 0, "t_admit_ns": 0, **facts.get(name, {})}
            chunks = [TokenChunk(round(t * MS), (1,)) for t in stamps]
            last = chunks[-1].time_ns
            requests.append(
                RequestRecord(name, 4, 64, t_sched_ns=0, chunks=chunks, t_done_ns=last, outcome=Outcome.OK_EOS, **own)
            )
        return RunRecord(
            {"run_id": "r", "engine": "ours"}, requests, t_start_ns=0, t_end_ns=round(self.now * MS),
            steps=self.steps, gc_pauses=self.pauses,
        )  # fmt: skip

    def worst(self, kind: str = "itl", **facts: dict[str, Any]) -> pd.Series:
        tails = compute_tables(self.record(**facts))["tails"]
        return tails[tails["kind"] == kind].iloc[0]


def test_a_large_prefill_in_the_step() -> None:
    t = Timeline()
    t.steady("ab")
    t.step("ab", ms=60, kind="mixed", prefill_tokens=2048)
    t.steady("ab")
    worst = t.worst()
    assert (worst.cause, worst.step) == (Cause.PREFILL, 60)
    assert worst.value_ms == pytest.approx(60)
    assert worst.typical_ms == pytest.approx(10)
    assert worst.explained_ms == pytest.approx(50, abs=0.2)
    assert worst.evidence == "59.9 ms in step 60, 2,048 prefill tokens, 2 decoding, 2 steps in all"


def test_preemption_leaves_steps_out() -> None:
    t = Timeline()
    t.steady("ab")
    t.step("a", preempted=1)
    for _ in range(8):
        t.step("a")
    t.steady("ab")
    worst = t.worst(b={"recomputed_tokens": 60})
    assert (worst.cause, worst.request_id) == (Cause.PREEMPTION, "b")
    assert worst.value_ms == pytest.approx(100)
    # The same gap of a request that was never evicted: the scheduler left it out.
    assert t.worst().cause == Cause.QUEUE


def test_offload_and_restore() -> None:
    t = Timeline()
    t.steady("ab")
    t.step("a", offloaded=1)
    t.step("a")
    t.step("ab", ms=30, restored=1)
    t.steady("ab")
    assert t.worst().cause == Cause.OFFLOAD


def test_a_graph_miss() -> None:
    t = Timeline()
    t.steady("ab")
    t.step("ab", ms=25, graph=False)
    t.steady("ab")
    worst = t.worst()
    assert (worst.cause, worst.step, worst.explained_ms) == (Cause.GRAPH_MISS, 60, pytest.approx(15, abs=0.2))


def test_a_slow_step_without_a_reason_is_unknown_but_named() -> None:
    t = Timeline()
    t.steady("ab")
    t.step("ab", ms=25)
    t.steady("ab")
    worst = t.worst()
    assert (worst.cause, worst.step) == (Cause.UNKNOWN, 60)
    assert pd.isna(worst.explained_ms)


def test_garbage_collection() -> None:
    t = Timeline()
    t.steady("ab")
    t.pauses.append({"t_ns": round((t.now + 2) * MS), "duration_ms": 30.0, "generation": 2})
    t.step("ab", ms=40)
    t.steady("ab")
    worst = t.worst()
    assert (worst.cause, worst.explained_ms) == (Cause.GC, pytest.approx(30))


def test_time_between_steps() -> None:
    t = Timeline()
    t.steady("ab")
    t.now += 50
    t.steady("ab")
    worst = t.worst()
    assert (worst.cause, worst.explained_ms) == (Cause.BETWEEN, pytest.approx(50, abs=0.2))


def test_harness_lag_is_tokens_that_nobody_took() -> None:
    t = Timeline()
    t.steady("ab")
    for i in range(6):  # six steps whose tokens are stamped together, 50 ms after the first of them
        t.step("ab", lag_ms=0.1 + 50 - 10 * i)
    t.steady("ab")
    worst = t.worst()
    assert worst.cause == Cause.HARNESS
    assert worst.value_ms == pytest.approx(60)


def test_a_first_token_that_waited_in_the_queue_or_for_the_margin() -> None:
    for held, cause in ((False, Cause.QUEUE), (True, Cause.MARGIN)):
        t = Timeline()
        for _ in range(30):
            t.step("a", waiting=1, admission_held=held)
        t.step("ab", kind="mixed", prefill_tokens=20)
        t.steady("ab")
        worst = t.worst("ttft", b={"t_admit_ns": 300 * MS})
        assert (worst.cause, worst.request_id) == (cause, "b")
        assert worst.explained_ms == pytest.approx(300)
        assert "waiting" in worst.evidence


def test_a_first_token_after_a_long_prefill() -> None:
    t = Timeline()
    t.steady("a", 3)
    for _ in range(4):
        t.step("a", ms=50, kind="mixed", prefill_tokens=512)
    t.stamps["b"] = [t.now + 0.1]
    t.steady("ab")
    worst = t.worst("ttft", b={"t_submit_ns": 30 * MS, "t_admit_ns": 30 * MS})
    assert (worst.cause, worst.explained_ms) == (Cause.PREFILL, pytest.approx(200))


def test_nothing_is_explained_that_is_not_unusual_or_not_logged() -> None:
    t = Timeline()
    t.steady("ab")
    assert t.worst().cause == Cause.ORDINARY
    t = Timeline()
    t.steady("ab")
    t.step("ab", ms=90)
    t.steady("ab")
    t.steps.clear()
    worst = t.worst()
    assert (worst.cause, pd.isna(worst.step), pd.isna(worst.evidence)) == (Cause.NO_LOG, True, True)


def test_overlapping_steps_of_async_batching_own_their_time_once() -> None:
    t = Timeline()
    t.steady("ab")
    t.step("ab", ms=60, kind="mixed", prefill_tokens=2048)
    t.steady("ab")
    for row in t.steps[1:]:  # each step is planned while the one before it runs
        row["t_ns"] -= 8 * MS
        row["step_ms"] += 8
    worst = t.worst()
    assert (worst.cause, worst.step, worst.explained_ms) == (Cause.PREFILL, 60, pytest.approx(50, abs=0.2))


def test_one_in_a_hundred_is_looked_at_worst_first() -> None:
    t = Timeline()
    t.steady("ab", 301)
    t.step("ab", ms=30)
    t.step("ab", ms=40)
    tails = compute_tables(t.record())["tails"]
    gaps = tails[tails["kind"] == "itl"]
    assert len(gaps) == 7  # of 604
    assert gaps["value_ms"].tolist()[:4] == pytest.approx([40, 40, 30, 30])
    assert (tails["kind"] == "ttft").sum() == 1


@given(st.lists(st.integers(0, 5), max_size=400))
def test_the_worst_are_those_of_a_whole_sort_also_where_values_are_equal(values):
    array = np.array(values, dtype=np.float64)
    n = math.ceil(WORST_SHARE * len(values))
    assert _worst(array).tolist() == np.argsort(-array, kind="stable")[:n].tolist()
