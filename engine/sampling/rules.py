"""Which logits of a request are raised, lowered or forbidden, worked out once a request."""

from __future__ import annotations

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


Additions = tuple[np.ndarray, np.ndarray]
"""[n] int64 ids and [n] float32 values to add to their logits."""


@dataclass(frozen=True, slots=True)
class BiasRules:
    """Bias of a request.

    Attributes:
        always, early, first: what holds for any token, before ``min_new_tokens`` are generated, and for the first one,
            without looking back.
        min_new_tokens: as in `SamplingParams`; 0 where nothing depends on it.
        conditional: bias that depends on the tokens before.
        longest_prefix: most tokens a condition looks back.
    """

    always: Additions
    early: Additions
    first: Additions
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
        for token, value in params.logit_bias:
            always[token] = always.get(token, 0.0) + value
        for word in dict.fromkeys(params.bad_words_ids):
            if len(word) > 1:
                conditional.append(ConditionalBias(word[:-1], word[-1], FORBIDDEN))
            elif word[0] not in eos_token_ids:  # transformers lets EOS through as well
                always[word[0]] = FORBIDDEN
        always.update(dict.fromkeys(params.suppress_tokens, FORBIDDEN))
        min_new_tokens = params.min_new_tokens if eos_token_ids else 0
        early = always | dict.fromkeys(eos_token_ids, FORBIDDEN) if min_new_tokens else always
        first = early | dict.fromkeys(params.begin_suppress_tokens, FORBIDDEN)
        return cls(
            _additions(always),
            _additions(early),
            _additions(first),
            min_new_tokens,
            tuple(conditional),
            max((len(c.prefix) for c in conditional), default=0),
        )

    def leaves_nothing(self, vocab_size: int) -> bool:
        """Whether every token is forbidden at some time, whatever has come before."""
        return any(
            np.count_nonzero(values == FORBIDDEN) == vocab_size for _, values in (self.always, self.early, self.first)
        )

    def at(self, index: int) -> Additions:
        """What holds for the ``index``-th generated token without looking back."""
        if index == 0:
            return self.first
        return self.early if index < self.min_new_tokens else self.always


def _additions(bias: dict[int, float]) -> Additions:
    return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)
