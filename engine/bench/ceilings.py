"""What the machine can do at most, measured beside what is judged by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bench.timing import copy_bandwidth, matmul_rate


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and FLOPs per second."""

    bandwidth: float
    rate: float

    @classmethod
    def measured(cls, device: torch.device) -> Ceilings:
        """Those of a CUDA device, now."""
        return cls(copy_bandwidth(device), matmul_rate(device))

    def floor(self, moved: float, flops: float) -> float:
        """Least seconds of work that moves so many bytes and does so many FLOPs."""
        return max(moved / self.bandwidth, flops / self.rate)

    def bound_by_arithmetic(self, moved: float, flops: float) -> bool:
        """Whether its FLOPs and not its bytes decide that floor."""
        return flops / self.rate > moved / self.bandwidth

    def __str__(self) -> str:
        return f"copy {self.bandwidth / 1e12:.2f} TB/s, bf16 matmul {self.rate / 1e12:.0f} TFLOP/s"
