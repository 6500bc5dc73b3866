"""The memory ledger held against what was measured: planned lines, their sum, and what they leave unexplained."""

from __future__ import annotations

from collections.abc import Mapping

PLANNED = "planned"
RESIDUAL = "residual"
OUTSIDE = "outside_torch"
_MEASURED = ("peak_", "free_")
NOT_ON_DEVICE = ("host_", "pinned_")
PART = "of_"
"""Begins a line that is part of another one: it is not added again."""
_REUSED = "of_graph_pool_reused_bytes"
"""The part of the captured steps' memory that the allocator does not count as allocated."""


def reconcile(memory: Mapping[str, int | None], own_bytes: int | None) -> dict[str, int | None]:
    """Lines to add to a run's memory.

    ``planned`` is the sum of the engine's lines on the model's device. ``residual`` is what was measured beyond it: of
    the allocator's peak on a GPU, to which the memory is added that captured steps use without owning it; on a CPU of
    the peak of resident memory, which holds the interpreter and its libraries too. ``outside_torch`` is what the
    process used on the GPU beyond torch's reserve (CUDA's context, kernels and workspaces of libraries). None where one
    of the two is not known; without a line of the engine: {}.

    Args:
        memory: ledger lines of the engine and peaks (``peak_*``) in bytes.
        own_bytes: largest use of the GPU by this process (NVML).
    """
    lines = [v for k, v in memory.items() if not k.startswith((*_MEASURED, *NOT_ON_DEVICE, PART)) and v is not None]
    if not lines:
        return {}
    planned = sum(lines)
    allocated, reserved = memory.get("peak_gpu_allocated_bytes"), memory.get("peak_gpu_reserved_bytes")
    measured = memory.get("peak_rss_bytes") if allocated is None else allocated + (memory.get(_REUSED) or 0)
    return {
        PLANNED: planned,
        RESIDUAL: None if measured is None else measured - planned,
        OUTSIDE: None if own_bytes is None or reserved is None else own_bytes - reserved,
    }
