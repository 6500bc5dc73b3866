"""From an error's text to the failure taxonomy: one table, so that every backend counts alike."""

from __future__ import annotations

import re
from typing import Literal

from harness.record import Outcome

Phase = Literal["load", "prefill", "decode"]

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY|not enough memory|MemoryError"
    r"|can't allocate memory|cannot allocate memory|DefaultCPUAllocator|more than available memory",
    re.IGNORECASE,
)
_CACHE_EXHAUSTED = re.compile(
    r"no requests can be (scheduled|offloaded)"
    r"|(not enough|no( more)?|out of) (free )?(kv )?(cache )?(blocks|pages|sectors)"
    r"|(kv )?cache (is )?(exhausted|full|too small)|no free (blocks|pages)|can never fit",
    re.IGNORECASE,
)
_STATED = re.compile(r"oom_(prefill|decode): ")
_OOM_BY_PHASE: dict[str, Outcome] = {
    "load": Outcome.OOM_LOAD,
    "prefill": Outcome.OOM_PREFILL,
    "decode": Outcome.OOM_DECODE,
}


def classify_failure(message: str | None, phase: Phase) -> Outcome:
    """The outcome of a failed request.

    Args:
        message: the engine's error text.
        phase: what the request was in: ``load`` before any request, ``prefill`` until its first token, then ``decode``.
    """
    text = message or ""
    stated = _STATED.match(text)
    if stated:  # the engine knows in which phase the step was; a request with tokens may be prefilling again
        return _OOM_BY_PHASE[stated[1]]
    if _CACHE_EXHAUSTED.search(text):  # before memory: "out of memory blocks" is the cache's shortage
        return Outcome.CACHE_EXHAUSTED
    if _OUT_OF_MEMORY.search(text):
        return _OOM_BY_PHASE[phase]
    return Outcome.ENGINE_ERROR
