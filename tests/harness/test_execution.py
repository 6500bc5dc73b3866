"""A job whose disk refuses: it ends with a state, never with an exception."""

from __future__ import annotations

import errno
import json
import signal
from pathlib import Path

import pytest

from harness import execution as jobs
from harness import manifest, store
from harness.blocks import Place
from harness.errors import RunFailed
from harness.interruption import Interrupted
from harness.journal import Journal, Known
from harness.record import Outcome
from harness.recorder import Recorder

VALUES = {
    "engine": {"name": "ours"},
    "model": {"name": "tiny-llama"},
    "workload": {"name": "x", "seed": None},
    "arrival": {},
    "generation": {},
    "measure": {"seed": 0, "repeats": 1, "runs_per_process": 1, "start_timeout_s": 1.0, "timeout_s": 1.0},
    "slo": {},
    "experiment": {"name": None, "question": None, "variable": None},
}


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "check", lambda config: None)
    return jobs.Job(VALUES, tmp_path / "0", tmp_path, (), 0, "1", "20260101T000000")


def fail(*args):
    raise RunFailed("page_size 3 is too small")


def test_a_row_that_cannot_be_written_leaves_the_cause_in_the_manifest(job, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "run_isolated", fail)
    monkeypatch.setattr(store, "write_result", full)
    assert jobs.run_job(job) == "failed"
    assert [(s.state, s.error) for s in manifest.latest(tmp_path)] == [("failed", "page_size 3 is too small")]
    said = capsys.readouterr().err
    assert "the row of its failure (page_size 3 is too small) could not be written: OSError: [Errno 28]" in said


def test_any_failure_before_the_run_is_a_state(job, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "check", full)
    monkeypatch.setattr(store, "write_result", full)
    assert jobs.run_job(job) == "failed"
    assert manifest.latest(tmp_path)[0].state == "failed"


def test_a_manifest_that_cannot_be_written_is_said(job, monkeypatch, capsys):
    monkeypatch.setattr(manifest, "append", full)
    assert jobs.run_job(job) == "failed"
    assert "its state could not be written: OSError: [Errno 28] No space left on device" in capsys.readouterr().err


def test_an_interrupted_job_keeps_the_tables_of_its_repeats(tmp_path, monkeypatch):
    values = VALUES | {"measure": VALUES["measure"] | {"repeats": 3}}
    job = jobs.Job(values, tmp_path, tmp_path, (), None, None, "20260101T000000")
    calls = []

    def run(specs, *args):
        calls.append(specs)
        if len(calls) == 2:
            raise KeyboardInterrupt
        fail()

    monkeypatch.setattr(jobs, "check", lambda config: None)
    monkeypatch.setattr(jobs, "run_isolated", run)
    with pytest.raises(KeyboardInterrupt):
        jobs.run_job(job)
    runs = store.read_result(tmp_path, ("runs",))["runs"]
    assert list(runs["error"]) == ["page_size 3 is too small", "interrupted by Ctrl-C"]
    assert manifest.latest(tmp_path)[0].state == "interrupted"


def test_an_interrupt_after_all_is_written_leaves_a_measured_job(job, monkeypatch):
    """Ctrl-C while the tables were being written, or while the process ended."""

    def run(specs, log, limits, take, env):
        store.write_result(specs[0].parent, jobs.compute_tables(jobs.RunRecord({"run_id": "r", "engine": "ours"}, [])))
        take({"run": 0, "written": True})
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "run_isolated", run)
    monkeypatch.setattr(jobs, "_headline", lambda directory: "")
    with pytest.raises(KeyboardInterrupt):
        jobs.run_job(job)
    (state,) = manifest.latest(job.root)
    assert (state.state, state.error) == ("ok", None)
    assert list(store.read_result(job.directory, ("runs",))["runs"]["status"]) == ["ok"]


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        (RunFailed("the measured process was ended by SIGKILL while measuring"), "failed", "SIGKILL"),
        (RunFailed("still measuring after 31 s; ended", status="timeout"), "timeout", "still measuring after 31 s"),
        (RunFailed("SinkViolation: second end of 'r0'"), "failed", "second end"),
        (KeyboardInterrupt(), "interrupted", "interrupted by Ctrl-C"),
        (Interrupted(signal.SIGTERM), "interrupted", "interrupted by SIGTERM"),
    ],
)
def test_a_run_that_was_killed_keeps_what_it_had_measured(job, fakes, monkeypatch, capsys, end, status, error):
    """Three requests: one had ended, one was generating, one was not sent. The journal is gone with the row written."""

    def measure_and_die(specs, *args):
        recorder = Recorder(fakes.workload([0.0, 0.0, 9.0]))
        known = Known({"run_id": "r", "engine": "ours", "workload_hash": "w"}, 1.0, 2.0, [], {"k": 1}, None)
        journal = Journal(specs[0].parent, known, recorder.records())
        recorder.started(10**9)
        for k in (0, 1):
            recorder.sent(f"r{k}", 10**9, 10**9)
            recorder.on_tokens(f"r{k}", [7], 10**9 + 50_000_000)
        recorder.on_tokens("r1", [8, 9], 10**9 + 80_000_000)
        recorder.on_end("r0", Outcome.OK_LENGTH, 10**9 + 50_000_000)
        journal.add(recorder.take_changes(), recorder.t_start_ns, [(10**9, {"rss_bytes": 5})])
        journal.close()
        raise end

    monkeypatch.setattr(jobs, "run_isolated", measure_and_die)
    if isinstance(end, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            jobs.run_job(job)
        assert "interrupted after 1 of 3 requests" in capsys.readouterr().err
    else:
        assert jobs.run_job(job) == status
    tables = store.read_result(job.directory)
    run = tables["runs"].iloc[0]
    assert (run.status, run.workload_hash, run.load_s) == (status, "w", 1.0)
    assert error in run.error
    assert run.error.endswith("; 1 of 3 requests had ended")
    assert (run.n_requests, run.n_ok, run.n_failed, run.n_unfinished) == (3, 1, 0, 2)
    assert (run.ttft_p50_ms, run.wall_s) == (50, 0.08)
    assert [list(ids) for ids in tables["tokens"]["token_ids"]] == [[7], [7, 8, 9], []]
    assert tables["requests"]["t_submit_s"].isna().tolist() == [False, False, True]
    assert tables["telemetry"]["rss_bytes"].tolist() == [5]
    assert not list(job.directory.glob(".journal"))


def test_what_cannot_be_computed_leaves_the_row_and_the_journal(job, fakes, monkeypatch):
    def measure_nonsense_and_die(specs, *args):
        recorder = Recorder(fakes.workload([0.0]))
        journal = Journal(
            specs[0].parent, Known({"run_id": "r", "engine": "ours"}, 1.0, 2.0, [], {}, None), recorder.records()
        )
        recorder.started(10**9)
        recorder.on_tokens("r0", [7], 2 * 10**9)
        recorder.on_tokens("r0", [8], 10**9)  # before the one that came ahead of it
        journal.add(recorder.take_changes(), recorder.t_start_ns, [])
        journal.close()
        fail()

    monkeypatch.setattr(jobs, "run_isolated", measure_nonsense_and_die)
    assert jobs.run_job(job) == "failed"
    run = store.read_result(job.directory)["runs"].iloc[0]
    assert run.run_id == job.identity(0)["run_id"]
    assert run.error.startswith(
        "page_size 3 is too small; 0 of 1 requests had ended; its measurements cannot be computed"
    )
    assert "stamped 1000000000 ns before" in run.error
    assert (job.directory / ".journal").exists()


def test_a_journal_of_an_earlier_attempt_is_not_taken_for_this_ones(job, tmp_path, monkeypatch):
    job.directory.mkdir()
    (job.directory / ".journal").write_bytes(b"old")
    monkeypatch.setattr(jobs, "run_isolated", fail)
    jobs.run_job(job)
    assert store.read_result(job.directory)["runs"].iloc[0].error == "page_size 3 is too small"
    assert not (job.directory / ".journal").exists()


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Two jobs of one process, two runs each."""
    monkeypatch.setattr(jobs, "check", lambda config: None)
    monkeypatch.setattr(jobs, "_headline", lambda directory: "fine")
    values = VALUES | {"measure": VALUES["measure"] | {"runs_per_process": 2}, "workload": {"name": "x", "seed": 7}}
    place = Place(0, 0, 0)
    return [jobs.Job(values, tmp_path / n, tmp_path, (), k, "1", "20260101T000000", place) for k, n in enumerate("ab")]


def test_one_process_gets_every_run_of_jobs_that_share_it(two, tmp_path, monkeypatch):
    asked = []

    def run(specs, log, limits, on_message, env):
        asked.extend(json.loads(path.read_text()) for path in specs)
        for k in range(4):
            on_message({"phase": "measuring", "run": k})
            on_message({"written": True, "run": k})

    monkeypatch.setattr(jobs, "run_isolated", run)
    assert jobs.run_jobs(two) == ["ok", "ok"]
    assert [spec["workload"]["seed"] for spec in asked] == [7, 8, 7, 8]
    assert [spec["identity"]["seed"] for spec in asked] == [7, 8, 7, 8]
    assert [spec["identity"]["iteration"] for spec in asked] == [0, 1, 0, 1]
    assert len({spec["identity"]["process"] for spec in asked}) == 1
    assert len({spec["identity"]["run_id"] for spec in asked}) == 4
    assert [Path(spec["out"]) for spec in asked] == [tmp_path / n / f"run-{k}" for n in "ab" for k in (0, 1)]
    assert [s.state for s in manifest.latest(tmp_path)] == ["ok", "ok"]


@pytest.mark.parametrize("says_so", [True, False])
def test_a_process_that_ends_early_leaves_a_row_for_each_run_it_owed(two, tmp_path, monkeypatch, says_so):
    """The second run of the first job fails, with a word or by a crash right after the first was written."""

    def run(specs, log, limits, on_message, env):
        on_message({"written": True, "run": 0})
        if says_so:
            on_message({"phase": "measuring", "run": 1})
            on_message({"error": "it broke", "run": 1})
        raise RunFailed("it broke")

    monkeypatch.setattr(jobs, "run_isolated", run)
    monkeypatch.setattr(store, "is_result", lambda directory: (directory / "runs.parquet").is_file())
    assert jobs.run_jobs(two) == ["failed", "failed"]
    assert not (tmp_path / "a" / "run-0" / "runs.parquet").exists()  # its own tables were the child's to write
    errors = [store.read_result(tmp_path / d)["runs"].iloc[0].error for d in ("a/run-1", "b/run-0", "b/run-1")]
    assert errors[0] == "it broke"
    assert errors[1] == errors[2] == "not measured: its process ended in an earlier run: it broke"
    assert [s.error for s in manifest.latest(tmp_path)] == [errors[0], errors[1]]
