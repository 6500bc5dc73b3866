"""``cb-plan`` on a folder of made-up runs: console, files, page, and one line for what cannot be answered."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from engine import ContinuousBatchingConfig
from harness.capacity import words, write
from harness.capacity.app import main
from harness.capacity.binding import Binding
from harness.capacity.plan import cost_per_million
from harness.capacity.recommend import Setting
from harness.capacity.replay import fleet_table, simulated_routers
from harness.report.read import read_results
from harness.simulate import StepTimeModel, simulate_fleet
from harness.store import read_result

QUICK = ("requests=60", "seeds=3")


@pytest.fixture(scope="module")
def planned(measured_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plan")
    arguments = ["slo.ttft_p95_ms=150", "slo.itl_p99_ms=60", "target_rate=100", "price_per_gpu_hour=3", f"out={out}"]
    assert main([str(measured_dir), *arguments, *QUICK]) == 0
    return out


def test_cost_of_a_million_tokens() -> None:
    """By hand: 3.6 an hour is 0.001 a second, in which 5 requests of 200 tokens are 1,000 tokens."""
    assert cost_per_million(3.6, 5.0, 200.0) == pytest.approx(1.0)


def test_the_plan_as_tables(planned: Path) -> None:
    row = pd.read_parquet(planned / "plan.parquet").iloc[0]
    assert row["capacity_low_request_s"] <= row["capacity_request_s"] <= row["capacity_high_request_s"]
    needed = 100 / (row["capacity_low_request_s"] * 0.8)
    assert row["gpus"] - 1 < needed <= row["gpus"]
    assert row["binding"] in ("ttft", "itl", "kv_memory", "max_requests", "compute")
    assert row["little_logged"] == pytest.approx(row["little_predicted"], rel=0.05)
    assert row["cost_per_million_tokens"] > 0
    rates = pd.read_csv(planned / "rates.csv")
    assert set(rates["seed"]) == {0, 1, 2}
    assert rates.groupby("met")["rate_request_s"].mean()[False] > rates.groupby("met")["rate_request_s"].mean()[True]
    assert (rates[["offered_tok_s", "generated_tok_s"]] > 0).all().all()
    assert not rates[rates["met"]]["falls_behind"].any()
    assert set(pd.read_parquet(planned / "fleet.parquet")["router"]) == {"round_robin", "least_loaded", "prefix_aware"}
    assert pd.read_parquet(planned / "validation.parquet")["held_out"].all()


def test_the_plan_as_settings_model_and_run(planned: Path) -> None:
    text = (planned / "recommended.yaml").read_text()
    settings = yaml.safe_load(text)
    config = ContinuousBatchingConfig(**settings)
    assert config.max_requests_per_batch == 64
    assert all("  # " in line for line in text.splitlines()[1:])
    assert StepTimeModel.read(planned / "step_times.json").source["runs"] == ["run0", "run1"]
    run = read_result(planned / "at_capacity", ("runs",))["runs"].iloc[0]
    assert run["source"] == "simulated"
    assert run["slo_met"]


def test_the_page_stands_alone(planned: Path) -> None:
    page = (planned / "plan.html").read_text()
    assert "<svg" in page
    for word in (
        "Predicted and measured",
        "Room in the KV cache",
        "Behind a router",
        "What binds is",
        "Little's law",
        "had not seen",
    ):
        assert word.replace("'", "&#x27;") in page
    assert not any(tag in page for tag in ("<script", "<link", 'src="http', "@import"))


def test_what_bound_each_seed_is_on_the_page_and_in_a_table(planned: Path) -> None:
    seeds = pd.read_csv(planned / "seeds.csv")
    seeds = seeds[seeds["settings"] == "measured"]
    assert list(seeds["seed"]) == [0, 1, 2]
    assert (seeds["broken_request_s"] > seeds["capacity_request_s"]).all()
    assert seeds["why_not"].str.contains(r"_ms \S+ > \d+|falls behind: ").all()
    page = (planned / "plan.html").read_text()
    assert "What bound each seed" in page
    assert "crossed" in page


@pytest.mark.parametrize(
    "number, told, code", [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)], ids=["int", "term"]
)
def test_interrupted_it_keeps_what_it_knew(
    measured_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    told: str,
    code: int,
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("harness.capacity.plan.fleet_at", interrupt)
    asked = [str(measured_dir), "slo.ttft_p95_ms=150", "target_rate=100", "recommend=false", f"out={tmp_path}"]
    assert main([*asked, "requests=60", "seeds=1"]) == code
    assert f"cb-plan: interrupted by {told}; what was known by then is written" in capsys.readouterr().err
    assert pd.read_parquet(tmp_path / "plan.parquet")["capacity_request_s"].notna().all()
    assert "this plan is not complete" in (tmp_path / "plan.html").read_text()


def test_routers_that_cannot_differ_are_simulated_once(by_hand: SimpleNamespace) -> None:
    setup = by_hand.setup()
    apart = by_hand.workload(*[(i / 10, 9, 4) for i in range(30)])
    alike = replace(apart, requests=tuple(replace(r, prompt_ids=(7,) * 9) for r in apart.requests))
    assert simulated_routers(apart, setup) == ("round_robin", "least_loaded")
    assert simulated_routers(alike, setup) == ("round_robin", "least_loaded", "prefix_aware")
    records = [simulate_fleet(apart, setup, by_hand.true_model, 2, r, 0) for r in ("least_loaded", "prefix_aware")]
    assert records[0].requests == records[1].requests
    told: list[str] = []
    for replicas in (1, 2):
        told.clear()
        table = fleet_table(apart, setup, by_hand.true_model, replicas, None, lambda what, *_: told.append(what))
        assert len(told) == replicas
        assert list(table["router"]) == ["round_robin", "least_loaded", "prefix_aware"]
        columns = table.drop(columns="router")
        assert columns.iloc[1].equals(columns.iloc[2])
        assert columns.iloc[0].equals(columns.iloc[1]) == (replicas == 1)


def test_an_slo_that_nobody_meets_is_one_line(
    measured_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(measured_dir), "slo.ttft_p95_ms=0.5", f"out={tmp_path}", *QUICK]) == 1
    out = capsys.readouterr().out
    (line,) = [text for text in out.splitlines() if "no rate keeps the SLO" in text]
    assert "ttft_p95_ms" in line
    assert pd.read_parquet(tmp_path / "plan.parquet")["capacity_request_s"].isna().all()
    assert (tmp_path / "plan.html").is_file()


def test_a_named_workload_and_a_fleet(measured_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt_ids": [1 + i] * 20, "max_new_tokens": 5, "due_s": i / 20} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    named = ["workload=prompts_file", f"workload.path={path}", "arrival=as_recorded"]
    assert main([str(measured_dir), *named, "fleet=2"]) == 0
    out = capsys.readouterr().out
    assert "replaying the workload that was asked for: 40 requests on 2 GPUs" in out
    assert all(router in out for router in ("round robin", "least loaded", "prefix aware"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["slo.ttft_p95_ms=5"], "name at least one result folder"),
        (["HERE"], "no SLO"),
        (["HERE", "slo.ttft_p95=5"], "unknown config key 'slo.ttft_p95'. Did you mean 'slo.ttft_p95_ms'?"),
        (["HERE", "slo=chatt"], "unknown slo 'chatt'. Did you mean 'chat'?"),
        (["HERE", "target=5"], "Did you mean 'target_rate'?"),
        (["HERE", "slo=chat", "target_rate=many"], "must be a number"),
        (["HERE", "slo=chat", "target_rate=0"], "above 0"),
        (["HERE", "slo=chat", "headroom=1"], "headroom"),
        (["HERE", "slo=chat", "recommend=yes"], "true or false"),
        (["/nowhere", "slo=chat"], "not a directory"),
        (["HERE", "slo=chat", "arrival=closed_loop", "arrival.concurrency=2", "workload=nano"], "closed loop"),
    ],
)
def test_a_wrong_question_is_one_line(
    measured_dir: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(measured_dir) if a == "HERE" else a for a in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = [text for text in lines if not re.search(r", \d+ s$", text)]  # a slow machine says what it is doing
    assert line.startswith("cb-plan: ")
    assert said in line


def test_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "price_per_gpu_hour" in capsys.readouterr().out


def test_advice_is_what_was_tried() -> None:
    """A step's prompts bind: what cutting them is worth is said from the trials, not against them."""
    plan: Any = SimpleNamespace(
        setup=SimpleNamespace(max_batch_tokens=2048),
        recommended=(Setting("max_batch_tokens", 2048, "", tried=True),),
    )
    binding = Binding("itl", "itl_p99_ms 51 > 50, and its longest steps hold 1,737 prompt tokens", cuttable=True)
    kept = words.binding_words(binding, 20.0, words.chunk_words(plan))
    assert kept.endswith("smaller max_batch_tokens than 2048, which would cut them, do not carry 5% more.")
    plan.recommended = (Setting("max_batch_tokens", 512, "", tried=True),)
    assert words.binding_words(binding, 20.0, words.chunk_words(plan)).endswith(": max_batch_tokens=512 cuts them.")
    plan.recommended = (Setting("max_batch_tokens", 2048, ""),)  # interrupted, or recommend=false
    assert words.binding_words(binding, 20.0, words.chunk_words(plan)).endswith("would cut them (not tried).")


def test_errors_are_those_of_the_medians_beside_them() -> None:
    rows = pd.DataFrame(
        {
            "condition": "nano ours",
            "metric": "ttft_p50_ms",
            "arm": "ours",
            "measured": [900.0, 1000.0, 1100.0],
            "predicted": [999.9, 900.0, 1000.2],
            "error": [0.11, -0.1, -0.09],
            "held_out": True,
        }
    )
    ((*_, measured, predicted, error, seen),) = words.validation_rows(rows)[1]
    assert (measured, predicted, error, seen) == ("1,000 (900–1,100)", "1,000", "+0.0%", "no")


@pytest.mark.parametrize(
    "given, said",
    [
        ("target_rate=inf", "target_rate must be above 0 requests/s and finite, got inf"),
        ("price_per_gpu_hour=inf", "price_per_gpu_hour must be above 0 and finite, got inf"),
        ("slo.itl_p99_ms=inf", "slo.itl_p99_ms must be above 0 ms and finite, or null for no limit, got inf"),
    ],
)
def test_what_is_not_finite_is_refused(
    measured_dir: Path, capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    assert main([str(measured_dir), "slo.ttft_p95_ms=150", given]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_its_step_log_says_so(
    measured_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(measured_dir, copy)
    (copy / "steps.parquet").write_bytes((copy / "steps.parquet").read_bytes()[:100])
    assert main([str(copy), "slo.ttft_p95_ms=150"]) == 2
    said = capsys.readouterr().err
    assert "none of the 2 measured runs of engine ours has its step log (steps.parquet cannot be read" in said
    assert len(said.strip().splitlines()) == 1
    (copy / "steps.parquet").unlink()
    assert main([str(copy), "slo.ttft_p95_ms=150"]) == 2
    assert "name the folder they were measured in, or measure again" in capsys.readouterr().err


def test_a_plan_takes_the_place_of_another(measured_dir: Path, tmp_path: Path) -> None:
    """Nothing of the plan before it is left beside one that found nothing."""
    asked = [str(measured_dir), "recommend=true", f"out={tmp_path}", "requests=60", "seeds=1"]
    assert main([*asked, "slo.ttft_p95_ms=150"]) == 0
    assert {"recommended.yaml", "at_capacity"} <= {path.name for path in tmp_path.iterdir()}
    assert main([*asked, "slo.ttft_p95_ms=0.001"]) == 1
    assert not {"recommended.yaml", "at_capacity"} & {path.name for path in tmp_path.iterdir()}


def test_a_plan_is_written_whole_though_signals_come(
    measured_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, came = write.plan_page, []

    def interrupted(*arguments: Any) -> str:
        for number in (signal.SIGINT, signal.SIGTERM):
            came.append(number)
            signal.raise_signal(number)
        return page(*arguments)

    monkeypatch.setattr(write, "plan_page", interrupted)
    asked = [str(measured_dir), "slo.ttft_p95_ms=150", "recommend=false", f"out={tmp_path}", "requests=60", "seeds=1"]
    assert main(asked) == 0
    assert came == [signal.SIGINT, signal.SIGTERM]
    assert (tmp_path / "plan.html").is_file()


def test_runs_of_two_models_are_not_planned_with(
    measured_dir: Path, make_measured: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_measured(tmp_path / "other", (6.0,))
    for table in ("runs", "environment", "config", "requests", "steps"):
        renamed = read_results(other).tables[table].assign(run_id="other")
        if table == "runs":
            renamed = renamed.assign(model="another")
        renamed.to_parquet(other / f"{table}.parquet", index=False)
    assert main([str(measured_dir), str(other), "slo.ttft_p95_ms=150", f"out={tmp_path / 'plan'}", *QUICK]) == 2
    assert "runs of several models (another, " in capsys.readouterr().err


def test_a_trace_of_two_requests_has_no_rate(
    measured_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "two.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,5,4\n2023-11-16 18:15:50.9951690,7,2\n"
    )
    text = [str(measured_dir), "slo.ttft_p95_ms=150", "workload=azure_2023", f"workload.path={trace}"]
    assert main(text) == 2
    assert "2 requests are too few to find a rate: at least 10" in capsys.readouterr().err
