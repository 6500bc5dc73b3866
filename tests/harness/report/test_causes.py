"""SLO, tails, memory ledger, divergences and the newer notes of validity, on made-up runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from harness.report.arms import group_arms
from harness.report.evidence import divergences_section
from harness.report.memory import ledger_section, ledger_sentences
from harness.report.read import Results, read_results
from harness.report.slo import breakdown, slo_section, slo_sentences
from harness.report.slowest import slowest_section
from harness.report.validity import validity_notes
from harness.slo import Slo


@pytest.fixture
def results_of(tmp_path: Path, record_maker: Callable, writer: Callable) -> Callable[..., Results]:
    """Results of two arms, ``static`` and ``ours`` (n requests, speed), changed by ``change(record)``."""

    def make(change: Callable | None = None, slo: Slo | None = None, n: int = 60, speed: float = 1.0) -> Results:
        records = []
        for engine in ("static", "ours"):
            record = record_maker(
                engine, engine, n=n, speed=speed, workload="w", arm=engine, repeat=0, variable="engine"
            )
            record.slo = slo
            if change is not None:
                change(record)
            records.append(record)
        return read_results(writer(tmp_path, records))

    return make


def test_a_broken_slo_is_in_the_verdict_and_says_who_paid(results_of: Callable) -> None:
    results = results_of(slo=Slo("tight", ttft_p95_ms=200, itl_p99_ms=5, request_ttft_ms=200))
    arms = group_arms(results)
    ours = next(a for a in arms if a.engine == "ours")
    assert ours.spread("gen_tok_s").median > arms[0].spread("gen_tok_s").median
    sentences = slo_sentences(arms)
    assert any(
        s.startswith("ours breaks the SLO tight (") and s.endswith("so its higher throughput is no reason to adopt it.")
        for s in sentences
    ), sentences
    page = slo_section(results, arms)
    assert "BROKEN" in page
    assert "Where ours was slow" in page
    assert "long prompts" in page
    assert "last arrivals" in page
    assert "against static" in page


def test_the_breakdown_by_hand(results_of: Callable) -> None:
    results = results_of()
    ours = next(a for a in group_arms(results) if a.engine == "ours")
    groups = breakdown(results, ours)
    assert [n for n, _, _ in groups.values()] == [20] * 6
    requests = results.of_run("requests", "ours").sort_values("prompt_tokens")
    longest = requests["ttft_sched_ms"].iloc[-20:].astype(float).quantile(0.95)
    found = next(value for name, value in groups.items() if name.startswith("long prompts"))
    assert found[1] == pytest.approx(longest)


def test_a_kept_slo_and_none(results_of: Callable) -> None:
    results = results_of(slo=Slo("wide", ttft_p95_ms=1e6, request_ttft_ms=1e6))
    arms = group_arms(results)
    assert slo_sentences(arms) == ["The SLO wide is kept by static, ours."]
    assert "60 of 60" in slo_section(results, arms)


def test_without_an_slo_the_page_says_that_no_verdict_speaks_of_one(results_of: Callable) -> None:
    results = results_of()
    arms = group_arms(results)
    assert slo_sentences(arms) == []
    assert "No SLO was decided before the runs" in slo_section(results, arms)


def test_causes_of_the_slowest_are_counted(results_of: Callable) -> None:
    results = results_of()
    page = slowest_section(results, group_arms(results))
    tails = results.tables["tails"]
    assert len(tails)
    for cause in tails["cause"].unique():
        assert cause in page
    empty = Results(results.directory, {**results.tables, "tails": tails.iloc[:0]}, (), ())
    assert slowest_section(empty, group_arms(empty)) == ""


def test_the_ledger_is_shown_with_its_residual(results_of: Callable) -> None:
    def on_a_gpu(record) -> None:
        gib = 2**30
        record.memory = {
            "weights_bytes": 8 * gib,
            "kv_cache_bytes": 2 * gib,
            "planned": 10 * gib,
            "residual": -gib // 10,
        }
        record.memory |= {"peak_gpu_allocated_bytes": 10 * gib - gib // 10, "outside_torch": gib // 2}
        record.environment["memory.free_at_start_bytes"] = 139 * gib

    results = results_of(on_a_gpu)
    arms = group_arms(results)
    assert ledger_sentences(results, arms)[0] == (
        "memory of static: 10 GiB in the ledger, 9.90 GiB allocated at the peak; residual −102 MiB (-1.0 %)"
    )
    page = ledger_section(results, arms)
    order = [page.index(text) for text in ("weights", "kv cache", ">planned", "peak gpu allocated", ">residual")]
    assert order == sorted(order)
    assert "139 GiB" in page


@pytest.mark.parametrize(
    ("device", "read", "said"),
    [("cuda:0", None, True), ("cuda:0", 2**30, False), ("cpu", None, False), (None, None, False)],
)
def test_a_gpu_that_could_not_be_watched_is_said(results_of: Callable, device, read, said) -> None:
    def change(record) -> None:
        record.telemetry = [{"t_s": i / 10, "rss_bytes": 5, "gpu_used_bytes": read if i else None} for i in range(3)]
        record.identity["device"] = device

    results = results_of(change)
    notes = [n for n in validity_notes(results, group_arms(results)) if "NVML could not be read" in n]
    assert len(notes) == said
    assert all("(run.log says why): static, ours. Clocks" in n for n in notes)


def test_notes_of_gpu_calibration_and_load(results_of: Callable) -> None:
    def change(record) -> None:
        record.telemetry = [{"t_s": i / 10, "throttle": "power cap" if i < 3 else ""} for i in range(10)]
        record.environment["gpu.other_processes"] = 2
        record.calibration = {
            "tokens": 1000, "gen_tok_s": 2000.0, "ttft_error_p50_ms": 0.1, "ttft_error_p99_ms": 1.0,
            "itl_error_p50_ms": 0.3, "itl_error_p99_ms": 1.0, "sched_lag_p99_ms": 0.2, "last_lag_ms": 0.1,
            "overhead_us_per_token": 3.0,
        }  # fmt: skip

    results = results_of(change)
    results.tables["runs"].loc[:, "steady_state"] = "saturated"
    results.tables["runs"].loc[:, "gate"] = ["explained", "failed"]
    notes = validity_notes(results, group_arms(results))
    for expected in (
        "Wrong answers: ours (see below). Its speed is that of another output.",
        "Some token ids differ from the reference's, each first where the model itself is undecided: static.",
        "Other processes used the GPU: static, ours.",
        "The GPU's clocks were held down (power or heat, see telemetry): static (30 % of the samples), ours (30 % of "
        "the samples).",
        "The harness did not give a known schedule back within its bounds here: static (itl_error_p50 0.300 of 0.2 "
        "ms), ours (itl_error_p50 0.300 of 0.2 ms).",
    ):
        assert expected in notes
    assert any(note.startswith("The queue grew to the end (saturated)") for note in notes)


def test_a_quiet_run_has_none_of_these_notes(results_of: Callable) -> None:
    results = results_of()
    text = " ".join(validity_notes(results, group_arms(results)))
    for word in ("clocks", "GPU", "schedule back", "saturated", "Wrong answers"):
        assert word not in text


def test_divergences_are_listed(results_of: Callable) -> None:
    results = results_of()
    row = {"run_id": "ours", "reference_run_id": "static", "request_id": "q1", "index": 3, "kind": "token"}
    row |= {"token": 5, "reference_token": 6, "margin": 0.01, "limit": 0.2, "verdict": "explained", "note": None}
    results.tables["divergences"] = pd.DataFrame([row])
    page = divergences_section(results, group_arms(results))
    assert "explained" in page
    assert json.dumps(0.01) in page
