"""The small operations between matrix products: Triton kernels where they run, their torch twins elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine import kernels
from engine.models.cpu_linear import onednn_linear, onednn_linear_available

Operator = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Operators:
    """One implementation of each operation; signatures are those of `engine.kernels`."""

    rms_norm: Operator
    add_rms_norm: Operator
    rope_and_write: Operator
    silu_mul: Operator
    gelu_tanh_mul: Operator
    linear: Operator

    @classmethod
    def choose(cls, device: torch.device, dtype: torch.dtype) -> Operators:
        """Kernels on a device that runs them, twins otherwise."""
        if device.type == "cuda" and kernels.why_no_triton(device) is None:
            return cls(
                kernels.rms_norm,
                kernels.add_rms_norm,
                kernels.rope_and_write,
                kernels.silu_mul,
                kernels.gelu_tanh_mul,
                torch.nn.functional.linear,
            )
        linear = onednn_linear if onednn_linear_available(device, dtype) else torch.nn.functional.linear
        return replace(cls.twins(), linear=linear)

    @classmethod
    def twins(cls) -> Operators:
        """Plain torch throughout: what a compiler can see into."""
        return cls(
            kernels.rms_norm_torch,
            kernels.add_rms_norm_torch,
            kernels.rope_and_write_torch,
            kernels.silu_mul_torch,
            kernels.gelu_tanh_mul_torch,
            torch.nn.functional.linear,
        )
