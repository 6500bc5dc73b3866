from __future__ import annotations

import subprocess
import time

import pytest

from harness import provenance
from harness.telemetry import Telemetry


def sampled(gpu):
    telemetry = Telemetry(1.0, gpu)
    began = time.perf_counter_ns()
    telemetry.start()
    time.sleep(0.05)
    telemetry.stop()
    return telemetry, began


def test_on_a_cpu_memory_is_sampled_and_gpu_columns_are_absent():
    telemetry, began = sampled(None)
    rows = telemetry.samples(began)
    assert len(rows) >= 2
    assert all(row.keys() == {"t_s", "rss_bytes"} and row["rss_bytes"] > 1_000_000 for row in rows)
    assert [r["t_s"] for r in rows] == sorted(r["t_s"] for r in rows)
    assert telemetry.samples(time.perf_counter_ns()) == []


def test_gpu_readings_are_passed_on_with_their_nulls():
    class Probe:
        def sample(self):
            return {"gpu_used_bytes": 5, "power_w": None}

    telemetry, began = sampled(Probe())
    assert telemetry.samples(began)[0]["gpu_used_bytes"] == 5
    assert telemetry.samples(began)[0]["power_w"] is None
    assert telemetry.peak("gpu_used_bytes") == 5
    assert telemetry.peak("power_w") is None


def test_interval_must_be_positive():
    with pytest.raises(ValueError, match="telemetry_interval_ms"):
        Telemetry(0, None)


def test_provenance_states_software_host_and_revision(tmp_path):
    facts = {"command_line": ["cb-bench", "engine=ours"]} | provenance.collect() | provenance.torch_facts("cpu")
    assert facts["command_line"] == ["cb-bench", "engine=ours"]
    assert facts["package.torch"]
    assert facts["package.transformers"]
    assert facts["memory.total_bytes"] > 0
    assert facts["device"] == "cpu"
    assert "gpu.name" not in facts
    assert provenance.source_revision(tmp_path) == {"git.sha": None, "git.dirty": None, "git.diff_sha256": None}


def test_local_changes_are_hashed(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "a")
    clean = provenance.source_revision(tmp_path)
    assert (clean["git.dirty"], clean["git.diff_sha256"]) == (False, None)
    hashes = set()
    for text in ("2", "3"):
        (tmp_path / "a").write_text(text)
        changed = provenance.source_revision(tmp_path)
        assert (changed["git.sha"], changed["git.dirty"]) == (clean["git.sha"], True)
        hashes.add(changed["git.diff_sha256"])
    assert len(hashes) == 2


def test_the_hash_of_the_code_is_of_what_runs(tmp_path):
    assert provenance.code_hash(tmp_path) is None
    for name, text in (("engine/a.py", "1"), ("sweeps/b/c.yaml", "x: 1"), ("docs/a.md", "1"), ("tests/t.py", "1")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    first = provenance.code_hash(tmp_path)
    for name in ("docs/a.md", "tests/t.py", "engine/README.md"):
        (tmp_path / name).write_text("2")
        assert provenance.code_hash(tmp_path) == first
    hashes = {first}
    for name in ("engine/a.py", "sweeps/b/c.yaml", "harness/new.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("2")
        hashes.add(provenance.code_hash(tmp_path))
    assert len(hashes) == 4
    assert provenance.own_revision()["code.sha256"] == provenance.collect()["code.sha256"]


def test_revisions_of_the_same_code_have_one_name():
    def revision(sha, code=None, diff=None):
        return {"git.sha": sha and sha * 10, "git.diff_sha256": diff, "code.sha256": code and code * 8}

    assert provenance.code_names([revision("a", "1"), revision("b", "1"), revision("c", "2")]) == [
        "aaaaaaaaaa",
        "aaaaaaaaaa",  # another commit, of documents
        "cccccccccc",
    ]
    # what was measured before the code was hashed is known by its commit
    assert provenance.code_names([revision("a"), revision("a", "1"), revision("b", "1"), revision("b")]) == [
        "aaaaaaaaaa",
        "aaaaaaaaaa",
        "bbbbbbbbbb",
        "bbbbbbbbbb",
    ]
    # a file that git does not track; no checkout at all; nothing known
    assert provenance.code_names([revision("a", "1"), revision("a", "2"), revision(None, "3"), {}]) == [
        "aaaaaaaaaa",
        "aaaaaaaaaa (code 22222222)",
        "code 33333333",
        None,
    ]


def test_the_hash_of_a_setup_covers_what_stays_and_not_what_passes():
    facts = {"package.torch": "2", "gpu.name": "H200", "model.weight_hash": "a", "gpu.other_processes": 0, "load.x": 1}
    same = provenance.setup_hash(facts)
    assert provenance.setup_hash({**facts, "gpu.other_processes": 3, "load.x": 2, "command_line": []}) == same
    assert provenance.setup_hash({**facts, "model.weight_hash": "b"}) != same
    assert provenance.setup_hash({**facts, "package.torch": "3"}) != same
    assert provenance.setup_hash({**facts, "git.sha": "a" * 40}) == same  # the code counts, not the commit
    assert provenance.setup_hash({**facts, "code.sha256": "a" * 64}) != same
