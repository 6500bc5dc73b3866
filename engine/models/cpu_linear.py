"""Linear layers on a CPU through oneDNN.

At the few rows of a decode step torch's default (MKL's sgemm) reads weights far below the machine's speed on some
processors. oneDNN is faster with the weights as they are, and faster still with a copy in the layout of its kernels,
which it otherwise makes of the weights, tile by tile, in every call. All products of SmolLM2-135M, fp32, one core of an
AMD EPYC, ms (MKL, oneDNN, oneDNN on packed weights): 8 rows 76, 67, 43; 24 rows 122, 107, 78; 400 rows 942, 917, 829.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def onednn_linear_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN can serve the linear layers of a model on ``device`` in ``dtype``."""
    return (
        device.type == "cpu"
        and dtype is torch.float32
        and torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    )


def onednn_linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear`` for fp32 tensors on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


class PackedLinear:
    """``torch.nn.functional.linear`` on copies of a model's weights in oneDNN's own layout.

    Args:
        weights: [out, in] fp32 each, which are read when this is made and in `refresh` and looked up by their address.
    """

    LAYOUT_ROWS = 512
    """Number of rows whose layout is taken. Products of any other are right as well; on processors with AVX-512 the
    layouts for one to 512 rows did not differ in speed."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = {weight.data_ptr(): weight for weight in weights}
        self._packed: dict[int, torch.Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the weights again, one after the other, so that at most one copy too many is alive."""
        for address, weight in self._weights.items():
            self._packed.pop(address, None)
            self._packed[address] = torch.ops.mkldnn._reorder_linear_weight(weight, self.LAYOUT_ROWS)

    def __call__(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return onednn_linear(inputs, self._packed[weight.data_ptr()], bias)


class OneDnnLinears(TorchFunctionMode):
    """Inside this context, fp32 linear layers of this thread run on oneDNN."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.linear and not kwargs:
            return onednn_linear(*args)
        return func(*args, **(kwargs or {}))
