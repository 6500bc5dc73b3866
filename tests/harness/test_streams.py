"""Standard streams that are closed, full or without a reader, and a current folder that is gone: in right words."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shell(tmp_path):
    def shell(command):
        bench = f"{shlex.quote(sys.executable)} -P -m harness"
        return subprocess.run(
            ["bash", "-c", command.replace("cb-bench", bench)],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True,
        )  # fmt: skip

    return shell


def test_closed_streams_are_silent(shell):
    done = shell("cb-bench engine=null dry_run=true >&- 2>&- <&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("module", ["report", "compare", "capacity", "tune"])
def test_they_are_silent_in_every_command(shell, module):
    done = shell(f"{shlex.quote(sys.executable)} -P -m harness.{module}.app --help >&- 2>&- <&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_comparison_is_written_without_an_output(shell, tmp_path):
    results = shlex.quote(str(PROJECT / "results/reference/cpu/quickstart"))
    arms = f"--arm-a static --arm-b ours_small --out {shlex.quote(str(tmp_path / 'out'))}"
    done = shell(f"{shlex.quote(sys.executable)} -P -m harness.compare.app {results} {results} {arms} >&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "comparison.html").is_file()


def test_a_reader_that_leaves(shell):
    done = shell("cb-bench --help workload | true; exit ${PIPESTATUS[0]}")
    said = "cb-bench: what it says could not be written to its standard output (Broken pipe)\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_output(shell):
    done = shell("cb-bench engine=null dry_run=true > /dev/full")
    said = "cb-bench: what it says could not be written to its standard output (No space left on device)\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_current_folder_that_is_gone(shell):
    done = shell("mkdir gone; cd gone; rmdir ../gone; cb-bench engine=null dry_run=true")
    said = "cb-bench: the current folder has been removed: change to one that exists\n"
    assert (done.returncode, done.stderr) == (1, said)
