"""One job a GPU: which one, what child processes see, and that two jobs never meet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.gpus import VISIBLE, own_gpu, visible_gpus


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(VISIBLE, raising=False)


def never(seconds):
    raise AssertionError("a free GPU is taken without waiting")


def test_what_is_visible():
    assert visible_gpus(None, lambda: 3) == ["0", "1", "2"]
    assert visible_gpus("2, GPU-abc", never) == ["2", "GPU-abc"]
    assert visible_gpus("", never) == []


@pytest.mark.parametrize("index, expected", [(0, "4"), (1, "5"), (2, "4"), (5, "5")])
def test_a_job_gets_the_gpu_of_its_index_and_children_see_no_other(index, expected, tmp_path):
    with own_gpu(index, ["4", "5"], tmp_path, never) as gpu:
        assert gpu == expected
        code = f"import os; print(os.environ['{VISIBLE}'])"
        seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert seen.stdout.strip() == expected
    assert VISIBLE not in os.environ


def test_a_taken_gpu_is_passed_over_and_a_full_host_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv(VISIBLE, "0,1")
    waited = []
    with own_gpu(0, ["0", "1"], tmp_path, never) as first:
        second = own_gpu(2, ["0", "1"], tmp_path, never)
        assert (first, second.__enter__()) == ("0", "1")

        def wait(seconds):
            waited.append(seconds)
            second.__exit__(None, None, None)

        with own_gpu(4, ["0", "1"], tmp_path, wait) as third:
            assert third == "1"  # 0 is its own, but still taken
    assert len(waited) == 1
    assert os.environ[VISIBLE] == "0,1"


def test_a_killed_job_leaves_its_gpu_free(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from harness.gpus import own_gpu\n"
        "own_gpu(0, ['0', '1'], Path(sys.argv[1])).__enter__(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert (tmp_path / "0.lock").exists()
    with own_gpu(0, ["0", "1"], tmp_path, never) as gpu:
        assert gpu == "0"


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_nothing_to_choose(gpus, tmp_path):
    with own_gpu(3, gpus, tmp_path, never) as gpu:
        assert gpu is None
        assert VISIBLE not in os.environ
