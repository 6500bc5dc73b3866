"""The tokens so far of the rows that look back at them.

The host knows all but the newest token of a row whose last step is still on the device; that one is filled in there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

IN_FLIGHT = -1
"""Stands for the token that is still on the device: the last one sampled in the row's slot."""


class HistoryTable:
    """Tokens of running requests as an array by slot that follows their lists by the new entries only."""

    def __init__(self) -> None:
        self._tokens = np.zeros((0, 256), dtype=np.int32)
        self._known = np.zeros(0, dtype=np.int64)

    def restart(self, slot: int) -> None:
        """The slot has a new owner."""
        if slot >= len(self._known):
            self._widen(2 * slot + 8, self._tokens.shape[1])
        self._known[slot] = 0

    def follow(self, slot: int, tokens: Sequence[int]) -> None:
        """Take over what is new in ``tokens``, which have only grown since the last call."""
        known, count = int(self._known[slot]), len(tokens)
        if count == known:
            return
        if count > self._tokens.shape[1]:
            self._widen(len(self._known), 2 * count)
        if count == known + 1:
            self._tokens[slot, known] = tokens[-1]
        else:
            self._tokens[slot, known:count] = tokens[known:]
        self._known[slot] = count

    def windows(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, pad: int) -> np.ndarray:
        """The rows' tokens ``starts`` to ``ends`` side by side.

        Args:
            slots, starts, ends: [rows]. A row ends at most one token beyond what the host knows.
            pad: id behind a row's end, outside the vocabulary.

        Returns:
            [rows, longest] int32, `IN_FLIGHT` where the device knows better.
        """
        longest = max(int((ends - starts).max()), 1)
        at = starts[:, None] + np.arange(longest)
        if longest > self._tokens.shape[1]:
            self._widen(len(self._known), 2 * longest)
        if starts.any():
            tokens = self._tokens[slots[:, None], np.minimum(at, self._tokens.shape[1] - 1)]
        else:
            tokens = self._tokens[slots, :longest]
        known = self._known[slots]
        tokens[at >= known[:, None]] = pad
        late = np.flatnonzero(ends > known)
        tokens[late, (ends - starts)[late] - 1] = IN_FLIGHT
        return tokens

    def _widen(self, slots: int, length: int) -> None:
        tokens, known = np.zeros((slots, length), dtype=np.int32), np.zeros(slots, dtype=np.int64)
        tokens[: len(self._known), : self._tokens.shape[1]] = self._tokens
        known[: len(self._known)] = self._known
        self._tokens, self._known = tokens, known


def resolve_in_flight(tokens: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """[rows, longest] int64 histories with the token in flight put in; ``last_token`` [rows] is each row's own."""
    return torch.where(tokens < 0, last_token[:, None], tokens).long()
