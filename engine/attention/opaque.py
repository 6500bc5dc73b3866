"""Operators that torch.compile leaves alone: what is inside them is neither traced nor fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("continuous_batching", "DEF")


def opaque(name: str, schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operator ``torch.ops.continuous_batching.<name>``.

    The function may read and write what its thread's context holds (the paged cache, the step's rows) besides its
    arguments. That is safe because calls of one step hang together by their tensors: a layer's input comes from the
    layer before.

    Args:
        name: of the operator.
        schema: arguments and result, in torch's notation.
        fake: shape and dtype of the result from those of the arguments.
    """

    def register(function: Callable[..., Any]) -> Any:
        _library.define(f"{name}{schema}")
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"continuous_batching::{name}", fake, lib=_library)
        return getattr(torch.ops.continuous_batching, name)

    return register


def padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """``rows`` with zeros behind them, ``count`` in all; itself if it has that many."""
    if rows.shape[0] == count:
        return rows
    result = rows.new_zeros((count, *rows.shape[1:]))
    result[: rows.shape[0]] = rows
    return result
