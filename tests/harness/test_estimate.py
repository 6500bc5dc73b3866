"""How long a dry run says that runs may take: by what earlier ones took, on the same kind of device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import app, manifest, store, used_device
from harness.app import main
from harness.config import config_hash
from harness.estimate import History, Pace, PlannedRun, estimate, history, listing, planned_workload
from harness.manifest import JobState
from harness.metrics import compute_tables
from harness.plan import make_plan
from harness.record import Outcome, RequestRecord, RunRecord, TokenChunk
from harness.used_device import used_kinds

FULL = "allow_factorial=true"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fifty_tokens():
    """A request that generates 50 tokens in 10 s."""
    chunks = [TokenChunk(5_000_000_000 + k * 100_000_000, (k,)) for k in range(50)]
    return RequestRecord(
        "q0", 4, 50, t_sched_ns=0, t_submit_ns=0, t_done_ns=10**10, chunks=chunks, outcome=Outcome.OK_LENGTH
    )


def measured(folder, config, seconds, device="cpu"):
    """A run of ``config`` that generated 50 tokens in 10 of its ``seconds``."""
    names = {group: config[group]["name"] for group in ("engine", "model", "workload")}
    # of another process of the same settings, whose hash differs by something else
    environment = {"identity.config_hash": "h", "workload.spec": dict(planned_workload(config).spec)}
    record = RunRecord(
        {"run_id": "r", "device": device, **names},
        [fifty_tokens()],
        t_start_ns=0,
        t_end_ns=10**10,
        environment=environment,
    )
    store.write_result(folder, compute_tables(record))
    for state, minute in (("running", 0), ("ok", seconds // 60)):
        manifest.append(folder, JobState("a", "h", (), state, f"2026-01-01T00:{minute:02d}:00+00:00"))


def test_what_another_kind_of_device_took_is_told_and_no_measure():
    arms = ["-m", "engine='null'", "model=tiny-llama", "workload.requests=2,4", "arrival=burst,constant", FULL]
    alike, _, burst, constant = (job.config for job in make_plan(arms).jobs)
    measured(Path("results/runs/gpu"), alike, seconds=120, device="cuda:0")
    known = history(Path("results"))
    assert estimate(alike, known, "cuda").seconds == 120.0
    found = estimate(alike, known, "cpu", planned_workload(alike))
    assert (found.seconds, found.basis) == (None, "never measured on cpu here (2.0 min on cuda)")
    assert estimate(burst, known, "cuda", planned_workload(burst)).basis.startswith("roughly: ")
    found = estimate(burst, known, "cpu", planned_workload(burst))
    assert (found.seconds, found.basis[:28]) == (None, "never measured on cpu here (")
    found = estimate(constant, known, "cpu", planned_workload(constant))  # four requests, two a second
    assert (found.seconds, found.is_floor) == (1.5, True)
    assert found.basis.startswith("arrivals alone, never measured on cpu here (")
    same = replace(known, same={("cuda", config_hash(burst)): [23.0]})
    assert estimate(burst, same, "cpu", planned_workload(burst)).basis == "never measured on cpu here (23 s on cuda)"
    measured(Path("results/runs/cpu"), alike, seconds=300)  # the same config: each kind has its own
    known = history(Path("results"))
    assert known.same == {("cuda", "h"): [120.0], ("cpu", "h"): [300.0]}
    assert [estimate(alike, known, kind).seconds for kind in ("cuda", "cpu")] == [120.0, 300.0]


def test_runs_that_do_not_say_on_which_device_are_no_measure():
    (config,) = make_plan(["engine='null'", "model=tiny-llama"]).configs
    measured(Path("results/runs/old"), config, seconds=60, device=None)
    assert history(Path("results")).same == {}


def test_tables_that_were_never_joined_say_on_which_device_their_runs_were():
    (config,) = make_plan(["engine='null'", "model=tiny-llama"]).configs
    measured(Path("results/sweeps/e/s/a"), config, seconds=60)
    Path("results/sweeps/e/s/a", manifest.FILE).rename("results/sweeps/e/s/manifest.jsonl")
    assert history(Path("results")).same == {("cpu", "h"): [60.0]}


def test_the_device_of_a_dry_run_is_the_one_that_its_runs_would_use(monkeypatch):
    arms = make_plan(["-m", "engine=ours,'null'", "model=tiny-llama", "measure.device=auto,cpu,cuda:1", FULL]).jobs
    configs = [job.config for job in arms]
    asked = []

    def ask(module, jobs, env):
        asked.extend(jobs)
        return used_device.names(jobs)

    monkeypatch.setattr(used_device, "ask", ask)
    monkeypatch.setattr(used_device, "gpu_count", lambda: 0)
    kinds = dict(
        zip([(c["engine"]["name"], c["measure"]["device"]) for c in configs], used_kinds(configs), strict=True)
    )
    assert kinds == {
        ("ours", "auto"): "cpu", ("ours", "cpu"): "cpu", ("ours", "cuda:1"): "cuda",
        ("null", "auto"): "cpu", ("null", "cpu"): "cpu", ("null", "cuda:1"): "cpu",
    }  # fmt: skip
    assert {job["device"] for job in asked} == {"cuda:1"}
    asked.clear()
    monkeypatch.setattr(used_device, "gpu_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert used_kinds(configs).count("cuda") == 2
    assert {job["device"] for job in asked} == {"auto", "cuda:1"}


def test_other_requests_or_arrivals_of_a_workload_of_that_name_are_not_alike():
    def planned(*overrides):
        (config,) = make_plan(["engine='null'", "model=tiny-llama", *overrides]).configs
        return config

    measured(Path("results/runs/two"), planned("workload.requests=2"), seconds=60)
    known = history(Path("results"))
    for overrides in (["workload.requests=2", "engine.ttft_ms=7"], ["workload.requests=2", "workload.seed=3"]):
        assert estimate(planned(*overrides), known, "cpu").basis.startswith("same engine, model, workload and arrivals")
    many = planned("workload.requests=2000")
    tokens = sum(r.max_new_tokens for r in planned_workload(many).requests)
    found = estimate(many, known, "cpu", planned_workload(many))
    assert found.basis.startswith("roughly")
    assert found.seconds == pytest.approx(50 + tokens / 5)
    slow = planned("workload.requests=200", "arrival=poisson", "arrival.rate=0.001")
    requests = planned_workload(slow).requests
    assert estimate(slow, known, "cpu", planned_workload(slow)).seconds == pytest.approx(50 + requests[-1].due_s)
    # other draws of the same settings: a median below the last arrival is none
    short = replace(known, same={("cpu", config_hash(slow)): [1.0]})
    assert estimate(slow, short, "cpu", planned_workload(slow)).seconds == requests[-1].due_s


def test_minutes_come_from_the_same_config_then_from_alike_ones_then_from_the_arrivals():
    plan = make_plan(["-m", "engine='null'", "model=tiny-llama", "engine.ttft_ms=10,20,30", "arrival=constant"])
    first, second, third = (job.config for job in plan.jobs)
    measured(Path("results/runs/alike"), second, seconds=120)
    known = replace(history(Path("results")), same={("cpu", config_hash(first)): [60.0, 90.0, 600.0]})
    assert (estimate(first, known, "cpu").seconds, estimate(first, known, "cpu").is_floor) == (90.0, False)
    assert (estimate(second, known, "cpu").seconds, estimate(second, known, "cpu").basis) == (
        120.0,
        "same engine, model, workload and arrivals: median of 1 earlier run below results",
    )
    bare = estimate(third, History({}, {}, {}, Path("results")), "cpu", planned_workload(third))
    assert (bare.seconds, bare.is_floor) == (23 / 2, True)  # 24 requests, two a second, the first at 0
    lines = listing([PlannedRun(j.name, j.config, "cpu") for j in plan.jobs], known, finished=2)
    assert "1.5 min" in lines[0]
    assert lines[-1] == "3 runs of 3 configs (2 more are measured already): about 5.5 min one after the other"


def test_nothing_is_promised_of_what_was_never_measured():
    plan = make_plan(["-m", "engine='null'", "model=tiny-llama", "arrival=burst,constant", "engine.ttft_ms=10"])
    runs = [PlannedRun(j.name, j.config, "cpu") for j in plan.jobs]
    lines = listing(runs, History({}, {}, {}, Path("results")))  # 24 requests: at once, and two a second
    assert "unknown  never measured here" in lines[0]
    assert ">= 12 s  arrivals alone" in lines[1]
    assert lines[-1].endswith(": at least 12 s one after the other, and 1 of unknown length")
    assert listing(runs[:1], History({}, {}, {}, Path("results")))[-1].endswith(
        ": how long is unknown, nothing like it was measured here"
    )


def test_another_workload_is_estimated_by_its_tokens_and_never_below_its_arrivals():
    arms = ["-m", "engine='null'", "model=tiny-llama", "workload=uniform_burst", "arrival=burst,constant"]
    burst, constant = (job.config for job in make_plan(arms).jobs)  # 24 requests of 64 tokens: 1,536
    paces = {
        ("cpu", "null", "tiny-llama"): [Pace(7.0, 100.0), Pace(5.0, 768.0)],
        ("cpu", "ours", "tiny-llama"): [Pace(0.0, 1.0)],
    }
    known = History({}, {}, paces, Path("results"))
    found = estimate(burst, known, "cpu", planned_workload(burst))
    assert (found.seconds, found.is_floor) == (5.0 + 2.0, False)
    assert found.basis == "roughly: 1,536 tokens, same engine and model on another workload below results"
    assert estimate(constant, known, "cpu", planned_workload(constant)).seconds == 5.0 + 23 / 2  # two a second


def test_each_run_of_a_process_counts_and_its_start_once():
    """24 requests, two a second, are 11.5 s; three times in a process 34.5 s."""
    arms = ["-m", "engine='null'", "model=tiny-llama", "workload=uniform_burst", "arrival=burst,constant"]
    burst, constant = (job.config for job in make_plan([*arms, "measure.runs_per_process=3"]).jobs)
    none = History({}, {}, {}, Path("results"))
    assert estimate(constant, none, "cpu", planned_workload(constant)).seconds == 3 * 23 / 2
    paces = replace(none, paces={("cpu", "null", "tiny-llama"): [Pace(5.0, 768.0)]})
    found = estimate(burst, paces, "cpu", planned_workload(burst))  # 1,536 tokens
    assert (found.seconds, found.basis[:24]) == (5.0 + 3 * 2.0, "roughly: 4,608 tokens, s")
    assert estimate(burst, paces, "cpu", planned_workload(burst), joins=True).seconds == 3 * 2.0
    assert estimate(constant, paces, "cpu", planned_workload(constant)).seconds == 5.0 + 3 * 23 / 2
    lines = listing([PlannedRun("a", burst, "cpu"), PlannedRun("b", constant, "cpu", joins=True)], paces)
    assert lines[-1] == "2 runs of 2 configs, measured 6 times in all: about 46 s one after the other"


def test_alike_are_processes_with_as_many_runs_and_one_that_joins_leaves_out_the_start():
    def planned(*overrides):
        (config,) = make_plan(["engine='null'", "model=tiny-llama", *overrides]).configs
        return config

    measured(Path("results/runs/two"), planned("workload.requests=2"), seconds=60)
    known = history(Path("results"))
    once, twice = planned("workload.requests=2"), planned("workload.requests=2", "measure.runs_per_process=2")
    assert (estimate(once, known, "cpu").seconds, estimate(once, known, "cpu", joins=True).seconds) == (60.0, 10.0)
    assert not estimate(twice, known, "cpu", planned_workload(twice)).basis.startswith("same engine, model, workload")
    tokens = sum(r.max_new_tokens for r in planned_workload(twice).requests)
    assert estimate(twice, known, "cpu", planned_workload(twice)).seconds == pytest.approx(50 + 2 * tokens / 5)


def test_a_dry_run_knows_which_runs_share_a_process(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(app, "listing", lambda runs, known, finished: seen.extend(runs) or [])
    sweep = ["-m", "engine='null'", "model=tiny-llama", "workload.seed=1,2", "measure.repeats=2"]
    assert main([*sweep, "measure.share_process=true", "measure.reference_engine=null", "dry_run=true"]) == 0
    assert [run.joins for run in seen] == [False, True, False, True]
    seen.clear()
    assert main([*sweep, "measure.reference_engine=null", "dry_run=true"]) == 0
    assert [run.joins for run in seen] == [False] * 4


def test_the_repeats_of_a_single_run_are_told_apart(tmp_path):
    """One job of 90 s with three processes: 30 s each, of which 10 are measured."""
    folder, runs = tmp_path / "results" / "runs" / "a", []
    for repeat in range(3):
        names = {"engine": "ours", "model": "m", "workload": "w", "device": "cpu"}
        identity = {"run_id": f"r{repeat}", "repeat": repeat, "process": f"p{repeat}", "iteration": 0, **names}
        environment = {"identity.config_hash": "h"}
        record = RunRecord(identity, [fifty_tokens()], t_start_ns=0, t_end_ns=10**10, environment=environment)
        store.write_result(folder / f"repeat-{repeat}", compute_tables(record))
        runs.append(folder / f"repeat-{repeat}")
    store.write_result(folder, store.combine(runs))
    for state, second in (("running", 0), ("ok", 90)):
        time = f"2026-01-01T00:0{second // 60}:{second % 60:02d}+00:00"
        manifest.append(folder, JobState("", "h", (), state, time))
    found = history(tmp_path / "results")
    assert found.same == {("cpu", "h"): [30.0]}
    assert found.paces == {("cpu", "ours", "m"): [Pace(20.0, 5.0)]}


def test_paces_come_from_tables_and_manifest(tmp_path):
    identity = {"run_id": "r", "engine": "ours", "model": "m", "workload": "w", "device": "cpu"}
    environment = {"identity.config_hash": "h"}
    record = RunRecord(identity, [fifty_tokens()], t_start_ns=0, t_end_ns=10_000_000_000, environment=environment)
    folder = tmp_path / "results" / "reference" / "cpu" / "s" / "1"
    store.write_result(folder, compute_tables(record))
    for state, minute in (("running", 0), ("ok", 1)):
        manifest.append(folder, JobState("a", "h", (), state, f"2026-01-01T00:0{minute}:00+00:00"))
    found = history(tmp_path / "results")
    assert found.same == {("cpu", "h"): [60.0]}
    assert found.alike == {}  # how its requests were built was not recorded
    assert found.paces == {("cpu", "ours", "m"): [Pace(50.0, 5.0)]}  # 50 tokens in 10 of the 60 seconds


def test_times_of_a_trace_are_not_guessed():
    config = make_plan(["engine='null'", "workload=shared_prefix", "arrival=as_recorded"]).configs[0]
    found = estimate(config, History({}, {}, {}, Path("results")), "cpu", planned_workload(config))
    assert (found.seconds, found.basis) == (None, "never measured here")
    assert "unknown" in listing([PlannedRun("x", config, "cpu")], History({}, {}, {}, Path("results")))[0]
