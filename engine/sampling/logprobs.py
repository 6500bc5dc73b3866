"""Log probabilities of what was chosen, and of what was most likely."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

TopTokens = list[tuple[int, float]]
"""(id, log probability) of the most likely tokens, the most likely first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a step chose, on the device or, once copied, on the host.

    Attributes:
        tokens: [rows] int64.
        logprobs: [rows] float32, None unless asked for.
        top_ids, top_logprobs: [t, widest] of the ``t`` rows that ask for the most likely tokens; None if none does.
        top_counts: how many of them each row asks for, by row.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    top_counts: tuple[int, ...] = ()

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.tokens, self.logprobs, self.top_ids, self.top_logprobs

    def at_home(
        self,
        tokens: torch.Tensor | None,
        logprobs: torch.Tensor | None,
        top_ids: torch.Tensor | None,
        top_logprobs: torch.Tensor | None,
    ) -> Choice:
        """The same choice with its `tensors` copied elsewhere."""
        assert tokens is not None
        return Choice(tokens, logprobs, top_ids, top_logprobs, self.top_counts)

    def to_lists(self) -> tuple[list[int], list[float] | list[None], list[TopTokens | None]]:
        """Tokens, log probabilities and most likely tokens by row; None where not asked for. Waits for the device."""
        tokens = self.tokens.tolist()
        logprobs = [None] * len(tokens) if self.logprobs is None else self.logprobs.tolist()
        if self.top_ids is None or self.top_logprobs is None:
            return tokens, logprobs, [None] * len(tokens)
        asked = iter(zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True))
        return tokens, logprobs, [_best(*next(asked), count) if count else None for count in self.top_counts]


def _best(ids: list[int], logprobs: list[float], count: int) -> TopTokens:
    """The first ``count``, without what a filter has excluded."""
    return [(i, p) for i, p in zip(ids[:count], logprobs[:count], strict=True) if p > -math.inf]


def choice_with_logprobs(
    tokens: torch.Tensor, logits: torch.Tensor, top_rows: torch.Tensor | None, top_counts: tuple[int, ...]
) -> Choice:
    """The choice of ``tokens`` with its log probabilities under ``logits`` [rows, vocabulary] float32.

    Args:
        top_rows: [t] int64, the rows whose ``top_counts`` is not 0; None if none is.
        top_counts: most likely tokens to give, by row.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    if top_rows is None:
        return Choice(tokens, chosen)
    widest = min(max(top_counts), logits.shape[-1])
    values, ids = logprobs[top_rows].topk(widest, dim=-1)
    return Choice(tokens, chosen, ids, values, top_counts)
