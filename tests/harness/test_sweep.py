from __future__ import annotations

import json

import pytest

from harness import manifest, store
from harness.manifest import JobState
from harness.metrics import compute_tables
from harness.record import Outcome, RequestRecord, RunRecord, TokenChunk
from harness.report.arms import group_arms
from harness.report.read import read_results
from harness.report.validity import validity_notes
from harness.sweep import arm, combine_jobs, failed_lines, kept_line

CONFIG = {"engine": {"name": "ours", "num_blocks": 8, "safety_margin": None}, "measure": {"seed": 3}}


@pytest.mark.parametrize(
    "variable, expected",
    [
        (None, None),
        ("engine", "static_waves"),
        ("engine.num_blocks", "8"),
        ("engine.safety_margin", "null"),
        ("engine,measure.seed", "static_waves,3"),
    ],
)
def test_arm_is_the_value_of_the_variable(variable, expected):
    assert arm(CONFIG, {"engine": "static_waves"}, variable) == expected


def test_a_variable_that_is_not_there():
    with pytest.raises(ValueError, match=r"'engine.blocks' is neither a config group nor a key"):
        arm(CONFIG, {"engine": "ours"}, "engine.blocks")


def run(root, job, engine, ids, workload_hash="w", status="ok"):
    request = RequestRecord(
        "r0", 3, 4, t_sched_ns=0, t_submit_ns=0, t_done_ns=9, outcome=Outcome.OK_LENGTH,
        chunks=[TokenChunk(i, (t,)) for i, t in enumerate(ids)],
    )  # fmt: skip
    identity = {"run_id": job, "engine": engine, "model": "m", "workload_hash": workload_hash, "repeat": 0}
    record = RunRecord(identity, [request], t_start_ns=0, t_end_ns=9, status=status)
    store.write_result(root / job, compute_tables(record))
    manifest.append(root, JobState(job, "h", (f"engine={engine}",), status, manifest.now()))


def test_without_a_reference_nothing_is_compared(tmp_path):
    run(tmp_path, "0", "static", [1])
    run(tmp_path, "1", "ours", [1])
    assert combine_jobs(tmp_path, None)["runs"]["tokens_match"].isna().all()


def test_a_sweep_without_any_row_has_no_tables(tmp_path):
    manifest.append(tmp_path, JobState("0", "h", (), "running", manifest.now()))
    assert combine_jobs(tmp_path, "static") is None
    assert failed_lines(tmp_path) == ["running: 0: did not end"]


def test_manifest_keeps_the_last_state_and_survives_a_torn_line(tmp_path):
    for state, error in (("running", None), ("failed", "no memory")):
        manifest.append(tmp_path, JobState("0-x", "h", ("a=1",), state, manifest.now(), error))
    manifest.append(tmp_path, JobState("1-y", "h", (), "ok", manifest.now()))
    with (tmp_path / "manifest.jsonl").open("a") as file:
        file.write('{"job": "2')
    assert [(s.job, s.state) for s in manifest.latest(tmp_path)] == [("0-x", "failed"), ("1-y", "ok")]
    assert failed_lines(tmp_path) == ["failed: 0-x: no memory"]
    assert json.loads((tmp_path / "manifest.jsonl").read_text().splitlines()[0])["overrides"] == ["a=1"]
    assert manifest.latest(tmp_path / "none") == []
    manifest.append(tmp_path, JobState("3-z", "h", (), "ok", manifest.now()))  # not lost with the torn one before it
    assert [s.job for s in manifest.latest(tmp_path)] == ["0-x", "1-y", "3-z"]


def test_what_an_interrupted_sweep_left(tmp_path):
    assert kept_line(tmp_path) == "nothing was measured"
    run(tmp_path, "0", "static", [1, 2])
    apart = f"the tables are not joined, each is in its own folder below {tmp_path}"
    assert kept_line(tmp_path) == f"1 of 1 measured; {apart}"
    combine_jobs(tmp_path, None)
    assert kept_line(tmp_path) == f"1 of 1 measured; the tables of {tmp_path} hold 1 of 1 requests"


def test_jobs_that_were_not_started_are_counted(tmp_path):
    for job in ("0", "1", "2", "3"):
        manifest.append(tmp_path, JobState(job, "h", (), "planned", manifest.now()))
    run(tmp_path, "0", "static", [1, 2])
    assert failed_lines(tmp_path) == ["1 of 4 measured, 3 not started"]
    manifest.append(tmp_path, JobState("1", "h", (), "interrupted", manifest.now(), "interrupted by Ctrl-C"))
    combine_jobs(tmp_path, None)
    tally = "1 of 4 measured, 1 interrupted, 2 not started"
    assert kept_line(tmp_path) == f"{tally}; the tables of {tmp_path} hold 1 of 1 requests"
    assert failed_lines(tmp_path) == ["interrupted: 1: interrupted by Ctrl-C"]
    results = read_results(tmp_path)
    assert validity_notes(results, group_arms(results))[0] == (
        f"The sweep was not finished: {tally}. Only what was measured enters a number."
    )
