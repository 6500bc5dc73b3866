from __future__ import annotations

import pytest

from harness.backends.failures import classify_failure
from harness.record import Outcome


@pytest.mark.parametrize(
    ("message", "phase", "outcome"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "load", Outcome.OOM_LOAD),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "prefill", Outcome.OOM_PREFILL),
        ("OutOfMemoryError: CUDA out of memory.", "decode", Outcome.OOM_DECODE),
        ("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", "decode", Outcome.OOM_DECODE),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", "prefill", Outcome.OOM_PREFILL),
        ("MemoryError: Memory footprint 9 is more than available memory 3", "load", Outcome.OOM_LOAD),
        ("No requests can be scheduled and no requests can be offloaded.", "prefill", Outcome.CACHE_EXHAUSTED),
        ("not enough free KV blocks: needs 11, has 8", "decode", Outcome.CACHE_EXHAUSTED),
        ("oom_prefill: CUDA out of memory. Tried to allocate 2 GiB", "decode", Outcome.OOM_PREFILL),
        ("oom_decode: CUDA out of memory. Tried to allocate 2 GiB", "prefill", Outcome.OOM_DECODE),
        ("KV cache exhausted", "decode", Outcome.CACHE_EXHAUSTED),
        ("list index out of range", "decode", Outcome.ENGINE_ERROR),
        ("index 500 is out of bounds for dimension 0", "prefill", Outcome.ENGINE_ERROR),
        ("", "prefill", Outcome.ENGINE_ERROR),
        (None, "prefill", Outcome.ENGINE_ERROR),
    ],
)
def test_each_cause_has_its_outcome(message: str | None, phase: str, outcome: Outcome) -> None:
    assert classify_failure(message, phase) is outcome  # type: ignore[arg-type]
