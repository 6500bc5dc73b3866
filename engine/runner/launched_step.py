"""A step that was given to the device: what of it can be asked now, and what once the device is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.sampling import Choice
from engine.sampling.logprobs import TopTokens
from engine.scheduler import StepRows


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the device. ``choice`` is valid on the host once `wait` has returned.

    Attributes:
        rows: the rows that sample, in the order of the choice.
        padded_rows: query tokens added to reach a captured size.
        table_pages: width of its block tables.
        decode_kernel_rows: rows that took the decode fast path.
        replayed: whether a CUDA graph was replayed.
        mask_bytes: attention masks that were alive at once.
        begun, event: before its first and after its last work on a GPU.
    """

    rows: StepRows
    choice: Choice
    event: Any
    padded_rows: int
    table_pages: int
    decode_kernel_rows: int
    replayed: bool
    mask_bytes: int
    begun: Any

    @property
    def gpu_ms(self) -> float | None:
        """Time on the device from the step's first work to its tokens; None without a GPU, or without a token.

        Call `wait` before.
        """
        if self.begun is None or self.event is None:
            return None
        return float(self.begun.elapsed_time(self.event))

    def wait(self) -> tuple[np.ndarray, Sequence[float] | None, Sequence[TopTokens | None] | None]:
        """Tokens, log probabilities and most likely tokens of the rows (None where not asked for), waiting for the
        device if need be."""
        if self.event is not None:
            self.event.synchronize()
        tokens, logprobs = self.choice.tokens.numpy(), self.choice.logprobs
        tops = self.choice.to_lists()[2] if self.choice.top_counts else None
        return tokens, None if logprobs is None else logprobs.tolist(), tops


def record_event(device: torch.device) -> Any:
    """An event with its time, recorded now; None without a GPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
