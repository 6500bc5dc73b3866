"""``python -m harness`` as a user runs it: in a process of its own, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SMALL = (
    "model=tiny-llama",
    "workload.requests=6",
    "workload.prompt_tokens={kind:uniform,low:4,high:12}",
    "workload.output_tokens={kind:uniform,low:3,high:8}",
    "measure.device=cpu",
    "measure.torch_threads=1",
    "measure.warmup_requests=1",
)


def environment() -> dict[str, str]:
    values = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    values.pop("HYDRA_FULL_ERROR", None)
    return values


@pytest.fixture
def bench(tmp_path):
    """Run ``python -m harness ARGUMENTS`` and return its CompletedProcess; results are below ``tmp_path``."""

    def run(*arguments: str, small: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "harness", *(SMALL if small else ()), *arguments],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def start_bench(tmp_path):
    """Start ``python -m harness ARGUMENTS`` as ``bench`` does and return its Popen; killed after the test."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "harness", *SMALL, *arguments],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
