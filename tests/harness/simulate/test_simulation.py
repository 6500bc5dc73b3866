"""Simulated runs by hand, against themselves step by step, and against the engine's own plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.metrics import compute_tables, run_values
from harness.record import Outcome, RunRecord
from harness.report.html import write_report
from harness.simulate import EngineSetup, simulate
from harness.simulate.clients import serve
from harness.simulate.replica import Replica
from harness.simulate.step_time import Cost
from harness.store import write_result
from workloads.workload import ScheduledRequest, Workload


def times_ms(record: RunRecord, index: int = 0) -> list[float]:
    return [c.time_ns / 1e6 for c in record.requests[index].chunks]


def test_steps_one_after_the_other_by_hand(by_hand: SimpleNamespace) -> None:
    """1 ms of host, 2 ms of device, 0.5 ms between: a token at 3, 6.5 and 10 ms; a client sees it 0.25 ms later."""
    record = simulate(by_hand.workload((0.0, 5, 3)), by_hand.setup(), by_hand.model(delivery_ms=0.25))
    assert times_ms(record) == pytest.approx([3.25, 6.75, 10.25])
    assert [r.outcome for r in record.requests] == [Outcome.OK_LENGTH]
    values = run_values(record)
    assert values["ttft_p50_ms"] == pytest.approx(3.25)
    assert values["itl_p50_ms"] == pytest.approx(3.5)
    assert values["steps"] == 3
    assert list(record.steps["kind"]) == ["prefill", "decode", "decode"]


def test_a_step_without_a_token_is_not_waited_for(by_hand: SimpleNamespace) -> None:
    """A prompt of three chunks, 1 ms of host, 2 of device and 0.5 between: turns begin at 0, 1.5 and 3 ms, the device
    computes from 1 to 7 ms without a pause. With each step waited for it would be 10."""
    record = simulate(by_hand.workload((0.0, 40, 2)), by_hand.setup(max_batch_tokens=16), by_hand.model())
    assert list(record.steps["prefill_tokens"]) == [16, 16, 8, 0]
    assert times_ms(record) == pytest.approx([7.0, 10.5])


def test_overlapped_steps_by_hand(by_hand: SimpleNamespace) -> None:
    """Step 2 is launched at 2.5 ms while step 1 runs until 3: it runs from 3 to 5 ms. Step 3 is launched at 4.5 and
    runs from 5 to 7. Nothing is left to plan then, so its turn collects it."""
    record = simulate(by_hand.workload((0.0, 5, 3)), by_hand.setup(overlapped=True), by_hand.model())
    assert times_ms(record) == pytest.approx([3.0, 5.0, 7.0])


def test_a_slow_host_bounds_overlapped_steps(by_hand: SimpleNamespace) -> None:
    """3 ms of host and half a ms between turns against 1 ms of device: a token every 3.5 ms."""
    model = by_hand.model(host=Cost(3.0), device=Cost(1.0))
    record = simulate(by_hand.workload((0.0, 4, 6)), by_hand.setup(overlapped=True), model)
    assert np.diff(times_ms(record))[1:-1] == pytest.approx([3.5] * 3)


def test_requests_are_taken_in_between_steps(by_hand: SimpleNamespace) -> None:
    """The second comes at 1 ms, while the first is computed: it is admitted at 3.5 ms and has its token at 6.5 ms."""
    record = simulate(by_hand.workload((0.0, 5, 3), (0.001, 4, 1)), by_hand.setup(), by_hand.model())
    assert record.requests[1].t_admit_ns == 3_500_000
    assert times_ms(record, 1) == pytest.approx([6.5])


def test_a_client_sends_one_after_the_other(by_hand: SimpleNamespace) -> None:
    """Three due at once, 2 ms to send each: the first step is begun with the first alone."""
    model = replace(by_hand.model(), send_ms=2.0)
    record = simulate(by_hand.workload(*[(0.0, 3, 1)] * 3), by_hand.setup(), model)
    assert [r.t_sched_ns for r in record.requests] == [0, 0, 0]
    assert [r.t_submit_ns for r in record.requests] == [0, 2_000_000, 4_000_000]
    assert list(record.steps["prefill_rows"]) == [1, 1, 1]


def test_an_idle_engine_wakes_and_finds_who_came_meanwhile(by_hand: SimpleNamespace) -> None:
    """Half a ms to send, 1.5 to wake: at 2 ms the first step begins, with the second request, which was sent at 1."""
    model = replace(by_hand.model(), send_ms=0.5, wake_ms=1.5)
    record = simulate(by_hand.workload((0.0, 5, 1), (0.001, 3, 1), (0.5, 3, 1)), by_hand.setup(), model)
    assert list(record.steps["prefill_rows"]) == [2, 1]
    assert [times_ms(record, i) for i in range(3)] == [[5.0], [5.0], [505.0]]


def test_outputs_are_handed_over_one_after_the_other(by_hand: SimpleNamespace) -> None:
    """A quarter of a ms a row: two tokens of the first step, at 3 ms, are seen half a ms later. With 10 ms a row those
    are seen at 23 ms, and the token of the next step (one row, at 6.5 ms) no sooner."""
    for by_row, expected in ((0.25, ([3.5], [3.5, 6.75])), (10.0, ([23.0], [23.0, 23.0]))):
        model = replace(by_hand.model(), delivery_row_ms=by_row)
        record = simulate(by_hand.workload((0.0, 5, 1), (0.0, 4, 2)), by_hand.setup(), model)
        assert times_ms(record, 0) + times_ms(record, 1) == pytest.approx(expected[0] + expected[1])
        assert record.requests[0].t_done_ns == round(expected[0][0] * 1e6)


def test_an_idle_engine_waits_for_the_next_request(by_hand: SimpleNamespace) -> None:
    record = simulate(by_hand.workload((0.0, 5, 1), (0.5, 5, 1)), by_hand.setup(), by_hand.model())
    assert times_ms(record, 1) == pytest.approx([503.0])


def test_what_never_fits_is_rejected_and_disturbs_nobody(by_hand: SimpleNamespace) -> None:
    record = simulate(by_hand.workload((0.0, 500, 9), (0.0, 5, 2)), by_hand.setup(), by_hand.model())
    assert [r.outcome for r in record.requests] == [Outcome.REJECTED, Outcome.OK_LENGTH]
    assert "KV blocks" in (record.requests[0].error or "")


def test_a_closed_loop_keeps_its_places(by_hand: SimpleNamespace) -> None:
    """One place: the second request is sent when the first has ended, at 6.5 ms."""
    record = simulate(by_hand.workload((0.0, 5, 2), (0.0, 4, 1), concurrency=1), by_hand.setup(), by_hand.model())
    assert record.requests[1].t_submit_ns == 6_500_000
    assert record.steps["running"].max() == 1


def test_a_known_end_before_the_cap(by_hand: SimpleNamespace) -> None:
    record = simulate(by_hand.workload((0.0, 5, 30)), by_hand.setup(), by_hand.model(), output_tokens={"r0": 4})
    assert len(times_ms(record)) == 4


def test_shared_prefixes_are_computed_once(by_hand: SimpleNamespace) -> None:
    prompt = tuple(range(1, 13))
    requests = tuple(ScheduledRequest(f"r{i}", float(i), (*prompt, 90 + i), 2) for i in range(3))
    record = simulate(Workload("shared", requests), by_hand.setup(), by_hand.model())
    assert [r.cached_tokens for r in record.requests] == [0, 12, 12]
    assert record.counters["prefix_hit_tokens"] == 24
    off = simulate(Workload("shared", requests), by_hand.setup(share_prefixes=False), by_hand.model())
    assert off.counters["prefix_hit_tokens"] == 0
    assert off.steps["prefill_tokens"].sum() == record.steps["prefill_tokens"].sum() + 24


REQUESTS = st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.booleans(), st.sampled_from([10, 16, 64]), st.sampled_from([None, 8]), st.integers(0, 9))
def test_leaps_change_nothing(
    by_hand: SimpleNamespace,
    given_requests: list[tuple[float, int, int]],
    overlapped: bool,
    blocks: int,
    window: int | None,
    seed: int,
) -> None:
    """Also where blocks are short and requests are preempted, with sliding layers, and with a drawn spread."""
    workload = by_hand.workload(*sorted(given_requests))
    setup = by_hand.setup((None, window), 16, num_blocks=blocks, overlapped=overlapped)
    model = replace(by_hand.true_model, send_ms=0.1, wake_ms=0.4, delivery_row_ms=0.01)
    runs = [simulate(workload, setup, model, np.random.default_rng(seed), leap=leap) for leap in (True, False)]
    assert [times_ms(runs[0], i) for i in range(len(workload))] == [times_ms(runs[1], i) for i in range(len(workload))]
    assert runs[0].counters == runs[1].counters
    for name in runs[0].steps:
        left, right = runs[0].steps[name], runs[1].steps[name]
        assert list(left) == pytest.approx(list(right)) if left.dtype.kind == "f" else list(left) == list(right), name


def test_leaps_and_preemptions_are_taken(by_hand: SimpleNamespace) -> None:
    """The property above means something: a case with both."""
    workload = by_hand.workload(*[(0.0, 12, 30)] * 4)
    replica = Replica(
        by_hand.setup(page_size=16, num_blocks=8, overlapped=True), by_hand.true_model, np.random.default_rng(0)
    )
    turns = 0
    for number, wanted in enumerate(workload.requests):
        replica.send(number, wanted, 0.0)
    while replica.has_work:
        replica.turn(float("inf"))
        replica.scheduler.check()
        turns += 1
    assert replica.preemptions > 0
    assert turns < len(replica.log.array())  # leaps


def test_the_engine_plans_the_same_steps(m1: Any, c1: Callable[..., Any], by_hand: SimpleNamespace) -> None:
    """The same burst on the engine, on a real model: every step has the same rows, tokens, keys and free blocks."""
    from transformers import GenerationConfig

    from engine import ContinuousBatchingManager

    lengths = [(23, 9), (5, 20), (40, 3), (11, 14), (17, 25), (8, 30)]
    config = c1(num_blocks=22, max_requests_per_batch=8, safety_margin=0.1)
    manager = ContinuousBatchingManager(m1, GenerationConfig(max_new_tokens=8, do_sample=False), config)
    try:
        for i, (prompt, new) in enumerate(lengths):
            ids = [(31 * i + 7 * k) % 89 + 3 for k in range(prompt)]
            manager.add_request(ids, request_id=f"r{i}", max_new_tokens=new, eos_token_id=[])
        manager.start()
        assert len(list(manager)) == len(lengths)
        log = manager.step_log
        preempted = manager.counters()["preemptions"]
    finally:
        manager.destroy()
    setup = by_hand.setup(num_blocks=22, safety_margin=0.1)
    record = simulate(by_hand.workload(*[(0.0, *pair) for pair in lengths]), setup, by_hand.model())
    columns = (
        "kind", "decode_rows", "prefill_rows", "prefill_tokens", "kv_tokens", "prefill_pairs", "running", "waiting",
        "free_blocks", "allocated_blocks", "evicted_blocks", "unused_slots", "preempted", "admission_held",
    )  # fmt: skip
    for name in columns:
        assert record.steps[name].tolist() == [getattr(step, name) for step in log], name
    assert preempted > 0
    assert record.counters["preemptions"] == preempted


def test_tables_and_report_of_a_simulated_run(by_hand: SimpleNamespace, tmp_path: Path) -> None:
    workload = by_hand.workload(*[(0.002 * i, 10 + i, 12) for i in range(30)])
    record = simulate(workload, by_hand.setup(), by_hand.true_model, np.random.default_rng(0), identity={"run_id": "s"})
    tables = compute_tables(record)
    assert tables["runs"]["source"].tolist() == ["simulated"]
    assert tables["runs"]["n_ok"].tolist() == [30]
    assert len(tables["steps"]) == tables["runs"]["steps"].iloc[0]
    assert tables["runs"]["running_max"].iloc[0] == tables["steps"]["running"].max() == 8
    write_result(tmp_path, tables)
    assert "simulated" in write_report(tmp_path).read_text()


def test_captured_steps_are_padded_as_the_engine_pads_them(by_hand: SimpleNamespace) -> None:
    """Three decode rows are replayed on a captured step for four."""
    setup: EngineSetup = by_hand.setup(graphs=(False, True), max_batch_tokens=64, num_blocks=128)
    record = simulate(by_hand.workload(*[(0.0, 4, 5)] * 3), setup, by_hand.model())
    decode = record.steps[record.steps["kind"] == "decode"]
    assert decode["graph"].all()
    assert set(decode["padded_rows"]) == {1}
    assert not record.steps[record.steps["kind"] == "prefill"]["graph"].any()


def test_a_session_waits_for_its_answers_and_finds_them_in_the_cache(by_hand: SimpleNamespace) -> None:
    """The second turn is due 100 ms after the first ended, at 17 ms; its prompt holds the first turn's prompt and
    answer: 8 + 5 tokens, of which three pages were filled and are not computed again."""
    first = ScheduledRequest("a", 0.0, tuple(range(1, 9)), 5)
    second = ScheduledRequest(
        "b", 0.0, (*range(1, 9), *[99] * 5, 70, 71), 2, follows="a", think_s=0.1, takes_answer=True
    )
    record = simulate(Workload("session", (first, second)), by_hand.setup(), by_hand.model())
    assert times_ms(record)[-1] == pytest.approx(3 + 4 * 3.5)
    assert record.requests[1].t_sched_ns == 117_000_000
    assert record.requests[1].prompt_tokens == 15
    assert record.requests[1].cached_tokens == 12


def test_a_session_that_fails_does_not_go_on(by_hand: SimpleNamespace) -> None:
    first = ScheduledRequest("a", 0.0, (1,) * 500, 5)
    second = ScheduledRequest("b", 0.0, (1, 2), 2, follows="a")
    record = simulate(Workload("session", (first, second)), by_hand.setup(), by_hand.model())
    assert [r.outcome for r in record.requests] == [Outcome.REJECTED, Outcome.CANCELLED]
    assert "not sent" in (record.requests[1].error or "")
    assert run_values(record)["n_cancelled"] == 1


def test_a_replica_serves_again_after_idling(by_hand: SimpleNamespace) -> None:
    replica = Replica(by_hand.setup(), by_hand.model())
    serve(by_hand.workload((0.0, 4, 2), (1.0, 4, 2)), [replica], lambda wanted, replicas: 0, {})
    assert [s.ended_s for s in replica.served.values()] == pytest.approx([0.0065, 1.0065])
    assert not replica.outstanding
