"""Which logits of a request are raised, lowered or forbidden, worked out once a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engine.sampling.params import SamplingParams

FORBIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class ConditionalBias:
    """``value`` is added to the logit of ``token`` where the tokens so far end with ``prefix``."""

    prefix: tuple[int, ...]
    token: int
    value: float


@dataclass(frozen=True, slots=True)
class BiasRules:
    """Bias of a request.

    Attributes:
        always: token ids and values added at every token.
        first: ids forbidden as first token.
        early: ids forbidden before ``min_new_tokens`` are generated.
        conditional: bias that depends on the tokens before.
        longest_prefix: most tokens a condition looks back.
    """

    always: tuple[np.ndarray, np.ndarray]
    first: np.ndarray
    early: np.ndarray
    min_new_tokens: int
    conditional: tuple[ConditionalBias, ...]
    longest_prefix: int

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: frozenset[int]) -> BiasRules:
        always: dict[int, float] = {}
        conditional = []
        for ids, value in params.sequence_bias:
            if len(ids) > 1:
                conditional.append(ConditionalBias(ids[:-1], ids[-1], value))
            else:
                always[ids[0]] = always.get(ids[0], 0.0) + value
        for word in dict.fromkeys(params.bad_words_ids):
            if len(word) > 1:
                conditional.append(ConditionalBias(word[:-1], word[-1], FORBIDDEN))
            elif word[0] not in eos_token_ids:  # transformers lets EOS through as well
                always[word[0]] = FORBIDDEN
        for token, value in params.logit_bias:
            always[token] = always.get(token, 0.0) + value
        for token in params.suppress_tokens:
            always[token] = FORBIDDEN
        return cls(
            (_ids(always), np.fromiter(always.values(), np.float32, len(always))),
            _ids(params.begin_suppress_tokens),
            _ids(sorted(eos_token_ids)),
            params.min_new_tokens,
            tuple(conditional),
            max((len(c.prefix) for c in conditional), default=0),
        )

    def at(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and values that hold for the ``index``-th generated token without looking back."""
        ids, values = self.always
        banned = []
        if index == 0 and len(self.first):
            banned.append(self.first)
        if index < self.min_new_tokens and len(self.early):
            banned.append(self.early)
        if not banned:
            return ids, values
        count = sum(len(b) for b in banned)
        return np.concatenate((ids, *banned)), np.concatenate((values, np.full(count, FORBIDDEN, np.float32)))


def _ids(ids: Iterable[int]) -> np.ndarray:
    return np.array(list(ids), dtype=np.int64)
