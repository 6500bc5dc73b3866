"""cb-tune: the study goes on where it stopped, memory that runs out moves one variable back, and the engine decides."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from harness.report.read import read_results
from harness.simulate import EngineSetup
from harness.slo import Slo
from harness.tune import command
from harness.tune.app import main
from harness.tune.confirm import Measured, confirm
from harness.tune.engine_runs import check_machine, headroom, job_config, read_measured
from harness.tune.space import Variable, baseline, changes, retreat, variables
from harness.tune.study import choose, search_settings

BASE = {"max_batch_tokens": 256, "max_requests_per_batch": 64, "scheduler_type": "fifo", "safety_margin": 0.0}
ORDER = tuple(BASE)


def test_the_space_holds_the_baseline(by_hand: SimpleNamespace) -> None:
    setup = by_hand.setup(max_batch_tokens=512, max_requests_per_batch=40, safety_margin=0.07)
    base = baseline(setup)
    assert base == {
        "max_batch_tokens": 512,
        "max_requests_per_batch": 40,
        "scheduler_type": "fifo",
        "safety_margin": 0.07,
    }
    for variable in variables(setup):
        assert base[variable.name] in variable.values


def test_m_fail_02_the_variable_changed_last_goes_back() -> None:
    """M-fail-02: one variable a time, the newest first, until the baseline is reached."""
    settings = {**BASE, "max_batch_tokens": 1024, "safety_margin": 0.3}
    first = retreat(settings, BASE, ORDER)
    assert first is not None
    assert (first.variable, first.given_up) == ("safety_margin", 0.3)
    second = retreat(first.settings, BASE, ORDER)
    assert second is not None
    assert (second.variable, changes(second.settings, BASE)) == ("max_batch_tokens", {})
    assert retreat(second.settings, BASE, ORDER) is None


MARGIN, TOKENS = {**BASE, "safety_margin": 0.3}, {**BASE, "max_batch_tokens": 512}
BOTH = {**TOKENS, "safety_margin": 0.3}


@pytest.mark.parametrize(
    ("order", "chosen"),
    [
        (
            [(BOTH, 10.2), (MARGIN, 10.1), (BASE, 9.8)],
            (MARGIN, 10.1),
        ),  # not told apart, and changes less
        ([(MARGIN, 10.1), (BOTH, 10.05), (BASE, 10.0)], (BASE, 10.0)),  # 1 % is no reason to change anything
        ([(BOTH, 10.25), (MARGIN, 10.1), (BASE, 10.0)], (BOTH, 10.25)),  # MARGIN alone is no better than the baseline
        ([(TOKENS, 11.0), (MARGIN, 10.9), (BASE, 10.0)], (MARGIN, 10.9)),  # one change each: 256 tokens, not 512
        ([(BOTH, 10.2), (MARGIN, 10.1)], (MARGIN, 10.1)),
        ([(MARGIN, 10.2), (BASE, 0.0)], (MARGIN, 10.2)),
    ],
)
def test_what_bisection_cannot_tell_apart_is_decided_by_what_it_costs(order: Any, chosen: Any) -> None:
    """It ends within 2 %: first the baseline, then fewer changes, then less memory."""
    found = choose(order, BASE)
    assert (found.settings, found.value) == chosen
    assert (found.why is None) == (chosen == order[0])


def test_what_is_passed_over_is_said() -> None:
    assert choose([(BOTH, 10.2), (MARGIN, 10.1)], BASE).why == (
        "max_batch_tokens=512, safety_margin=0.3 reached 10.2, and a search that ends within 2% cannot tell 10.1 from "
        "it: safety_margin=0.3 is chosen, which changes less"
    )
    assert choose([(MARGIN, 10.1), (BASE, 10.0)], BASE).why == (
        "safety_margin=0.3 reached 10.1, and a search that ends within 2% cannot tell 10 from it: the measured "
        "settings stay"
    )
    assert str(choose([(TOKENS, 11.0), (MARGIN, 10.9)], BASE).why).endswith("is chosen, which needs less memory")


def engine(values: Mapping[str, Any], noise: float = 0.0, shortage: Any = None) -> Any:
    """Answers by setting; the n-th run differs by ``noise`` up or down. Keeps what it was asked."""
    asked: list[dict[str, Any]] = []

    def measure(changed: Mapping[str, Any], repeat: int) -> Measured:
        asked.append(dict(changed))
        short = None if shortage is None else shortage(changed)
        if short:
            return Measured(None, False, short, "out of memory")
        value = values["changed"] if changed else values["base"]
        return Measured(value * (1 + noise * (-1) ** len(asked)), True)

    measure.asked = asked  # type: ignore[attr-defined]
    return measure


WIDE = {**BASE, "max_batch_tokens": 1024}


def test_a_clear_gain_is_taken_after_three_pairs() -> None:
    measure = engine({"base": 1.0, "changed": 1.3}, noise=0.01)
    found = confirm(WIDE, BASE, ORDER, measure, repeats=9)
    assert (found.verdict, found.settings, len(found.ratios)) == ("better", WIDE, 3)
    assert len(measure.asked) == 9
    assert measure.asked[:3] == [{}, {"max_batch_tokens": 1024}, {}]
    assert found.low is not None
    assert 0.2 < found.low < 0.31


def test_a_gain_inside_the_noise_is_not() -> None:
    found = confirm(WIDE, BASE, ORDER, engine({"base": 1.0, "changed": 1.01}, noise=0.05), repeats=4)
    assert found.verdict == "indistinguishable"
    assert found.settings == BASE
    assert "noise floor" in found.reason


def test_a_gain_below_what_the_search_can_tell_is_not_taken_however_quiet_the_engine() -> None:
    found = confirm(WIDE, BASE, ORDER, engine({"base": 1.0, "changed": 1.01}, noise=0.0001), repeats=4)
    assert (found.verdict, found.settings, len(found.ratios)) == ("indistinguishable", BASE, 3)
    assert "noise floor 0.0%; less than 2% is no reason to change anything" in found.reason


@pytest.mark.parametrize(("sent", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_an_interrupt_says_that_the_study_is_kept(
    sent: signal.Signals,
    name: str,
    measured_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "parse", lambda arguments, settings: os.kill(os.getpid(), sent))
    assert main([str(measured_dir)]) == 128 + sent
    said = f"cb-tune: interrupted by {name}; finished trials are kept, the same command goes on with them\n"
    assert capsys.readouterr().err == said


def test_a_loss_is_told() -> None:
    found = confirm(WIDE, BASE, ORDER, engine({"base": 1.0, "changed": 0.7}, noise=0.01), repeats=5)
    assert (found.verdict, found.settings) == ("worse", BASE)


def test_m_fail_02_memory_that_runs_out_moves_back_and_is_measured_again() -> None:
    """M-fail-02: 1024 tokens with 0.3 runs out of memory; after the margin went back it still does; the order of work,
    changed before, stays and is confirmed in runs of its own."""
    candidate = {
        "max_batch_tokens": 1024,
        "max_requests_per_batch": 64,
        "scheduler_type": "prefill_first",
        "safety_margin": 0.3,
    }
    order = ("scheduler_type", "max_batch_tokens", "safety_margin", "max_requests_per_batch")
    measure = engine(
        {"base": 1.0, "changed": 1.3},
        noise=0.01,
        shortage=lambda changed: "oom_prefill" if changed.get("max_batch_tokens") == 1024 else None,
    )
    found = confirm(candidate, BASE, order, measure, repeats=4)
    assert [r.variable for r in found.retreats] == ["safety_margin", "max_batch_tokens"]
    assert changes(found.settings, BASE) == {"scheduler_type": "prefill_first"}
    assert found.verdict == "better"
    remedies = [changed for changed in measure.asked if changed]
    assert [len(r) for r in remedies[:3]] == [3, 2, 1]


def test_nothing_but_the_baseline_fits() -> None:
    measure = engine({"base": 1.0}, shortage=lambda changed: "oom_load" if changed else None)
    found = confirm(WIDE, BASE, ORDER, measure, 3)
    assert (found.verdict, found.settings) == ("failed", BASE)
    assert "max_batch_tokens=1024" in found.reason


def test_a_candidate_that_breaks_the_slo_is_not_taken() -> None:
    def measure(changed: Mapping[str, Any], repeat: int) -> Measured:
        return Measured(1.0, not changed)

    assert confirm(WIDE, BASE, ORDER, measure, 3).verdict == "breaks_slo"


def test_headroom_is_that_of_the_tightest_limit(measured_dir: Path) -> None:
    row = read_results(measured_dir).runs.iloc[0]
    slo = Slo(ttft_p95_ms=2 * row["ttft_sched_p95_ms"], itl_p99_ms=3 * row["itl_p99_ms"])
    assert headroom(row, slo) == pytest.approx(2.0)
    assert headroom(row, Slo()) is None
    read = read_measured(measured_dir, slo)
    assert (read.value, read.shortage, read.slo_met) == (pytest.approx(2.0), None, False)  # no SLO was decided then


def test_a_run_that_ended_before_it_was_measured_has_no_value(measured_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(measured_dir, tmp_path / "run")
    runs = pd.read_parquet(tmp_path / "run" / "runs.parquet")
    runs["status"], runs["error"], runs["n_requests"] = (
        "failed",
        "ended by SIGTERM",
        pd.array([None] * len(runs), "Int64"),
    )
    runs.to_parquet(tmp_path / "run" / "runs.parquet")
    read = read_measured(tmp_path / "run", Slo(ttft_p95_ms=1))
    assert (read.value, read.shortage, read.error) == (None, None, "ended by SIGTERM")


def test_a_gpus_results_are_not_confirmed_on_another_machine(measured_dir: Path) -> None:
    results = read_results(measured_dir)
    check_machine(results, "run0", [])  # measured on a CPU: no name is known
    named = pd.DataFrame([{"run_id": "run0", "key": "gpu.name", "value": '"NVIDIA H200 MIG 1g.18gb"'}])
    results = replace(results, tables={**results.tables, "environment": named})
    check_machine(results, "run0", ["NVIDIA H200"])
    with pytest.raises(ValueError, match=r"measured on NVIDIA H200.*, this machine has no GPU: .* confirm=false"):
        check_machine(results, "run0", [])


def test_runs_without_a_recorded_configuration_cannot_be_repeated(measured_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"does not state its model, .* confirm=false"):
        job_config(read_results(measured_dir), "run0", Slo(ttft_p95_ms=1), 1.0, 50)


def test_a_study_goes_on_where_it_stopped(
    measured_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    out = tmp_path / "tune"
    arguments = [
        str(measured_dir),
        "slo.ttft_p95_ms=150",
        "slo.itl_p99_ms=60",
        "confirm=false",
        "requests=60",
        f"out={out}",
    ]
    assert main([*arguments, "trials=4"]) == 0
    assert "trial 0:" in (first := capsys.readouterr().out)
    assert "(baseline)" in first
    assert main([*arguments, "trials=7"]) == 0
    second = capsys.readouterr().out
    assert "4 of 7 trials are there" in second
    assert "trial 4:" in second
    assert "trial 3:" not in second
    settings = yaml.safe_load((out / "tuned.yaml").read_text())
    assert settings["page_size"] == 16
    assert "not confirmed" in (text := (out / "tuned.yaml").read_text()) or "the measured value" in text
    summary = json.loads((out / "tuning.json").read_text())
    assert summary["simulated_best_request_s"] >= summary["baseline_request_s"] > 0
    assert main([*arguments[:1], "slo.ttft_p95_ms=9", "confirm=false", "requests=60", f"out={out}"]) == 2
    assert "another question" in capsys.readouterr().err


class Insists:
    """A study whose sampler suggests the same again and again; what is put to it comes first."""

    def __init__(self, suggests: dict[str, Any]) -> None:
        self.suggests = suggests
        self.trials: list[Any] = []
        self.queue: list[dict[str, Any]] = []

    def enqueue_trial(self, params: dict[str, Any]) -> None:
        self.queue.append(params)

    def ask(self) -> Any:
        chosen = self.queue.pop(0) if self.queue else dict(self.suggests)
        return SimpleNamespace(params=chosen, suggest_categorical=lambda name, values: chosen[name])

    def tell(self, trial: Any, value: float, state: Any) -> None:
        self.trials.append(SimpleNamespace(params=trial.params, value=value, state=state))


def test_no_engine_is_tried_twice(by_hand: SimpleNamespace) -> None:
    """Also where only places differ that the tokens of a step cannot fill: two tokens a step serve two requests."""
    pytest.importorskip("optuna")
    space = (
        Variable("max_batch_tokens", (2, 16)),
        Variable("max_requests_per_batch", (2, 4, 8)),
        Variable("scheduler_type", ("fifo",)),
        Variable("safety_margin", (0.0,)),
    )
    setup, tried = by_hand.setup(), list[dict[str, Any]]()
    base = {"max_batch_tokens": 16, "max_requests_per_batch": 8, "scheduler_type": "fifo", "safety_margin": 0.0}
    simulated: list[tuple[int, int]] = []

    def capacity_of(other: EngineSetup) -> Any:
        simulated.append((other.max_batch_tokens, other.max_requests_per_batch))
        return SimpleNamespace(by_seed=(float(len(simulated)),))

    study = Insists(base)
    search_settings(study, space, base, setup, capacity_of, 99, lambda n, s, v: tried.append(dict(s)))  # type: ignore[arg-type]
    assert sorted(simulated) == [(2, 2), (16, 2), (16, 4), (16, 8)]  # of six settings four engines
    assert tried[0] == base
    assert len(tried) == 4
    again = len(simulated)
    search_settings(study, space, base, setup, capacity_of, 4, lambda n, s, v: tried.append(dict(s)))  # type: ignore[arg-type]
    assert len(simulated) == again


def test_without_optuna_it_says_what_to_install(
    measured_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main([str(measured_dir), "slo.ttft_p95_ms=150", f"out={tmp_path}"]) == 2
    assert 'pip install "cb-bench[tune]"' in capsys.readouterr().err


def test_no_slo_is_refused(measured_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(measured_dir)]) == 2
    assert "no SLO" in capsys.readouterr().err
