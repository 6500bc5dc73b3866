"""The command line up to the point where something would run."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from harness import app, manifest
from harness.app import main
from harness.arguments import split_arguments
from harness.manifest import JobState
from harness.plan import make_plan

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command, expected",
    [
        ("engin=ours", "unknown config key 'engin'. Did you mean 'engine'?"),
        ("engine=ourz", "unknown engine 'ourz'. Did you mean 'ours'? Available: "),
        ("model=qwen3-4bb", "Did you mean 'qwen3-4b'?"),
        ("experiment=max_batch_token", "unknown experiment 'max_batch_token'. Did you mean 'max_batch_tokens'?"),
        ("engine.max_batch_toks=3", "Did you mean 'engine.max_batch_tokens'?"),
        ("measure.repeat=3", "Did you mean 'measure.repeats'?"),
        ("engine=static engine.page_size=16", "unknown config key 'engine.page_size'"),
        ("engine.max_batch_tokens=abc", "bad value for engine.max_batch_tokens"),
        ("arrival=poison", "unknown arrival 'poison'. Did you mean 'poisson'?"),
        ("workload=prompts_file workload.path=x workload.requests=4", "Did you mean 'workload.max_requests'?"),
        ("-m engine=ours,static engine.page_size=16", "'engine.page_size': only some of the choices of this sweep"),
        ("+foo=1", "unknown config key 'foo'"),
        ("+engine.num_block=1", "Did you mean 'engine.num_blocks'?"),
        ("engine=ours,static", "'engine=ours,static' gives several values, which makes it a sweep: add -m"),
        ("measure.timeout_s=-1", "measure.timeout_s must be above 0, got -1.0"),
        ("generation.temperature=0.5", "do_sample is false"),
        ("experiment.variable=engine.blocks", "'engine.blocks' is neither a config group nor a key of the config"),
        ("workload.x", "cannot read the override 'workload.x'"),
        ("-m engine=ours,statik", "unknown engine 'statik'. Did you mean 'static'?"),
        ("model=/path/my-model", "a hub id write model.name=/path/my-model"),
        ("arrival.rate=1", "The chosen arrival has no rate; add arrival=constant or arrival=diurnal or "),
        ("model.name=tiny-lama", "no model 'tiny-lama'. Did you mean 'tiny-llama'"),
        ("-m model.name=tiny-llama,./gone", "model.name='./gone' does not exist: give a folder with config.json"),
        ("model=qwen3-4b model.load_format=dumy", "model.load_format='dumy' is not known"),
        ("-m measure.repeats=1,0", "measure.repeats must be at least 1, got 0"),
        ("-m engine.num_blocks=1,many", "bad value for engine.num_blocks"),
        ("-m hydra/launcher=bassic", "unknown hydra/launcher 'bassic'. Did you mean 'basic'?"),
        pytest.param(
            "-m hydra/launcher=ray",
            "hydra/launcher=ray needs a package that is not installed: pip install hydra-ray-launcher",
            marks=pytest.mark.skipif(bool(list(distributions(name="hydra-ray-launcher"))), reason="it is installed"),
        ),
    ],
)
def test_wrong_names_and_values_are_one_line_and_write_nothing(command, expected, capsys, in_empty_folder):
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cb-bench: ")
    assert expected in err
    assert err.count("\n") == 1
    assert not list(in_empty_folder.rglob("*.parquet"))
    assert not list(in_empty_folder.rglob("manifest.jsonl"))


def test_a_plan_knows_every_job_and_its_folder(in_empty_folder):
    plan = make_plan(["-m", "engine=ours,static", "measure.seed=3,4", "workload.requests=4"])
    assert [job.name.rpartition("-")[0] for job in plan.jobs] == [
        "0-engine=ours,measure.seed=3",
        "1-engine=ours,measure.seed=4",
        "2-engine=static,measure.seed=3",
        "3-engine=static,measure.seed=4",
    ]
    assert plan.jobs[2].overrides == ("engine=static", "measure.seed=3", "workload.requests=4")
    assert [(c["engine"]["name"], c["measure"]["seed"]) for c in plan.configs] == [
        ("ours", 3), ("ours", 4), ("static", 3), ("static", 4),
    ]  # fmt: skip


def test_full_error_shows_the_exception(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="ourz"):
        main(["engine=ourz"])


def test_single_run_plan(in_empty_folder):
    plan = make_plan(["engine=ours", "model=qwen3-4b", "workload=staged", "arrival=poisson", "arrival.rate=20"])
    assert not plan.multirun
    assert plan.directory.parent == in_empty_folder / "results" / "runs"
    assert plan.arguments[-1] == f"hydra.run.dir='{plan.directory}'"


def test_sweep_from_the_command_line_states_its_variable(in_empty_folder):
    plan = make_plan(["-m", "engine=ours,static", "workload.requests=4"])
    assert plan.multirun
    assert plan.directory.parent == in_empty_folder / "results" / "sweeps" / "engine"
    assert "experiment.variable='engine'" in plan.arguments
    plan = make_plan(["--multirun", "engine.max_batch_tokens=64,128,256"])
    assert "experiment.variable='engine.max_batch_tokens'" in plan.arguments


@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_an_experiment_is_a_sweep_by_itself(flags, in_empty_folder):
    plan = make_plan([*flags, "experiment=max_batch_tokens"])
    assert plan.multirun
    assert "-m" in plan.arguments
    assert plan.directory.parent == in_empty_folder / "results" / "sweeps" / "max_batch_tokens"


def test_sampled_tokens_are_not_compared():
    assert make_plan(["-m", "engine=ours,static"]).reference_engine == "static"
    assert make_plan(["-m", "engine=ours,static", "generation.do_sample=true"]).reference_engine is None


def test_flags_with_values_are_no_overrides():
    overrides, flags = split_arguments(["-m", "--config-dir", "mine", "engine=ours", "--cfg=job"])
    assert overrides == ["engine=ours"]
    assert flags == ["-m", "--config-dir", "mine", "--cfg=job"]


def test_own_experiments_from_a_folder(in_empty_folder):
    folder = in_empty_folder / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text(
        "# @package _global_\nexperiment: {name: own, variable: engine.page_size}\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {engine.page_size: '16,32'}}}\n"
    )
    plan = make_plan(["--config-dir", "mine", "experiment=own"])
    assert plan.multirun
    assert plan.directory.parent.name == "own"


def test_show_config_and_help(capfd):
    assert main(["workload=staged", "arrival.rate=20", "--cfg", "job", "-p", "arrival"]) == 0
    assert "rate: 20.0" in capfd.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capfd.readouterr().out
    assert "cb-bench -m experiment=max_batch_tokens" in shown
    assert re.search(r"engine: what is measured.*\n.*\bours, ours_base, ", shown)
    assert "dry_run          list the runs" in shown
    assert "_schema" not in shown


def used(folder):
    folder.mkdir()
    manifest.append(folder, JobState("0-x", "h", ("engine=ours", "engine.page_size=256"), "ok", manifest.now()))
    return folder


@pytest.mark.parametrize(
    "command", ["-m engine.page_size=128,64 hydra.sweep.dir=used", "engine=static hydra.run.dir=used"]
)
def test_a_folder_with_the_jobs_of_another_command_is_refused(command, capsys, in_empty_folder):
    folder = used(in_empty_folder / "used")
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "already holds 1 job of another command (the first with engine=ours engine.page_size=256" in said
    assert "name a new folder" in said
    assert [p.name for p in folder.iterdir()] == ["manifest.jsonl"]


def test_a_results_folder_that_cannot_be_made_is_one_line(capsys, in_empty_folder):
    (in_empty_folder / "file").touch()
    assert main(["engine=static", "results_dir=file"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("cb-bench: cannot make the folder of results ")
    assert said.count("\n") == 1


def test_a_disk_that_fails_while_running_is_one_line(capsys, monkeypatch):
    def full(arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(app, "_hydra_main", full)
    assert main(["engine=static"]) == 1
    assert capsys.readouterr().err.startswith("cb-bench: OSError: [Errno 28] No space left on device; ")


def test_only_what_is_swept_names_a_jobs_folder(in_empty_folder):
    plan = make_plan(["-m", "engine=ours,static", "workload.requests=4", "measure=default"])
    assert "hydra.job.config.override_dirname.exclude_keys=['workload.requests','measure']" in plan.arguments


def test_prompts_that_a_process_would_measure_twice_are_refused_before_it_starts(in_empty_folder, capsys):
    two = ["-m", "engine=null", "model=tiny-llama", "workload=quickstart,mixed_burst", "measure.share_process=true"]
    command = [*two, "experiment.variable=engine", "dry_run=true"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "a prompt of the workload 'mixed_burst' begins like one of 'quickstart'" in said
    assert main([*command, "measure.share_process=false"]) == 0
    make_plan(["-m", "experiment=peers"])  # its own do not


def test_text_for_a_model_without_tokenizer_is_refused_before_anything_runs(in_empty_folder, capsys):
    Path("prompts.jsonl").write_text('{"prompt": "some text"}\n')
    command = [
        "engine=ours",
        "model=tiny-llama",
        "workload=prompts_file",
        "workload.path=prompts.jsonl",
        "dry_run=true",
    ]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "prompts.jsonl:1: " in said
    assert "this model has no tokenizer" in said
    assert main([*command[:1], "model=smollm2", *command[2:]]) == 0


def test_a_single_run_is_called_by_its_choice_of_engine(in_empty_folder, monkeypatch):
    jobs = []
    monkeypatch.setattr(app, "run_jobs", lambda given: jobs.extend(given) or ["ok"])
    main(["engine=ours_small", "model=tiny-llama", "results_dir=r"])
    assert [(job.arm, job.identity(0)["engine"], job.identity(0)["variable"]) for job in jobs] == [
        ("ours_small", "ours", None)
    ]


def test_an_interrupted_sweep_says_how_to_go_on(capsys, monkeypatch, in_empty_folder):
    def interrupted(plan):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "_run", interrupted)
    assert main(["-m", "engine=static,ours", "model=tiny-llama"]) == 130
    assert capsys.readouterr().err.rstrip().endswith("; the same command with resume=true goes on")


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("harness.report.html.write_report", "2 of 2 measured; the tables of {0} hold 48 of 48 requests of its 2 runs"),
        (
            "harness.app.combine_jobs",
            "2 of 2 measured; the tables are not joined, each is in its own folder below {0}; the same command with "
            "resume=true goes on",
        ),
    ],
)
def test_an_interrupt_of_the_report_says_where_the_results_are(where, kept, capfd, monkeypatch, in_empty_folder):
    monkeypatch.setattr(where, lambda *rest: os.kill(os.getpid(), signal.SIGTERM))
    sweep = ["-m", "engine='null'", "model=tiny-llama", "engine.ttft_ms=0,1", "measure.warmup_requests=0"]
    assert main([*sweep, "hydra.sweep.dir=s out"]) == 143
    out, err = capfd.readouterr()
    assert out.endswith("\nresults: s out\nreport not written: cb-report 's out'\n")
    root = in_empty_folder / "s out"
    assert err.splitlines()[-1] == f"cb-bench: interrupted by SIGTERM; {kept.format(root)}"


def test_what_is_said_is_in_the_order_it_was_said_also_in_a_file(in_empty_folder):
    """Standard output to a file is kept back by Python, standard error is not."""
    script = (
        "import sys; from harness import app\n"
        "def interrupted(plan): print('of a run', file=sys.stderr); raise KeyboardInterrupt\n"
        "app._run, app._join_and_show = interrupted, lambda plan: print('token ids: …') or 0\n"
        "app.remaining, app.left_open, app.notices = lambda *given: (), lambda *given: ((), ()), lambda *given: ()\n"
        "sys.exit(app.main([*sys.argv[1:], 'resume=true']))"
    )
    sweep = ["-m", "engine='null'", "model=tiny-llama", "engine.ttft_ms=0,1", "hydra.sweep.dir=s"]
    app._prepare(make_plan(sweep), ())
    with open("said", "w") as said:
        begun = [sys.executable, "-c", script, *sweep]
        env = os.environ | {"PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": ""}
        done = subprocess.run(begun, stdout=said, stderr=said, check=False, env=env)
    lines = (in_empty_folder / "said").read_text().splitlines()
    assert done.returncode == 130, lines
    assert [line.split(" ")[0] for line in lines] == ["going", "of", "token", "cb-bench:"]


def test_version_is_that_of_this_package(capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"cb-bench": "1.2.3"}.__getitem__)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "cb-bench 1.2.3\n"


@pytest.mark.parametrize(
    ("sent", "name", "code"),
    [
        (signal.SIGINT, "Ctrl-C", 130),
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGHUP, "SIGHUP (its terminal is gone)", 129),
    ],
)
def test_an_interrupt_says_which_it_was_and_what_is_left(sent, name, code, capsys, monkeypatch):
    monkeypatch.setattr(app, "_hydra_main", lambda arguments: os.kill(os.getpid(), sent))
    before = signal.getsignal(sent)
    assert main(["engine=static"]) == code
    assert capsys.readouterr().err == f"cb-bench: interrupted by {name}; nothing was measured\n"
    assert signal.getsignal(sent) is before


def test_a_terminal_that_is_gone_is_an_interrupt_like_any_other(monkeypatch, in_empty_folder):
    """What is said to it is lost, which must not keep anything from being written down."""
    terminal, ours = os.openpty()

    def hang_up(arguments):
        os.close(terminal)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(ours, b"x")
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(app, "_hydra_main", hang_up)
    with os.fdopen(ours, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        assert main(["engine=static"]) == 129
        os.write(stream.fileno(), b"x")


def test_nohup_is_respected(monkeypatch, in_empty_folder):
    seen = []
    monkeypatch.setattr(app, "_hydra_main", lambda arguments: seen.append(signal.getsignal(signal.SIGHUP)))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        main(["engine=static"])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN]


def test_an_interrupt_while_it_is_imported_is_one_line():
    begin = "import builtins, signal, sys; real = builtins.__import__\n"
    slow = (
        "def slow(name, *rest, **more):\n"
        "    if name == 'harness.app': signal.raise_signal(signal.SIGINT)\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = slow\n"
        "from harness.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin + slow], capture_output=True, text=True, check=False, cwd=PROJECT
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "cb-bench: interrupted by Ctrl-C; nothing had begun\n")


def test_repeats_of_a_sweep_are_blocks_in_a_recorded_order(in_empty_folder):
    plan = make_plan(["-m", "engine=ours,static,ours_small", "measure.repeats=4", "measure.aa=true"])
    blocks = [[(j.place.arm, j.place.replica) for j in plan.jobs if j.place.block == b] for b in range(4)]
    assert all(sorted(block) == sorted([(0, 0), (1, 0), (1, 1), (2, 0)]) for block in blocks)
    assert blocks[1] == blocks[0][::-1]
    assert blocks[3] == blocks[2][::-1]
    assert [j.config["engine"]["name"] for j in plan.jobs if j.place.replica] == ["static"] * 4
    assert len(plan.configs) == 3
    app._prepare(plan, ())
    states = manifest.latest(plan.directory)
    assert [(s.block, s.position) for s in states] == [(j.place.block, j.place.position) for j in plan.jobs]
    assert len({s.job for s in states}) == 16


def test_the_baseline_is_the_lowest_number_where_no_arm_is_static(in_empty_folder):
    plan = make_plan(["-m", "engine.max_batch_tokens=null,512,256"])
    assert [job.is_baseline for job in plan.jobs] == [False, False, True]


@pytest.mark.parametrize(
    "command, expected",
    [
        ("-m engine=ours engine.num_blocks=8,9 engine.page_size=256,512", "varies 2 variables at once"),
        ("-m experiment=max_batch_tokens engine.page_size=256,512", "engine.page_size varies besides the variable"),
        ("-m engine=ours_small engine.max_memory_percent=0.3,0.5", "both size the KV cache"),
        ("-m engine=ours mode=fixed", "mode must be auto"),
    ],
)
def test_a_confounded_sweep_is_refused_before_it_runs(command, expected, capsys, in_empty_folder):
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1
    assert not list(in_empty_folder.rglob("manifest.jsonl"))
