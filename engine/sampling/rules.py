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

    def leaves_nothing_after(self, vocab_size: int) -> tuple[int, ...] | None:
        """Tokens after which every token is forbidden, some of them by a condition; None if there are none."""
        by_prefix: dict[tuple[int, ...], set[int]] = {}
        for c in self.conditional:
            if c.value == FORBIDDEN:
                by_prefix.setdefault(c.prefix, set()).add(c.token)
        whatever = _forbidden(self.early)
        for prefix in by_prefix:
            met = (by_prefix.get(prefix[at:], set()) for at in range(len(prefix)))
            if len(whatever.union(*met)) == vocab_size:
                return prefix
        return None

    def distinct_tokens(self, vocab_size: int, prompt: Iterable[int], eos_token_ids: frozenset[int]) -> int | None:
        """How many tokens can follow ``prompt`` if none may come twice (``no_repeat_ngram_size=1``), conditions aside;
        None if there is no bound: an EOS stays free, and ends the request before nothing is left."""
        used = set(prompt)
        if vocab_size == len(used | _forbidden(self.first)):
            return 0
        before_eos = vocab_size - len(used | _forbidden(self.early))
        if self.min_new_tokens > before_eos:
            return before_eos
        if eos_token_ids - used - _forbidden(self.always):
            return None
        return vocab_size - len(used | _forbidden(self.always))

    def at(self, index: int) -> Additions:
        """What holds for the ``index``-th generated token without looking back."""
        if index == 0:
            return self.first
        return self.early if index < self.min_new_tokens else self.always


def _forbidden(additions: Additions) -> set[int]:
    ids, values = additions
    return set(ids[values == FORBIDDEN].tolist())


def _additions(bias: dict[int, float]) -> Additions:
    return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)
