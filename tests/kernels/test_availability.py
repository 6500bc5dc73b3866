"""The kernels' modules can be imported, and say why they cannot run, without triton and without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


def _python(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_without_triton_the_twins_work_and_the_kernels_say_what_is_missing() -> None:
    out = _python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from engine import kernels\n"
        "from engine.attention.triton_paged import why_not_triton\n"
        "print(kernels.why_no_triton(torch.device('cpu')))\n"
        "print(why_not_triton(torch.device('cuda'), torch.bfloat16, 128, 16))\n"
        "print(kernels.silu_mul_torch(torch.zeros(1, 4)).tolist())\n"
        "try: kernels.silu_mul(torch.zeros(1, 4))\n"
        "except RuntimeError as error: print(error)\n"
        "try: kernels.greedy_argmax(torch.zeros(1, 4))\n"
        "except RuntimeError as error: print(error)\n"
    )
    lines = out.splitlines()
    assert lines[0].startswith("triton cannot be imported")
    assert lines[1] == lines[0]
    assert lines[2] == "[[0.0, 0.0]]"
    assert lines[3].startswith("this kernel needs triton: triton cannot be imported")
    assert lines[4] == lines[3]


def test_on_a_cpu_the_reason_is_the_device() -> None:
    pytest.importorskip("triton")
    from engine.kernels import language, why_no_triton

    if not language.INTERPRETED:
        assert "need a CUDA device" in str(why_no_triton(torch.device("cpu")))
