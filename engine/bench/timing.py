"""Device times of short operations, and the machine's ceilings, measured the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.kernels.autotune import GraphTimer

COLD_BYTES = 1 << 28
"""Bytes that calls must touch between two uses of a buffer for it to be gone from the L2 cache (an H200 has 50 MiB)."""


def buffer_sets(bytes_per_call: int, most: int = 256) -> int:
    """How many sets of buffers to rotate so that each call finds the L2 cache cold."""
    return max(3, min(most, -(-COLD_BYTES // max(bytes_per_call, 1)) + 1))


def seconds_per_call(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median device time of one of the calls, which do the same on buffers of their own.

    They are recorded in one CUDA graph, so that no time goes to launching, and the graph is replayed ``repeats`` times
    between events.
    """
    for call in calls[:2]:  # compiles, and creates handles
        call()
    timer = GraphTimer(torch.device("cuda", torch.cuda.current_device()))
    return timer.seconds_per_call([calls], repeats)[0]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large elementwise kernel, read and written.

    Not of ``copy_``: in a graph that is a memcpy node, which read 2.76 TB/s on an H200 whose kernels move 4.1.
    """
    source = torch.empty(1 << 29, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_call([lambda: torch.neg(source, out=target)] * 2)


def matmul_rate(device: torch.device, size: int = 8192) -> float:
    """Multiply-adds per second, counted as two, of a square bf16 product of random matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds_per_call([lambda: torch.mm(a, b, out=out)] * 3)
