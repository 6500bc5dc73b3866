from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from harness import manifest
from harness.store import read_result

PROJECT = Path(__file__).resolve().parents[2]


def only(paths):
    (path,) = paths
    return path


def test_one_run_writes_every_table_and_names_its_paths_last(bench, tmp_path):
    done = bench("engine=static", "engine.wave=4", "slo=batch")
    assert done.returncode == 0, done.stderr
    folder = only((tmp_path / "results" / "runs").iterdir())
    tables = read_result(folder)
    run = tables["runs"].iloc[0]
    assert (run.engine, run.model, run.workload, run.status, run.n_requests, run.n_ok) == (
        "static", "tiny-llama", "quickstart", "ok", 6, 6,
    )  # fmt: skip
    asked = tables["requests"]["max_new_tokens"].sum()
    assert run.generated_tokens == asked == tables["tokens"]["token_ids"].map(len).sum()
    assert run.load_s > 0
    assert run.warmup_s > 0
    assert run.peak_rss_bytes > 0
    assert len(tables["telemetry"]) >= 1
    config = dict(zip(tables["config"]["field"], tables["config"]["value"], strict=True))
    assert config["wave"] == "4"
    environment = dict(zip(tables["environment"]["key"], tables["environment"]["value"], strict=True))
    assert json.loads(environment["command_line"])[0] == "cb-bench"
    assert json.loads(environment["workload.spec"])["workload"]["requests"] == 6
    for when in ("at_start", "before_first_request"):
        assert int(environment[f"memory.free_{when}_bytes"]) > 0
    for hashed in ("setup_sha256", "config.resolved_sha256", "workload.prompt_ids_sha256"):
        assert len(json.loads(environment[hashed])) == 64
    assert (run.steady_state, run.n_good) == ("burst", 6)
    assert json.loads(run.slo)["name"] == "batch"
    assert len(tables["tails"]) >= 2
    assert [s.state for s in manifest.latest(folder)] == ["ok"]
    *_, results, report = done.stdout.strip().splitlines()
    assert results == f"results: {folder.relative_to(tmp_path)}"
    assert (tmp_path / report.removeprefix("report:").strip()).is_file()


def test_sweep_compares_tokens_and_arms_get_the_same_requests(bench, tmp_path):
    done = bench("-m", "engine=static,transformers_small,ours_small")
    assert done.returncode == 0, done.stderr
    root = only((tmp_path / "results" / "sweeps" / "engine").iterdir())
    runs = read_result(root)["runs"]
    assert list(runs["engine"]) == ["static", "transformers", "ours"]
    assert list(runs["arm"]) == ["static", "transformers_small", "ours_small"]
    assert set(runs["variable"]) == {"engine"}
    assert runs["workload_hash"].nunique() == 1
    assert runs["run_id"].nunique() == 3
    assert runs["tokens_match"].isna().tolist() == [True, False, False]
    assert runs["tokens_match"][1:].tolist() == [True, True]
    assert "token ids: transformers equal to static in 1 of 1 runs" in done.stdout
    assert "token ids: ours equal to static in 1 of 1 runs" in done.stdout


def test_a_known_schedule_comes_back_and_no_weights_are_loaded(bench, tmp_path):
    """Unquoted ``null`` is the engine's name; its tokens are of no vocabulary, so none are compared."""
    done = bench("engine=null", "engine.ttft_ms=30", "engine.ttft_step_ms=0", "engine.itl_ms=5", "arrival=burst")
    assert done.returncode == 0, done.stderr
    tables = read_result(only((tmp_path / "results" / "runs").iterdir()))
    run = tables["runs"].iloc[0]
    assert (run.engine, run.status, run.n_ok) == ("null", "ok", 6)
    assert run.isna()[["device", "load_s", "tokens_match"]].all()
    assert (tables["requests"]["ttft_ms"] >= 30).all()
    assert run.generated_tokens == tables["requests"]["max_new_tokens"].sum()
    assert len(tables["calibration"]) == 1
    environment = dict(zip(tables["environment"]["key"], tables["environment"]["value"], strict=True))
    assert environment["model.weight_hash"] == environment["model.device"] == "null"
    assert json.loads(environment["model.parameters"]) > 0


def test_b19_a_failed_job_has_its_row_and_the_others_run(bench, tmp_path):
    """A cache too small and one that means nothing, on each side of a good job: three rows, two failed, each with its
    traceback in its own log; what can be known beforehand is said."""
    done = bench("-m", "engine=ours", "engine.page_size=4", "engine.num_blocks=1,32,0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    root = only((tmp_path / "results" / "sweeps" / "engine.num_blocks").iterdir())
    runs = read_result(root)["runs"]
    assert list(runs["status"]) == ["failed", "ok", "failed"]
    assert list(runs["arm"]) == ["1", "32", "0"]
    assert "num_blocks" in runs["error"][2]
    assert runs["error"].isna().tolist() == [False, True, False]
    assert runs["ttft_p50_ms"].isna().tolist() == [True, False, True]
    states = manifest.latest(root)
    assert [s.state for s in states] == ["failed", "ok", "failed"]
    assert [next(o for o in s.overrides if "num_blocks" in o) for s in states] == [
        f"engine.num_blocks={n}" for n in (1, 32, 0)
    ]  # fmt: skip
    for state, bad in zip(states, (True, False, True), strict=True):
        assert ("Traceback" in (root / state.job / "run.log").read_text()) is bad
    assert (root / "report.html").is_file()
    assert done.stderr.count("cb-bench: failed: ") == 2
    assert "cb-bench: will fail: engine ours: num_blocks must be an integer >= 1" in done.stderr


def test_repeats_are_processes_of_their_own(bench, tmp_path):
    done = bench("engine=static", "measure.repeats=2")
    assert done.returncode == 0, done.stderr
    folder = only((tmp_path / "results" / "runs").iterdir())
    runs = read_result(folder)["runs"]
    assert list(runs["repeat"]) == [0, 1]
    assert runs["workload_hash"].nunique() == 1
    assert sorted(p.name for p in folder.glob("repeat-*")) == ["repeat-0", "repeat-1"]
    assert runs["process"].nunique() == 2
    assert not [p for p in psutil.process_iter(["cwd", "status"]) if p.info["cwd"] == str(tmp_path)]


def test_a_run_draws_what_a_process_started_by_itself_would_draw(bench, tmp_path):
    """Sampled tokens without a seed of the request's own, of two runs of one server and of a fresh interpreter."""
    done = bench("engine=static", "generation.do_sample=true", "measure.repeats=2", "report=false")
    assert done.returncode == 0, done.stderr
    folder = only((tmp_path / "results" / "runs").iterdir())
    spec = json.loads((folder / "repeat-0" / "job.json").read_text())
    (tmp_path / "alone").mkdir()
    (tmp_path / "job.json").write_text(json.dumps(spec | {"out": str(tmp_path / "alone")}))
    code = "import sys; from harness.child import main; sys.exit(main(['1', 'job.json']))"
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True)
    folders = (folder / "repeat-0", folder / "repeat-1", tmp_path / "alone")
    first, second, alone = ([list(ids) for ids in read_result(f)["tokens"]["token_ids"]] for f in folders)
    assert first == second == alone
    assert len({tuple(ids[:3]) for ids in first}) > 1


def test_a_run_out_of_time_keeps_what_it_measured(bench, tmp_path):
    """Requests due after the timeout stay unfinished; those before it keep their tokens."""
    done = bench(
        "engine=static", "engine.wave=1", "arrival=constant", "arrival.rate=0.5", "measure.timeout_s=5"
    )  # fmt: skip
    assert done.returncode == 1
    tables = read_result(only((tmp_path / "results" / "runs").iterdir()))
    run = tables["runs"].iloc[0]
    assert run.status == "timeout"
    assert "requests unfinished after measure.timeout_s=5" in run.error
    outcomes = tables["requests"]["outcome"].value_counts()
    assert outcomes["unfinished"] >= 3
    assert outcomes["ok_length"] >= 1
    assert run.n_ok == outcomes["ok_length"]


def test_an_interrupted_run_keeps_the_requests_that_had_ended(start_bench, tmp_path):
    process = start_bench("engine=ours_small", "arrival=constant", "arrival.rate=0.5")
    give_up = time.monotonic() + 100
    while not any("== measuring" in log.read_text() for log in tmp_path.glob("results/runs/*/run.log")):
        assert time.monotonic() < give_up
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    time.sleep(3)  # of the requests due at 0, 2, … 10 s the first has ended, the last has not been sent
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    folder = only((tmp_path / "results" / "runs").iterdir())
    tables = read_result(folder, ("runs", "requests"))
    outcomes = list(tables["requests"]["outcome"])
    assert (outcomes[0], outcomes[-1]) == ("ok_length", "unfinished")
    ended = len(outcomes) - outcomes.count("unfinished")
    assert "cb-bench: interrupted by SIGTERM; the tables of" in said
    assert f" hold {ended} of 6 requests" in said
    assert f"interrupted after {ended} of 6 requests" in said
    assert "failed" not in said
    assert "Traceback" not in said
    run = tables["runs"].iloc[0]
    assert (run.status, run.error) == ("interrupted", f"interrupted by SIGTERM: {6 - ended} of 6 requests unfinished")
    assert [s.state for s in manifest.latest(folder)] == ["interrupted"]


def measuring(start_bench, tmp_path):
    """A command whose requests are being answered, and the journal of its run."""
    process = start_bench("engine=null", "engine.itl_ms=200", "arrival=constant", "arrival.rate=2")
    give_up = time.monotonic() + 100
    while not (found := [j for j in tmp_path.glob("results/runs/*/.journal") if j.stat().st_size > 12_000]):
        assert time.monotonic() < give_up
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    return process, only(found)


def test_a_killed_run_keeps_what_it_had_measured(start_bench, tmp_path):
    """As the kernel's OOM killer does it: SIGKILL to the measured process while requests are being answered."""
    process, journal = measuring(start_bench, tmp_path)
    (server,) = psutil.Process(process.pid).children()
    (child,) = server.children()
    child.kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "SIGKILL while measuring (out of memory?" in said
    tables = read_result(journal.parent)
    run = tables["runs"].iloc[0]
    assert run.status == "failed"
    assert re.search(r"SIGKILL .*; \d of 6 requests had ended$", run.error)
    assert run.n_unfinished > 0
    assert tables["requests"]["output_tokens"].sum() > 0
    assert len(tables["telemetry"]) > 0
    assert not journal.exists()


def test_a_run_whose_command_was_killed_writes_what_it_had_measured(start_bench, tmp_path):
    """SIGKILL to the command itself: nobody is left to write the row but the measured process."""
    process, journal = measuring(start_bench, tmp_path)
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    tables = read_result(journal.parent)
    run = tables["runs"].iloc[0]
    assert run.status == "interrupted"
    assert re.fullmatch(r"the command that started this run is gone; \d of 6 requests had ended", run.error)
    assert run.n_unfinished > 0
    assert tables["requests"]["output_tokens"].sum() > 0
    assert not journal.exists()


def test_a_second_sweep_is_not_pooled_into_the_first(bench, tmp_path):
    sweep = ("-m", "engine=ours_small", "engine.max_batch_tokens=32,64", "hydra.sweep.dir=s")
    assert bench(*sweep).returncode == 0
    names = [s.job for s in manifest.latest(tmp_path / "s")]
    assert [re.sub("[0-9a-f]{8}$", "HASH", name) for name in names] == [
        "0-engine.max_batch_tokens=32-HASH",
        "1-engine.max_batch_tokens=64-HASH",
    ]
    second = bench(*sweep, "engine.page_size=128")
    assert second.returncode == 2
    assert "already holds 2 jobs of another command" in second.stderr
    assert len(read_result(tmp_path / "s", ("runs",))["runs"]) == 2


def test_a_closed_loop_that_could_never_fill_a_wave_is_refused(bench, tmp_path):
    done = bench("engine=static", "arrival=closed_loop", "arrival.concurrency=2")
    assert done.returncode == 1
    assert "can never fill in a closed loop of 2: set engine.wave to at most 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_value_an_engine_refuses_is_found_before_anything_runs(bench, tmp_path):
    for wrong in ("engine.page_size=-4", "engine.scheduler_type=fifoo", "engine.safety_margin=1.5,2.5"):
        multirun = ("-m",) if "," in wrong else ()
        done = bench(*multirun, "engine=ours", wrong, "hydra.sweep.dir=wrong", "hydra.run.dir=wrong")
        setting, _, given = wrong.removeprefix("engine.").partition("=")
        assert done.returncode == 2
        assert done.stderr.startswith(f"cb-bench: engine ours: {setting} must be ")
        assert given.partition(",")[0] in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "wrong").exists()


def test_a_wrong_name_is_one_line_and_leaves_nothing(bench, tmp_path):
    done = bench("engine=statik", small=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Did you mean 'static'?" in done.stderr
    assert not list(Path(tmp_path).rglob("*.parquet"))


def test_turns_of_sessions_find_their_answers_in_the_prefix_cache(bench, tmp_path):
    """Whole pages of what was computed of the turn before: its prompt and its answer without the last token."""
    done = bench(
        "engine=ours_small", "engine.page_size=4", "engine.num_blocks=512", "workload=sessions", "workload.sessions=2",
        "workload.think_s=0.05", "workload.system_tokens=0", "model=tiny-llama", "measure.device=cpu",
        "measure.torch_threads=1", "measure.calibrate=false", small=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tables = read_result(only((tmp_path / "results" / "runs").iterdir()))
    requests = tables["requests"].set_index("request_id")
    later = requests[requests["holds_answer_of"].notna()]
    assert len(later) >= 2
    for row in later.to_dict("records"):
        before = requests.loc[row["holds_answer_of"]]
        assert row["cached_tokens"] == (before["prompt_tokens"] + before["output_tokens"] - 1) // 4 * 4
        assert row["prompt_tokens"] == row["planned_prompt_tokens"]
        assert row["t_sched_s"] >= before["t_done_s"]
    environment = dict(zip(tables["environment"]["key"], tables["environment"]["value"], strict=True))
    assert environment["workload.unseen_answers"] == "0"
    assert json.loads(environment["workload.description"])["prefix_reuse"]["16"] > 0.3


def test_a_trace_with_bad_rows_says_so_and_uses_the_others(bench, tmp_path):
    trace = tmp_path / "own.jsonl"
    rows = [(0.2, 5, 2), (0.0, 4, 2), (0.1, 0, 3)]
    trace.write_text("".join(f'{{"due_s": {t}, "prompt_tokens": {p}, "output_tokens": {o}}}\n' for t, p, o in rows))
    done = bench(
        "engine=ours_small", "workload=own_trace", f"workload.path={trace}", "model=tiny-llama", "measure.device=cpu",
        "measure.torch_threads=1", "measure.calibrate=false", small=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"cb-bench: {trace}: 1 of 3 rows are left out: no prompt or no output token\n" in done.stderr
    assert f"cb-bench: {trace}: 1 of 3 rows stand after a later one: sorted by time\n" in done.stderr
    tables = read_result(only((tmp_path / "results" / "runs").iterdir()))
    assert tables["requests"]["prompt_tokens"].tolist() == [4, 5]
    environment = dict(zip(tables["environment"]["key"], tables["environment"]["value"], strict=True))
    assert len(json.loads(environment["workload.spec"])["notes"]) == 2


def test_engines_start_once_for_all_workloads_and_iterations(bench, tmp_path):
    """Two engines, two workloads, two runs each: four jobs in two processes."""
    done = bench(
        "-m", "experiment=peers", "engine=null,static_waves", "workload=nano,staged_20", "measure.runs_per_process=2",
        "workload.low=4", "workload.high=12", "workload.requests=6", "model=tiny-llama", "measure.warmup_requests=1",
        "+engine.env.CUBLAS_WORKSPACE_CONFIG=':16:8'", "measure.device=cpu", "measure.torch_threads=1", small=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    root = only((tmp_path / "results" / "sweeps" / "peers").iterdir())
    tables = read_result(root)
    runs = tables["runs"]
    assert (len(runs), set(runs["status"])) == (8, {"ok"})
    assert runs["process"].nunique() == 2
    assert runs.groupby("process")["engine"].nunique().tolist() == [1, 1]
    assert sorted(runs["iteration"]) == [0] * 4 + [1] * 4
    assert runs["workload_hash"].nunique() == 4  # the same for both engines, another in each iteration
    assert runs["warmup_s"].notna().sum() == runs["load_s"].notna().sum() + 1 == 2
    environment = tables["environment"]
    given = environment.loc[environment["key"] == "env", "value"]
    assert {json.loads(value).get("CUBLAS_WORKSPACE_CONFIG") for value in given} == {":16:8"}
    assert "Several runs of one process" in done.stdout
    assert "Measured in one process, one after the other" in done.stdout


def test_prompts_that_a_process_has_measured_before_are_refused(bench):
    again = ("workload=quickstart,mixed_burst", "measure.share_process=true", "experiment.variable=engine")
    done = bench("-m", "engine=null", *again)
    assert done.returncode == 2  # before anything has started
    assert "begins like one of" in done.stderr
