"""The tokens so far of the rows that look back at them.

The host knows all but the newest token of a row whose last step is still on the device; that one is filled in there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

IN_FLIGHT = -1
"""Stands for the token that is still on the device: the last one sampled in the row's slot."""


class HostHistory:
    """A request's tokens as an array that follows its list by the new entries only."""

    __slots__ = ("_filled", "_tokens")

    def __init__(self) -> None:
        self._tokens = np.empty(64, dtype=np.int32)
        self._filled = 0

    def follow(self, tokens: Sequence[int]) -> np.ndarray:
        """All of ``tokens``, a list that has only grown since the last call."""
        count = len(tokens)
        if count > len(self._tokens):
            wider = np.empty(2 * count, dtype=np.int32)
            wider[: self._filled] = self._tokens[: self._filled]
            self._tokens = wider
        if count > self._filled:
            self._tokens[self._filled : count] = tokens[self._filled :]
            self._filled = count
        return self._tokens[:count]


def pad_histories(windows: Sequence[tuple[np.ndarray, int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Put the rows' tokens side by side.

    Args:
        windows: by row, the tokens known on the host and the length of the history; it is longer by at most one, the
            token in flight.
        pad: id behind a row's end, outside the vocabulary.

    Returns:
        [rows, longest] int32 with `IN_FLIGHT` where the device knows better, and [rows] int32 lengths.
    """
    lengths = np.array([length for _, length in windows], dtype=np.int32)
    tokens = np.full((len(windows), max(int(lengths.max()), 1)), pad, dtype=np.int32)
    for row, (known, length) in zip(tokens, windows, strict=True):
        row[: len(known)] = known
        if length > len(known):
            row[length - 1] = IN_FLIGHT
    return tokens, lengths


def resolve_in_flight(tokens: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """[rows, longest] int64 histories with the token in flight put in; ``last_token`` [rows] is each row's own."""
    return torch.where(tokens < 0, last_token[:, None], tokens).long()
