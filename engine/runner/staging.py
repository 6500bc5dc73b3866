"""Pinned host memory that a step's inputs leave from and its tokens come back to."""

from __future__ import annotations

import numpy as np
import torch

from engine.runner.batch import StepShape
from engine.sampling import Choice


class Staging:
    """Two host buffers in turn, each free again once the copy out of it is done."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._events = [torch.cuda.Event(), torch.cuda.Event()]
        self._turn = 0

    def take(self, shape: StepShape) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        """A pinned int32 buffer of the shape's size, safe to overwrite, and its sections."""
        self._turn ^= 1
        size, buffer = shape.size, self._buffers[self._turn]
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=True)
        else:
            self._events[self._turn].synchronize()
        return buffer[:size], shape.carve(buffer.numpy())

    def copied(self) -> None:
        self._events[self._turn].record()


class Returns:
    """Host buffers for the tokens of the steps that may be on the device at once and of one being read, in turn. A step
    is waited for before the next but one is launched, so a buffer is free when its turn comes again."""

    def __init__(self, max_requests: int) -> None:
        self._tokens = torch.empty(3, max_requests, dtype=torch.int64, pin_memory=True).unbind()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in self._tokens]
        self._turn = 0

    def send(self, choice: Choice) -> tuple[Choice, torch.cuda.Event]:
        """Start the copy of a choice; it is there once the event has passed."""
        self._turn = (self._turn + 1) % len(self._tokens)
        tokens = self._tokens[self._turn][: len(choice.tokens)]
        tokens.copy_(choice.tokens, non_blocking=True)
        others = [
            None if t is None else torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
            for t in choice.tensors()[1:]
        ]
        event = self._events[self._turn]
        event.record()
        return choice.at_home(tokens, *others), event
