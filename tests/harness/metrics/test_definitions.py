"""Every metric against values computed by hand."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from harness.metrics import REQUEST_METRICS, RUN_METRICS, compute_tables
from harness.record import ConfigValue, Outcome, RequestRecord, RunRecord, TokenChunk
from harness.tables import TABLES, SchemaError, check_frame, column

T0 = 1_000_000_000_000_007  # an odd, large perf_counter_ns: nothing may depend on where the clock starts
MS = 1_000_000


def request(name: str, deliveries: list[tuple[int, int]], **facts: object) -> RequestRecord:
    """A request due and sent at T0 whose deliveries are (ms after T0, number of tokens)."""
    chunks = [TokenChunk(T0 + ms * MS, tuple(range(n))) for ms, n in deliveries]
    n = sum(size for _, size in deliveries)
    settings: dict[str, object] = {
        "prompt_tokens": 4,
        "max_new_tokens": 64,
        "t_sched_ns": T0,
        "t_submit_ns": T0,
        "t_done_ns": T0 + deliveries[-1][0] * MS if deliveries else None,
        "outcome": Outcome.OK_EOS if n else Outcome.ENGINE_ERROR,
        "chunks": chunks,
        **facts,
    }
    return RequestRecord(request_id=name, **settings)  # type: ignore[arg-type]


def run(*requests: RequestRecord, wall_s: float | None = 1.0, **fields: object) -> RunRecord:
    end = None if wall_s is None else T0 + round(wall_s * 1e9)
    identity = {"run_id": "r0", "engine": "ours", **fields.pop("identity", {})}  # type: ignore[dict-item]
    return RunRecord(identity, list(requests), t_start_ns=T0, t_end_ns=end, **fields)  # type: ignore[arg-type]


def run_row(record: RunRecord) -> pd.Series:
    return compute_tables(record)["runs"].iloc[0]


def request_row(record: RunRecord, name: str) -> pd.Series:
    return compute_tables(record)["requests"].set_index("request_id").loc[name]


def test_every_table_has_exactly_the_schema() -> None:
    tables = compute_tables(run(request("a", [(10, 1), (20, 1)])))
    assert set(tables) == set(TABLES)
    for name, frame in tables.items():
        check_frame(name, frame)


def test_every_computed_column_has_one_metric() -> None:
    identity = {"run_id", "experiment", "variable", "arm", "repeat", "engine", "model", "workload", "workload_hash"}
    given = identity | {
        "arm_index",
        "block",
        "position",
        "replica",
        "iteration",
        "process",
        "device",
        "seed",
        "source",
        "status",
        "error",
        "load_s",
        "warmup_s",
        "tokens_match",
        "gate",
        "n_compared",
        "n_diverged",
    }
    assert set(RUN_METRICS) == {c.name for c in TABLES["runs"].columns} - given
    assert set(REQUEST_METRICS) == {c.name for c in TABLES["requests"].columns if c.unit == "ms"}
    assert column("runs", "ttft_p50_ms").definition == RUN_METRICS["ttft_p50_ms"].column.definition


def test_b06_failed_request_is_null_and_not_zero() -> None:
    record = run(
        request("a", [(100, 1), (150, 1)]),
        request("b", [(200, 1), (250, 1)]),
        request("c", [(300, 1), (350, 1)]),
        request("d", [], error="boom"),
    )
    row = run_row(record)
    assert (row.n_requests, row.n_ok, row.n_failed, row.n_cancelled, row.n_timed_out) == (4, 3, 1, 0, 0)
    assert row.ttft_p50_ms == 200
    assert row.ttft_mean_ms == 200
    assert pd.isna(request_row(record, "d").ttft_ms)
    assert pd.isna(request_row(record, "d").e2e_ms)
    assert request_row(record, "d").error == "boom"
    assert json.loads(row.outcomes) == {"engine_error": 1, "ok_eos": 3}


def test_b06_all_failed_has_no_latency_and_no_throughput() -> None:
    row = run_row(run(request("a", []), request("b", []), wall_s=0.36))
    assert (row.n_ok, row.n_failed) == (0, 2)
    assert row.wall_s == 0.36
    assert row.gen_tok_s == 0
    assert row.request_s == 0
    assert row.itl_n == 0
    assert (
        row[[c.name for c in TABLES["runs"].columns if c.name.startswith(("ttft", "itl_p", "tpot", "e2e"))]]
        .isna()
        .all()
    )


def test_cancelled_timed_out_and_partial_requests_are_counted_apart_and_have_no_latency() -> None:
    record = run(
        request("ok", [(100, 1), (200, 1)]),
        request("gone", [(1, 1), (2, 1)], outcome=Outcome.CANCELLED),
        request("late", [(1, 1), (2, 1)], outcome=Outcome.TIMEOUT),
        request("cut", [(1, 1), (2, 1)], outcome=Outcome.STREAM_TRUNCATED),
    )
    row = run_row(record)
    assert (row.n_ok, row.n_failed, row.n_timed_out, row.n_cancelled) == (1, 2, 1, 1)
    assert (row.generated_tokens, row.itl_n, row.ttft_p99_ms) == (2, 1, 100)
    cut = request_row(record, "cut")
    assert pd.isna(cut.ttft_ms)
    assert pd.isna(cut.itl_max_ms)
    assert (cut.output_tokens, cut.t_first_s) == (2, 0.001)  # what was seen is kept


def test_b07_ttft_is_the_first_token_and_not_the_role_chunk() -> None:
    record = run(request("a", [(10, 0), (100, 1), (150, 1), (260, 1), (270, 0)]))
    row = request_row(record, "a")
    assert row.ttft_ms == 100
    assert row.tpot_ms == 80
    assert row.e2e_ms == 260
    assert row.output_tokens == 3
    itl = compute_tables(record)["itl"]
    assert itl.itl_ms.tolist() == [50, 110]
    assert itl.icl_ms.tolist() == [50, 110]
    assert itl["index"].tolist() == [1, 2]
    assert itl.t_s.tolist() == [0.15, 0.26]


def test_b07_single_token_has_no_tpot_and_no_gap() -> None:
    record = run(request("one", [(100, 1)]), request("two", [(100, 1), (140, 1)]))
    row = request_row(record, "one")
    assert row.ttft_ms == 100
    assert pd.isna(row.tpot_ms)
    assert pd.isna(row.itl_mean_ms)
    assert pd.isna(row.itl_max_ms)
    assert compute_tables(record)["itl"].request_id.tolist() == ["two"]
    assert run_row(record).tpot_p50_ms == 40


def test_b15_delivered_tokens_are_counted_and_not_the_cap() -> None:
    record = run(request("a", [(100, 1), (200, 1), (300, 1), (300, 0)], max_new_tokens=64), wall_s=0.3)
    assert request_row(record, "a").output_tokens == 3
    assert request_row(record, "a").tpot_ms == 100
    assert run_row(record).gen_tok_s == pytest.approx(10.0)


@pytest.mark.parametrize("deliveries", [[], [(10, 0)], [(10, 0), (20, 0)]])
def test_b15_no_tokens_never_divide_and_are_a_failure(deliveries: list[tuple[int, int]]) -> None:
    record = run(request("a", deliveries, outcome=Outcome.OK_LENGTH), wall_s=0.0)
    row = run_row(record)
    assert (row.n_ok, row.n_failed, row.itl_n) == (0, 1, 0)
    assert request_row(record, "a").outcome == "empty"
    assert pd.isna(row.gen_tok_s)  # wall is 0: unknown, not infinite


def test_b20_padding_is_not_generated() -> None:
    rows = [("a", 3, 2, 5, 4), ("b", 5, 4, 3, 2), ("c", 8, 6, 0, 0)]
    requests = [
        request(
            name,
            [(100 * (i + 1), 1) for i in range(generated)],
            prompt_tokens=prompt,
            padding_prompt_tokens=left,
            padding_output_tokens=after,
        )
        for name, prompt, generated, left, after in rows
    ]
    row = run_row(run(*requests, wall_s=2.0))
    assert (row.prompt_tokens, row.padding_prompt_tokens) == (16, 8)  # 24 positions, 8 of them waste
    assert (row.generated_tokens, row.padding_output_tokens) == (12, 6)  # 18 rows, 6 of them waste
    assert row.gen_tok_s == 6.0
    assert row.prompt_tok_s == 8.0


def test_k_tokens_of_one_delivery_share_its_gap() -> None:
    record = run(request("a", [(10, 1), (13, 1), (22, 3)]))
    itl = compute_tables(record)["itl"]
    assert itl.itl_ms.tolist() == [3, 3, 3, 3]
    assert itl["index"].tolist() == [1, 2, 3, 4]
    assert itl.icl_ms.isna().tolist() == [False, False, True, True]
    assert itl.icl_ms.dropna().tolist() == [3, 9]
    assert request_row(record, "a").tpot_ms == 3


def test_first_delivery_of_several_tokens_adds_no_zero_gaps() -> None:
    itl = compute_tables(run(request("a", [(10, 3), (16, 2)]), request("b", [(5, 1), (9, 1)])))["itl"]
    assert itl.request_id.tolist() == ["a", "a", "b"]
    assert itl["index"].tolist() == [3, 4, 1]
    assert itl.itl_ms.tolist() == [3, 3, 4]


def test_one_delivery_of_everything_has_no_tpot() -> None:
    record = run(request("a", [(500, 8)]))
    row = request_row(record, "a")
    assert (row.ttft_ms, row.e2e_ms, row.output_tokens) == (500, 500, 8)
    assert pd.isna(row.tpot_ms)
    assert run_row(record).itl_n == 0


def test_percentiles_are_linear() -> None:
    row = run_row(run(*(request(str(ms), [(ms, 1)]) for ms in (10, 20, 30, 40))))
    assert row.ttft_p50_ms == 25
    assert row.ttft_p95_ms == pytest.approx(38.5)  # position 0.95 * 3 = 2.85 -> 30 + 0.85 * 10
    assert row.ttft_p99_ms == pytest.approx(39.7)


def test_queue_prefill_lag_and_rates() -> None:
    record = run(
        request("a", [(50, 1)], t_submit_ns=T0 + 2 * MS, t_admit_ns=T0 + 12 * MS),
        request("b", [(600, 1)], t_sched_ns=T0 + 500 * MS, t_submit_ns=T0 + 502 * MS, t_admit_ns=T0 + 522 * MS),
        request("c", [], t_sched_ns=T0 + 1000 * MS, t_submit_ns=T0 + 1002 * MS, outcome=Outcome.REJECTED),
    )
    a = request_row(record, "a")
    assert (a.queue_ms, a.prefill_ms, a.ttft_ms, a.ttft_sched_ms, a.sched_lag_ms) == (10, 38, 48, 50, 2)
    c = request_row(record, "c")
    assert c.sched_lag_ms == 2
    assert pd.isna(c.queue_ms)
    row = run_row(record)
    assert (row.queue_p50_ms, row.sched_lag_p99_ms) == (15, 2)
    assert (row.offered_request_s, row.sent_request_s) == (2.0, 2.0)
    assert pd.isna(run_row(run(request("a", [(1, 1)]), request("b", [(1, 1)]))).offered_request_s)  # burst


def test_unknown_facts_are_null_and_known_ones_summed() -> None:
    unknown = run_row(run(request("a", [(1, 1)])))
    assert unknown[["cached_tokens", "preemptions", "steps", "peak_rss_bytes", "peak_gpu_used_bytes"]].isna().all()
    both = run_row(run(request("a", [(1, 1)], cached_tokens=3), request("b", [(1, 1)], cached_tokens=0)))
    assert both.cached_tokens == 3
    partly = run(request("a", [(1, 1)], cached_tokens=3), request("b", [(1, 1)]), counters={"cached_tokens": 8})
    assert run_row(partly).cached_tokens == 8


def test_memory_and_queue() -> None:
    steps = [
        {"step": 0, "t_ns": T0 + 5 * MS, "running": 2, "waiting": 3, "free_blocks": 7, "preempted": 0, "graph": False},
        {"step": 1, "t_ns": T0 + 9 * MS, "running": 4, "waiting": 1, "free_blocks": 2, "preempted": 1, "graph": True},
    ]
    record = run(
        request("a", [(1, 1)]),
        steps=steps,
        memory={"peak_rss_bytes": 100, "weights": 60},
        telemetry=[{"t_s": 0.0, "rss_bytes": 90, "gpu_used_bytes": 500}, {"t_s": 0.1, "rss_bytes": 120}],
        counters={"preemptions": 5, "kv_blocks_total": 32, "evictions": 2.0},
    )
    row = run_row(record)
    assert (row.steps, row.running_max, row.waiting_max, row.kv_blocks_free_min, row.graph_replays) == (2, 4, 3, 2, 1)
    assert (row.preemptions, row.kv_blocks_total) == (5, 32)  # the backend's own counter goes first
    assert (row.peak_rss_bytes, row.peak_gpu_used_bytes) == (120, 500)
    assert pd.isna(row.peak_gpu_reserved_bytes)
    tables = compute_tables(record)
    assert tables["steps"].t_s.tolist() == [0.005, 0.009]
    assert dict(zip(tables["counters"].name, tables["counters"].value, strict=True))["evictions"] == 2
    assert tables["memory_ledger"].set_index("line").loc["weights", "bytes"] == 60


def test_unknown_step_column_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match=r"steps.*gpu_temperature"):
        compute_tables(run(request("a", [(1, 1)]), steps=[{"gpu_temperature": 3}]))


def test_run_that_failed_before_it_started() -> None:
    record = RunRecord({"run_id": "r", "engine": "ours", "n_requests": 24}, status="failed", error="no such model")
    tables = compute_tables(record)
    row = tables["runs"].iloc[0]
    assert (row.status, row.error, row.n_requests, row.n_ok) == ("failed", "no such model", 24, 0)
    assert pd.isna(row.wall_s)
    assert pd.isna(row.gen_tok_s)
    assert all(len(frame) == 0 for name, frame in tables.items() if name != "runs")


def test_interrupted_run_keeps_differences_but_claims_no_position() -> None:
    record = run(request("a", [(100, 1), (150, 1)]))
    record.t_start_ns = None
    row = request_row(record, "a")
    assert (row.ttft_ms, row.tpot_ms) == (100, 50)
    assert pd.isna(row.t_first_s)
    assert pd.isna(run_row(record).wall_s)


def test_deliveries_that_run_backwards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'a'.*before the one"):
        compute_tables(run(request("a", [(20, 1), (10, 1)])))


def test_identity_and_environment_and_config() -> None:
    record = run(
        request("a", [(1, 1)]),
        identity={"arm": 512, "repeat": 2, "seed": 7, "note": "x", "tokens_match": True},
        environment={"gpu": {"name": "H200"}, "torch": "2.13"},
        config=[ConfigValue("num_blocks", 64, "derived: memory"), ConfigValue("eos", None, "default")],
    )
    row = run_row(record)
    assert (row.arm, row["repeat"], row.seed, row.tokens_match) == ("512", 2, 7, True)
    tables = compute_tables(record)
    environment = dict(zip(tables["environment"].key, tables["environment"].value, strict=True))
    assert environment == {"gpu": '{"name": "H200"}', "torch": '"2.13"', "identity.note": '"x"'}
    assert tables["config"].value.tolist() == ["64", "null"]
    with pytest.raises(ValueError, match="run_id"):
        compute_tables(RunRecord({"engine": "ours"}))


def test_same_record_gives_the_same_tables() -> None:
    record = run(request("a", [(10, 1), (12, 2)]), request("b", []))
    for name, frame in compute_tables(record).items():
        pd.testing.assert_frame_equal(frame, compute_tables(record)[name])


def test_deliveries_of_unknown_size_keep_their_gap_and_claim_no_token() -> None:
    """Text at 100, 150 and 260 ms. Total 5: TPOT (260 - 100) / 4, no ITL; total unknown: no count, no rate."""

    def hidden(name: str, total: int | None) -> RequestRecord:
        chunks = [TokenChunk(T0 + ms * MS, None) for ms in (100, 150, 260)]
        by = "total" if total else "nothing"
        return request(name, [], chunks=chunks, outcome=Outcome.OK_EOS, output_tokens=total, output_counted_by=by)

    for total in (5, None):
        record = run(hidden("a", total))
        row, own = run_row(record), request_row(record, "a")
        itl = compute_tables(record)["itl"]
        assert own.ttft_ms == 100
        assert itl["icl_ms"].tolist() == [50, 110]
        assert itl["itl_ms"].isna().all()
        assert itl["index"].isna().all()
        assert (row.n_ok, row.itl_n) == (1, 0)
        assert row.isna()["itl_p50_ms"]
        assert own.isna()[["itl_mean_ms", "itl_max_ms"]].all()
        assert compute_tables(record)["tokens"].empty
        if total:
            assert (own.output_tokens, own.tpot_ms, row.generated_tokens, row.n_uncounted) == (5, 40, 5, 0)
            assert row.gen_tok_s == 5
        else:
            assert own.isna()[["output_tokens", "tpot_ms"]].all()
            assert row.isna()[["generated_tokens", "gen_tok_s"]].all()
            assert row.n_uncounted == 1


def test_unfinished_requests_are_censored_and_counted_apart() -> None:
    open_one = request("b", [(10, 1), (20, 1)], outcome=Outcome.UNFINISHED, t_done_ns=None)
    row = run_row(run(request("a", [(10, 1)]), open_one))
    assert (row.n_ok, row.n_failed, row.n_unfinished) == (1, 0, 1)
    assert request_row(run(open_one), "b").isna()["ttft_ms"]
    assert request_row(run(open_one), "b").output_tokens == 2


def test_refusals_of_a_server_are_outcomes_by_status() -> None:
    refused = Outcome("http_503")
    assert refused is Outcome("http_503")
    assert (str(refused), refused.ok) == ("http_503", False)
    row = run_row(run(request("a", [], outcome=refused), request("b", [(10, 1)])))
    assert (row.n_failed, json.loads(row.outcomes)) == (1, {"http_503": 1, "ok_eos": 1})
    with pytest.raises(ValueError, match="http_5030"):
        Outcome("http_5030")
