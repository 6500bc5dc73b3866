"""Chunks, blocks, masks, held prefills and restores of a run, by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.metrics import compute_tables
from harness.record import Outcome, RequestRecord, RunRecord, TokenChunk

MS = 1_000_000
T0 = 5_000 * MS


def request(name: str, submit_ms: int, admit_ms: int | None, **facts: Any) -> RequestRecord:
    return RequestRecord(
        name,
        prompt_tokens=4,
        max_new_tokens=8,
        t_sched_ns=T0,
        t_submit_ns=T0 + submit_ms * MS,
        t_admit_ns=None if admit_ms is None else T0 + admit_ms * MS,
        t_done_ns=T0 + 100 * MS,
        chunks=[TokenChunk(T0 + 100 * MS, (1,))],
        outcome=Outcome.OK_LENGTH,
        **facts,
    )


def step(at_ms: int, held: bool = False, **facts: Any) -> dict[str, Any]:
    return {"t_ns": T0 + at_ms * MS, "admission_held": held, "step_ms": 10.0, **facts}


def tables(requests: list[RequestRecord], steps: list[dict[str, Any]] | pd.DataFrame, **fields: Any) -> Any:
    identity = {"run_id": "r", "engine": "ours"}
    record = RunRecord(identity, requests, t_start_ns=T0, t_end_ns=T0 + 200 * MS, steps=steps, **fields)
    return compute_tables(record)


def test_the_life_cycle_is_in_the_request_table() -> None:
    """M-mech-01: as the engine tells it; null where it does not."""
    told = request(
        "a",
        1,
        5,
        statuses="pending > prefilling > decoding > finished",
        t_pending_ns=T0 + 2 * MS,
        t_decoding_ns=T0 + 9 * MS,
        t_over_ns=T0 + 99 * MS,
        preemptions=1,
        prefill_steps=3,
        kv_blocks=7,
    )
    rows = tables([told, request("b", 1, None)], [])["requests"].set_index("request_id")
    a, b = rows.loc["a"], rows.loc["b"]
    assert a.statuses.split(" > ")[-1] == "finished"
    assert [a.t_pending_s, a.t_admit_s, a.t_decoding_s, a.t_over_s] == [0.002, 0.005, 0.009, 0.099]
    assert (a.preemptions, a.prefill_steps, a.kv_blocks) == (1, 3, 7)
    names = ["statuses", "t_pending_s", "t_decoding_s", "t_over_s", "preemptions", "prefill_steps", "kv_blocks"]
    assert b[names].isna().all()


@pytest.mark.parametrize("as_frame", [False, True])
def test_time_in_the_queue_that_the_margin_caused(as_frame: bool) -> None:
    """M-mem-02: held from 10 to 20 and from 30 to 50 ms; the last step ends where it says."""
    steps: Any = [step(0), step(10, True), step(20), step(30, True), step(40, True), step(50), step(60, True)]
    if as_frame:
        steps = pd.DataFrame(steps)
    requests = [
        request("all", 0, 55),  # 10 + 20
        request("part", 15, 35),  # 5 + 5
        request("none", 20, 28),
        request("inside", 42, 45),  # 3
        request("late", 65, 90),  # 65 to 70
        request("hidden", 0, None),
    ]
    found = tables(requests, steps)
    delay = found["requests"].set_index("request_id").prefill_delay_ms
    assert delay.drop("hidden").to_dict() == {"all": 30, "part": 10, "none": 0, "inside": 3, "late": 5}
    assert pd.isna(delay["hidden"])
    run = found["runs"].iloc[0]
    assert (run.held_steps, run.prefill_delay_p50_ms) == (4, 5)


def test_without_a_log_that_tells_nothing_is_known() -> None:
    run = tables([request("a", 0, 5)], [{"t_ns": T0, "step_ms": 1.0}])["runs"].iloc[0]
    assert (
        run[["held_steps", "prefill_delay_p95_ms", "unused_slots_mean", "peak_mask_bytes", "restore_gb_s"]].isna().all()
    )
    assert run[["chunked_requests", "kv_blocks_max", "restored_bytes"]].isna().all()


def test_no_held_step_is_a_delay_of_zero() -> None:
    assert tables([request("a", 0, 5)], [step(0), step(9)])["requests"].prefill_delay_ms.tolist() == [0]


def test_blocks_chunks_and_masks() -> None:
    """M-mem-05, M-s2-01, M-mem-02."""
    requests = [request(str(n), 0, 1, prefill_steps=n, kv_blocks=10 * n) for n in (1, 2, 4)]
    steps = [
        step(0, unused_slots=5, table_pages=2, mask_bytes=0),
        step(9, unused_slots=8, table_pages=6, mask_bytes=64),
    ]
    run = tables(requests, steps)["runs"].iloc[0]
    assert (run.chunked_requests, run.prefill_steps_max) == (2, 4)
    assert (run.kv_blocks_p50, run.kv_blocks_max) == (20, 40)
    assert (run.unused_slots_mean, run.unused_slots_max, run.table_pages_max, run.peak_mask_bytes) == (6.5, 8, 6, 64)


def test_restores_by_hand() -> None:
    """M-s4-05: 3 GB in 120 ms are 25 GB/s."""
    gb = 10**9
    steps = [
        step(0, offloaded_bytes=4 * gb, restored_bytes=0),
        step(9, offloaded_bytes=0, restored_bytes=gb, restore_ms=30.0),
        step(20, offloaded_bytes=0, restored_bytes=2 * gb, restore_ms=90.0),
    ]
    run = tables([request("a", 0, 1)], steps, counters={"restores": 3})["runs"].iloc[0]
    assert (run.restores, run.offloaded_bytes, run.restored_bytes) == (3, 4 * gb, 3 * gb)
    assert (run.restore_mean_ms, run.restore_max_ms, run.restore_gb_s) == (60, 90, 25)
    del steps[2]["restore_ms"]  # its time was never taken: a rate over less time than the bytes took would be too high
    assert pd.isna(tables([request("a", 0, 1)], steps)["runs"].iloc[0].restore_gb_s)
