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
