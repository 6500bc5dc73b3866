"""Parts of the page that the measurement plan asks for, on made-up runs with known values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.comparison import finding_of, objection
from harness.record import RunRecord
from harness.report.arms import group_arms
from harness.report.calibration import calibration_section
from harness.report.evidence import runs_section
from harness.report.headline import headlines
from harness.report.html import write_report
from harness.report.memory import areas_table
from harness.report.read import Results, read_results
from harness.report.regressions import regression_sentences
from harness.report.requests import requests_section
from harness.report.validity import validity_notes
from harness.report.verdicts import compare_arms
from harness.slo import Slo


@pytest.fixture
def sweep(
    tmp_path: Path, record_maker: Callable[..., RunRecord], writer: Callable[..., Path]
) -> Callable[..., Results]:
    """Six blocks of x = 1 and a faster x = 2; ``change(record, is_second)`` makes them what a test is about."""

    def make(change: Callable[[RunRecord, bool], None] | None = None, blocks: int = 6) -> Results:
        records = []
        for block in range(blocks):
            for value in (1, 2):
                speed = value * (1 + 0.01 * block)
                record = record_maker(
                    f"x{value}-{block}", n=12, speed=speed, config={"x": value}, arm=str(value), arm_index=value,
                    variable="engine.x", workload="w", repeat=block, block=block, position=value,
                )  # fmt: skip
                record.slo = Slo("easy", ttft_p95_ms=1e6)
                if change is not None:
                    change(record, value == 2)
                records.append(record)
        return read_results(writer(tmp_path, records))

    return make


def verdict(results: Results, metric: str = "gen_tok_s") -> Any:
    found = finding_of(compare_arms(results, group_arms(results)), "", "x = 2", metric)
    assert found is not None
    return found


def test_an_arm_with_right_answers_and_a_kept_slo_is_better(sweep: Callable[..., Results]) -> None:
    assert verdict(sweep()).verdict == "better"


def test_wrong_answers_are_never_better(sweep: Callable[..., Results]) -> None:
    def change(record: RunRecord, second: bool) -> None:
        record.identity["gate"] = "failed" if second and record.identity["repeat"] == 3 else "equal"

    results = sweep(change)
    found = verdict(results)
    assert (found.verdict, found.is_withheld) == (None, True)
    assert found.reason == "would be better, but is no reason to adopt it: its answers are not the reference's"
    assert found.p_holm < 0.05  # it was tested like the others
    arms = group_arms(results)
    findings = compare_arms(results, arms)
    assert not any(f.verdict == "better" for f in findings)
    assert any("its answers are not the reference's" in s for s in headlines(arms, findings))


def test_a_broken_slo_is_never_better_and_a_worse_arm_stays_worse(sweep: Callable[..., Results]) -> None:
    def change(record: RunRecord, second: bool) -> None:
        if second:
            record.slo = Slo("hard", ttft_p95_ms=0.001)
            record.memory["peak_rss_bytes"] = 3 * 10**9

    results = sweep(change)
    assert "it breaks the SLO (ttft_p95_ms" in verdict(results).reason
    assert verdict(results, "peak_rss_bytes").verdict == "worse"
    assert objection(group_arms(results)[0].runs) is None


def test_what_a_gain_costs_is_said_beside_it(sweep: Callable[..., Results]) -> None:
    """M-s2-02."""

    def change(record: RunRecord, second: bool) -> None:
        record.memory["peak_rss_bytes"] = (3 if second else 2) * 10**9

    results = sweep(change)
    arms = group_arms(results)
    findings = compare_arms(results, arms)
    assert regression_sentences(arms, findings) == [
        "The throughput of x = 2 is paid for against x = 1: peak memory 1.50×."
    ]
    page = write_report(results.directory).read_text(encoding="utf-8")
    assert "is paid for against x = 1: peak memory 1.50×" in page
    assert 'class="bad" title="worse: p' in page


def test_without_verdicts_no_gain_and_no_cost_is_claimed(sweep: Callable[..., Results]) -> None:
    results = sweep(blocks=2)
    arms = group_arms(results)
    assert regression_sentences(arms, compare_arms(results, arms)) == []


def test_calibration_is_shown_with_its_bounds(sweep: Callable[..., Results]) -> None:
    def change(record: RunRecord, second: bool) -> None:
        record.calibration = {
            "tokens": 1000, "gen_tok_s": 2000.0, "ttft_error_p50_ms": 0.05, "ttft_error_p99_ms": 0.6,
            "itl_error_p50_ms": 0.31 if second and record.identity["repeat"] == 1 else 0.02, "itl_error_p99_ms": 0.5,
            "sched_lag_p99_ms": 0.2, "last_lag_ms": 0.1, "overhead_us_per_token": 4.0,
        }  # fmt: skip

    results = sweep(change)
    text = calibration_section(results, group_arms(results))
    assert "1,000 tokens at 2,000 tokens/s" in text
    rows = [[c.split("</td>")[0] for c in row.split("<td>")[1:]] for row in text.split("<tr>")[2:]]
    assert rows[0] == ["bound", "", "0.2", "none", "0.2", "none", "none", "1", "20"]
    assert rows[1] == ["x = 1", "6", "0.0500", "0.600", "0.0200", "0.500", "0.200", "0.100", "4"]
    assert rows[2][4] == "0.310 beyond"
    assert calibration_section(sweep(), group_arms(results)) == ""


def test_lengths_and_chunks_are_on_the_page(sweep: Callable[..., Results]) -> None:
    """M-s2-01: 12 prompts of 20, 23 … 53 tokens: p50 36.5, p95 51.35 less rounding; caps of 64."""

    def change(record: RunRecord, second: bool) -> None:
        for k, request in enumerate(record.requests):
            request.prefill_steps = 1 + (second and k < 5) * 2

    results = sweep(change)
    text = requests_section(results, group_arms(results))
    assert "<td>w</td><td>12</td><td>36.5, 51.3, 53</td><td>64, 64, 64</td>" in text
    assert "<td>x = 1</td><td>0</td><td>1</td>" in text
    assert "<td>x = 2</td><td>5</td><td>3</td>" in text


def test_the_areas_of_memory_by_arm(sweep: Callable[..., Results]) -> None:
    def change(record: RunRecord, second: bool) -> None:
        record.steps = [dict(s, unused_slots=8 if second else 4, admission_held=False) for s in record.steps]

    results = sweep(change)
    text = areas_table(group_arms(results))
    assert "<td>KV cache</td><td>unused_slots_mean [tokens]</td><td>4</td><td>8</td>" in text
    assert "<td>decode reserve</td><td>held_steps [steps]</td><td>0</td><td>0</td>" in text
    assert "restore_mean_ms" not in text  # nothing tells


def test_every_run_is_linked_to_its_folder(
    tmp_path: Path, record_maker: Callable[..., RunRecord], writer: Callable[..., Path]
) -> None:
    """M-scope-03."""
    records = [record_maker(f"r{k}", arm=str(k), variable="x", workload="w") for k in range(2)]
    for record in records:
        writer(tmp_path / f"job {record.identity['run_id']}", [record])
    results = read_results(writer(tmp_path, records))
    assert results.folders == {"r0": "job r0", "r1": "job r1"}
    text = runs_section(results, group_arms(results))
    for run_id, link in (("r0", "job%20r0/"), ("r1", "job%20r1/")):
        assert f"<td>{run_id}</td>" in text
        assert f'href="{link}"' in text
    assert "Measured:" in text
    assert "Choice:" in text


@pytest.mark.parametrize(("attention", "said"), [("triton", True), ("paged|sdpa", False)])
def test_static_beside_another_attention_is_said(
    tmp_path: Path, record_maker: Callable[..., RunRecord], writer: Callable[..., Path], attention: str, said: bool
) -> None:
    """M-stat-01."""
    records = [
        record_maker(
            engine, engine, workload="w", arm=engine, variable="engine", config={"attn_implementation_in_use": a}
        )
        for engine, a in (("static", "sdpa"), ("ours", attention))
    ]
    results = read_results(writer(tmp_path, records))
    notes = validity_notes(results, group_arms(results))
    assert any("Static batching ran on sdpa attention, ours on triton" in n for n in notes) is said
