"""The operations of token choice: Triton kernels where they run, their torch twins elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine import kernels
from engine.kernels import Cuts
from engine.sampling.filters import RandomRows, cuts_by_search, cuts_by_sorting


@dataclass(frozen=True, slots=True)
class Operators:
    """One implementation of each operation; the first two have the signatures of `engine.kernels`."""

    greedy_argmax: Callable[..., torch.Tensor]
    gumbel_argmax: Callable[..., torch.Tensor]
    filter_cuts: Callable[[torch.Tensor, RandomRows, torch.Tensor | None], Cuts]

    @classmethod
    def choose(cls, device: torch.device) -> Operators:
        """Kernels on a device that runs them, twins otherwise."""
        if device.type == "cuda" and kernels.why_no_triton(device) is None:
            return cls(kernels.greedy_argmax, kernels.gumbel_argmax, cuts_by_search)
        return cls(kernels.greedy_argmax_torch, kernels.gumbel_argmax_torch, cuts_by_sorting)
