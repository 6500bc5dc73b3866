"""A job whose disk refuses: it ends with a state, never with an exception."""

from __future__ import annotations

import errno

import pytest

from harness import job as jobs
from harness import manifest, store
from harness.errors import RunFailed

VALUES = {
    "engine": {"name": "ours"},
    "model": {"name": "tiny-llama"},
    "workload": {"name": "x", "seed": None},
    "arrival": {},
    "generation": {},
    "measure": {"seed": 0, "repeats": 1, "start_timeout_s": 1.0, "timeout_s": 1.0},
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

    def run(spec, *args):
        calls.append(spec)
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
