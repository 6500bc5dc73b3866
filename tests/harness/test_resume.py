"""Resume and dry run: which runs are left, and that neither loses what was measured."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from harness import manifest, provenance, store
from harness.app import main
from harness.config import config_hash
from harness.manifest import JobState
from harness.metrics import compute_tables
from harness.plan import make_plan
from harness.record import Outcome, RequestRecord, RunRecord
from harness.report.arms import group_arms
from harness.report.read import read_results
from harness.resume import left_open, notices, remaining, unfinished_sweep

SWEEP = ["-m", "engine='null'", "model=tiny-llama", "engine.ttft_ms=10,20,30", "measure.repeats=2"]
FULL = "allow_factorial=true"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def states(jobs, **state_of):
    """Lines of a manifest in which the jobs with these numbers are in these states, all others planned."""
    named = {int(key[1:]): state for key, state in state_of.items()}
    return [
        JobState(
            job.name, config_hash(job.config), job.overrides, named.get(number, "planned"), manifest.now(), None,
            job.place.block, job.place.position,
        )
        for number, job in enumerate(jobs)
    ]  # fmt: skip


def write(folder, lines):
    folder.mkdir(parents=True)
    for line in lines:
        manifest.append(folder, line)


def test_measured_runs_are_kept_and_failed_ones_made_again(tmp_path):
    jobs = make_plan(SWEEP).jobs
    assert len(jobs) == 6
    write(tmp_path / "s", states(jobs, _0="ok", _1="failed", _2="ok", _3="interrupted", _4="running"))
    left = remaining(tmp_path / "s", jobs)
    assert [job.name for job in left] == [jobs[k].name for k in (1, 3, 4, 5)]
    # a launcher numbers only what it is given: number and folder are stated
    assert "experiment.number=3" in left[1].arguments
    assert f"hydra.sweep.subdir='{jobs[3].name}'" in left[1].arguments


def leave(folder, job, status, outcomes):
    """The tables of a run whose requests ended so."""
    requests = [
        RequestRecord(f"q{k}", 4, 1, t_sched_ns=0, t_submit_ns=0, t_done_ns=9, outcome=outcome)
        for k, outcome in enumerate(outcomes)
    ]
    digest = config_hash(job.config)
    record = RunRecord({"run_id": "r", "engine": "null", "config_hash": digest}, requests, t_start_ns=0, t_end_ns=9)
    record.status, record.environment = status, {"identity.config_hash": digest}
    store.write_result(folder / job.name, compute_tables(record))


def test_a_run_that_was_written_but_not_noted_is_kept(tmp_path):
    """The command was ended while its tables, or their note, were being written."""
    jobs, folder, ended = make_plan(SWEEP).jobs, tmp_path / "s", Outcome.OK_LENGTH
    write(folder, states(jobs, _0="ok", _1="running", _2="interrupted", _3="interrupted", _4="running", _5="running"))
    leave(folder, jobs[1], "ok", [ended, ended])
    leave(folder, jobs[2], "ok", [ended])
    leave(folder, jobs[3], "interrupted", [ended, ended])  # of the journal: without step log and counters
    leave(folder, jobs[4], "interrupted", [ended, Outcome.UNFINISHED])
    (folder / jobs[5].name).mkdir()
    whole, unclosed = left_open(folder, jobs)
    assert [(s.job, s.state, s.error) for s in whole] == [(jobs[k].name, "ok", None) for k in (1, 2)]
    assert unclosed == (jobs[3].name,)
    assert [job.name for job in remaining(folder, jobs, whole)] == [jobs[k].name for k in (3, 4, 5)]
    (line,) = notices(folder, jobs, provenance.own_revision(), unclosed)[:1]
    assert line.startswith(f"resume=true: measured again although all of its requests had ended: {jobs[3].name}: ")


def test_tables_of_another_config_do_not_make_a_run_whole(tmp_path):
    jobs, folder = make_plan(SWEEP).jobs, tmp_path / "s"
    write(folder, states(jobs, _1="running"))
    other = next(job for job in jobs if config_hash(job.config) != config_hash(jobs[1].config))
    leave(folder, replace(jobs[1], config=other.config), "ok", [Outcome.OK_LENGTH])
    assert left_open(folder, jobs) == ((), ())


def test_an_arm_more_adds_only_its_runs(tmp_path):
    few = make_plan(["-m", "engine='null'", "model=tiny-llama", "engine.ttft_ms=10,20"]).jobs
    write(tmp_path / "s", states(few, _0="ok", _1="ok"))
    more = make_plan(["-m", "engine='null'", "model=tiny-llama", "engine.ttft_ms=10,20,30"]).jobs
    assert ["engine.ttft_ms=30" in job.overrides for job in remaining(tmp_path / "s", more)] == [True]


def test_the_same_config_in_two_blocks_counts_twice(tmp_path):
    jobs = make_plan(SWEEP).jobs
    only = [j for j in jobs if j.place.block == 0]
    write(tmp_path / "s", [s for s in states(jobs, _0="ok", _1="ok", _2="ok") if s.state == "ok"])
    assert {j.place.block for j in remaining(tmp_path / "s", jobs)} == {1}
    assert len(only) == 3


def test_another_order_of_blocks_is_not_mixed_in(tmp_path):
    jobs = make_plan(SWEEP).jobs
    lines = [
        JobState(**{**asdict(s), "overrides": s.overrides, "block": 5})
        for s in states(jobs, _0="ok")
        if s.state == "ok"
    ]
    write(tmp_path / "s", lines)
    with pytest.raises(ValueError, match="was planned otherwise"):
        remaining(tmp_path / "s", jobs)


def test_the_newest_sweep_is_meant_unless_one_is_named(tmp_path):
    for stamp in ("20260101T000000", "20260102T000000"):
        write(tmp_path / stamp, states(make_plan(SWEEP).jobs))
    (tmp_path / "20260103T000000").mkdir()  # nothing was planned in it
    assert unfinished_sweep(tmp_path / "20270101T000000", named=False).name == "20260102T000000"
    assert unfinished_sweep(tmp_path / "20260101T000000", named=True).name == "20260101T000000"
    with pytest.raises(ValueError, match="holds no sweep to go on with"):
        unfinished_sweep(tmp_path / "20260103T000000", named=True)
    with pytest.raises(ValueError, match="no earlier sweep in"):
        unfinished_sweep(tmp_path / "none" / "x", named=False)


@pytest.mark.parametrize(
    "command, expected",
    [
        (["engine='null'", "resume=true"], "resume=true goes on with a sweep"),
        ([*SWEEP, "--resume"], "no earlier sweep in"),
        ([*SWEEP, "resume=true", "hydra.sweep.dir=gone"], "holds no sweep to go on with"),
        ([*SWEEP, "resume=perhaps"], "resume"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(command, expected, capsys, tmp_path):
    assert main(command) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*.jsonl"))


def test_durations_are_from_the_last_start_to_the_end(tmp_path):
    def line(state, second):
        return JobState("a", "h", (), state, f"2026-01-01T00:00:{second:02d}+00:00")

    write(
        tmp_path / "s", [line("planned", 0), line("running", 1), line("failed", 3), line("running", 10), line("ok", 40)]
    )
    assert [(s.config_hash, seconds) for s, seconds in manifest.durations(tmp_path / "s")] == [("h", 30.0)]
    assert manifest.durations(tmp_path) == []


@pytest.mark.parametrize("spelling", ["dry_run=true", "--dry-run"])
def test_a_dry_run_lists_and_writes_nothing(spelling, capsys, tmp_path):
    assert main([*SWEEP, spelling]) == 0
    out = capsys.readouterr().out
    assert out.count("engine.ttft_ms=") == 6
    assert "6 runs of 3 configs" in out
    assert "nothing was run; results would go to results/sweeps/engine.ttft_ms/" in out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_a_resumed_sweep_lists_what_is_left(capsys, tmp_path):
    jobs = make_plan(SWEEP).jobs
    folder = tmp_path / "results" / "sweeps" / "engine.ttft_ms" / "20260101T000000"
    write(folder, states(jobs, _0="ok", _1="ok"))
    before = (folder / manifest.FILE).read_text()
    assert main([*SWEEP, "resume=true", "dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert "4 runs of 3 configs (2 more are measured already)" in out
    assert jobs[0].name not in out
    assert (folder / manifest.FILE).read_text() == before


def test_what_only_says_how_a_command_is_started_is_not_in_its_record():
    plan = make_plan([*SWEEP, "dry_run=true"])
    assert not any("dry_run" in o for job in plan.jobs for o in job.overrides)
    assert [config_hash(j.config) for j in plan.jobs] == [config_hash(j.config) for j in make_plan(SWEEP).jobs]


SEEDS = ["-m", "engine='null'", "model=tiny-llama", "workload.requests=2", "hydra.sweep.dir=s", "report=false"]


def test_a_widened_sweep_names_its_arms_anew_and_keeps_its_baseline(tmp_path, capsys):
    """Planned with 20 ms alone, then with 10 ms before it: the measured arm gets its name, ratios stay to it."""
    assert main([*SEEDS, "engine.ttft_ms=20"]) == 0
    before = (tmp_path / "s" / "manifest.jsonl").read_text().count('"ok"')
    capsys.readouterr()
    assert main([*SEEDS, "engine.ttft_ms=10,20", "resume=true"]) == 0
    out, err = capsys.readouterr()
    assert (tmp_path / "s" / "manifest.jsonl").read_text().count('"ok"') == before + 1 == 2  # not measured again
    assert "this plan is not the one that s was begun with (1 configs more, 0 left out)" in err
    assert "named by this plan's variable (engine.ttft_ms)" in err
    assert "different code" not in err
    arms = group_arms(read_results(tmp_path / "s"))
    assert [(a.series, a.is_baseline) for a in arms] == [("ttft_ms = 10.0", False), ("ttft_ms = 20.0", True)]
    assert "ttft_ms = 20.0" in out


def test_the_first_plan_keeps_its_baseline_without_a_word_where_nothing_was_added(tmp_path, capsys):
    jobs = make_plan([*SEEDS, "engine.ttft_ms=20,10"]).jobs
    write(tmp_path / "s", states(jobs, _0="ok"))
    assert notices(tmp_path / "s", jobs, {}) == []


def test_other_code_is_said_before_anything_runs(tmp_path, capsys, monkeypatch):
    assert main([*SEEDS, "engine.ttft_ms=20"]) == 0
    jobs = make_plan([*SEEDS, "engine.ttft_ms=20"]).jobs
    now = provenance.own_revision()
    assert now["git.sha"], "this test runs in a checkout"
    assert notices(tmp_path / "s", jobs, now) == []
    assert notices(tmp_path / "s", jobs, now | {"git.sha": "f" * 40}) == []  # a commit of documents
    (said,) = notices(tmp_path / "s", jobs, {"git.sha": "f" * 40, "git.dirty": False, "git.diff_sha256": None})
    assert "were measured with different code" in said
    assert "now ffffffffff" in said
    monkeypatch.setattr("harness.app.own_revision", lambda: {"git.sha": "f" * 40})
    capsys.readouterr()
    assert main([*SEEDS, "engine.ttft_ms=20", "resume=true", "dry_run=true"]) == 0
    assert said in capsys.readouterr().err
