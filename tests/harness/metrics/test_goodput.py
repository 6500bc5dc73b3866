"""The SLO applied to runs computed by hand (M-s3-04)."""

from __future__ import annotations

import dataclasses
import json

import pandas as pd
import pytest

from harness import config_schemas
from harness.metrics import compute_tables
from harness.record import Outcome, RequestRecord, RunRecord, TokenChunk
from harness.slo import Slo, read_slo

MS = 1_000_000


def run(slo: Slo | None, *requests: RequestRecord) -> dict[str, pd.DataFrame]:
    identity = {"run_id": "r", "engine": "ours"}
    return compute_tables(RunRecord(identity, list(requests), t_start_ns=0, t_end_ns=2_000 * MS, slo=slo))


def request(name: str, first_ms: int, gap_ms: int, n: int = 3, lag_ms: int = 0, ok: bool = True) -> RequestRecord:
    chunks = [TokenChunk((first_ms + i * gap_ms) * MS, (i,)) for i in range(n)]
    outcome = Outcome.OK_LENGTH if ok else Outcome.ENGINE_ERROR
    return RequestRecord(
        name, 4, n, t_sched_ns=0, t_submit_ns=lag_ms * MS, t_done_ns=chunks[-1].time_ns, chunks=chunks, outcome=outcome
    )


def test_goodput_counts_requests_within_every_limit_from_their_due_time() -> None:
    slo = Slo("x", request_ttft_ms=100, request_itl_ms=20)
    tables = run(
        slo,
        request("good", 100, 20),
        request("late", 101, 20),
        request("uneven", 100, 21),
        request("sent late", 140, 10, lag_ms=50),  # ttft is 90 ms, but 140 after it was due
        request("one token", 90, 0, n=1),  # no gap: the limit on gaps is kept
        request("failed", 10, 1, ok=False),
    )
    good = dict(zip(tables["requests"].request_id, tables["requests"].slo_met, strict=True))
    assert {name for name, met in good.items() if met} == {"good", "one token"}
    row = tables["runs"].iloc[0]
    assert (row.n_good, row.goodput_request_s) == (2, 1.0)
    assert row.request_s == 2.5
    assert pd.isna(row.slo_met)  # no limit of the run
    assert json.loads(row.slo) == {"name": "x", "request_ttft_ms": 100, "request_itl_ms": 20}


def test_limits_of_the_run_decide_its_verdict() -> None:
    requests = [request(f"q{i}", 100, 20) for i in range(20)]
    kept = run(Slo("x", ttft_p95_ms=100, itl_p99_ms=20, e2e_p95_ms=140), *requests)["runs"].iloc[0]
    assert bool(kept.slo_met)
    assert pd.isna(kept.slo_broken)
    assert pd.isna(kept.n_good)  # no limit on one request
    broken = run(Slo("x", ttft_p95_ms=99, itl_p99_ms=19.5), *requests)["runs"].iloc[0]
    assert not broken.slo_met
    assert broken.slo_broken == "ttft_p95_ms 100 > 99, itl_p99_ms 20 > 19.5"


def test_a_dropped_request_counts_as_one_that_never_answered() -> None:
    requests = [request(f"q{i}", 100, 20) for i in range(18)]
    failed = [request(f"f{i}", 10, 1, ok=False) for i in range(2)]
    row = run(Slo("x", ttft_p95_ms=1000, ttft_p50_ms=1000), *requests, *failed)["runs"].iloc[0]
    assert row.slo_broken == "ttft_p95_ms never > 1000"
    cancelled = dataclasses.replace(failed[0], outcome=Outcome.CANCELLED)
    assert bool(run(Slo("x", ttft_p95_ms=1000), *requests, cancelled)["runs"].iloc[0].slo_met)


def test_without_an_slo_nothing_is_judged() -> None:
    row = run(None, request("a", 1, 1))["runs"].iloc[0]
    assert row[["slo", "slo_met", "slo_broken", "n_good", "goodput_request_s"]].isna().all()
    assert run(None, request("a", 1, 1))["requests"].slo_met.isna().all()


def test_limits_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"slo\.ttft_p95_ms must be above 0 ms and finite, or null"):
        Slo("x", ttft_p95_ms=0)
    assert read_slo({}) is None
    assert read_slo({"name": "none", "ttft_p95_ms": None}) is None
    assert read_slo({"name": "none", "ttft_p95_ms": 500.0}) == Slo("custom", ttft_p95_ms=500.0)
    assert read_slo({"ttft_p95_ms": 5}) == Slo(ttft_p95_ms=5)


def test_schema_and_slo_have_the_same_settings() -> None:
    schema = {f.name: (f.type, f.default) for f in dataclasses.fields(config_schemas.SloConfig)}
    assert schema == {f.name: (f.type, f.default) for f in dataclasses.fields(Slo)}
