"""The table of phases against values computed by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.metrics import compute_tables
from harness.record import Outcome, RequestRecord, RunRecord, TokenChunk

T0, MS = 10**12, 10**6


def request(name: str, phase: int | None, *ms: int, outcome: Outcome = Outcome.OK_LENGTH) -> RequestRecord:
    chunks = [TokenChunk(T0 + at * MS, (1,)) for at in ms]
    return RequestRecord(
        name,
        100,
        9,
        t_sched_ns=T0,
        t_submit_ns=T0,
        chunks=chunks,
        outcome=outcome,
        phase=phase,
        t_done_ns=T0 + ms[-1] * MS,
    )


def phases(*requests: RequestRecord, gaps: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    record = RunRecord(
        {"run_id": "r", "engine": "ours"}, list(requests), t_start_ns=T0, t_end_ns=T0 + 10**9, measured_gaps=gaps
    )
    return compute_tables(record)["phases"].drop(columns="run_id").to_dict("records")


def test_only_gaps_while_all_requests_generate_count() -> None:
    """a alone until b's first token at 30 (gaps of 10); both until b's last at 60 (gaps of 7, 8 and of 15); then a."""
    a = request("a", 0, 10, 20, 30, 37, 45, 60, 80, 100)
    b = request("b", 0, 30, 45, 60)
    alone = request("c", 1, 200, 203, 206)
    first, second = phases(a, b, alone)
    assert first == {
        "phase": 0, "n_requests": 2, "context_tokens": 103.0, "n_gaps": 5, "itl_p50_ms": 15.0, "itl_p95_ms": 15.0,
    }  # fmt: skip
    assert (second["n_requests"], second["itl_p50_ms"], second["context_tokens"]) == (1, 3.0, 101.5)


def test_the_workload_says_which_gaps_it_is_about() -> None:
    (row,) = phases(request("a", 0, 0, 1, 3, 6, 10, 15), gaps=(3, 4))
    assert (row["n_gaps"], row["itl_p50_ms"], row["context_tokens"]) == (2, 3.5, 103.5)


def test_a_failed_request_leaves_its_phase_unknown_and_no_phases_give_no_rows() -> None:
    bad = request("b", 0, 30, outcome=Outcome.ENGINE_ERROR)
    (row,) = phases(request("a", 0, 10, 20), bad)
    assert (row["n_gaps"], row["n_requests"]) == (0, 2)
    assert pd.isna(row["itl_p50_ms"])
    assert phases(request("a", None, 10, 20)) == []
