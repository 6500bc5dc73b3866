"""These tests run in Triton's interpreter, in a process of their own.

Triton decides when a kernel is decorated whether it is interpreted, so TRITON_INTERPRET must be set before anything
imports the kernels, and it must not be set for the engine's other tests. As part of the whole suite nothing is
collected here; ``../test_interpreted.py`` starts a pytest of this folder with the variable set. To run them directly:
``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*"]


@pytest.fixture
def generator():
    import torch

    return torch.Generator().manual_seed(0)


@pytest.fixture
def check_linear():
    """Hold a linear layer's kernel against its twin; rows around the inputs and the output hold NaN."""
    import torch

    from engine.kernels.skinny import skinny_linear_torch

    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # the interpreter truncates to bf16

    def check(kernel, rows, columns, depth, dtype, biased, tile, seed=0):
        generator = torch.Generator().manual_seed(seed)
        padded = torch.full((rows + 2, depth + 8 - depth % 8), float("nan"), dtype=dtype)
        padded[1:-1, :depth] = torch.randn(rows, depth, generator=generator).to(dtype)
        weight = torch.randn(columns, depth, generator=generator).to(dtype)
        bias = torch.randn(columns, generator=generator).to(dtype) if biased else None
        buffer = torch.full((rows + 2, columns + 1), float("nan"), dtype=dtype)
        inputs, out = padded[1:-1, :depth], buffer[1:-1, :columns]
        kernel(inputs, weight, bias, tile, out=out)
        want = skinny_linear_torch(inputs, weight, bias)
        assert torch.isfinite(out).all()
        error = (out.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-9)
        assert error <= tolerance[dtype]
        assert buffer[[0, -1]].isnan().all()
        assert buffer[:, columns:].isnan().all()

    return check
