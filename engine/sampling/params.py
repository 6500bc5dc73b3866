"""How one request chooses its tokens, validated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any

MIN_TEMPERATURE = 1e-5
LARGEST = 1e30
"""Bound of every number, so that float32 arithmetic on logits never overflows; its inverse bounds a divisor."""
LARGEST_INTEGER = 2**31 - 1
LOGPROBS_MODES = ("processed", "raw")

Sequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request. Names and meaning follow transformers' GenerationConfig where it has them.

    Lists and mappings may be given in any usual form (lists, tuples, JSON's string keys); they are kept as tuples.

    Attributes:
        temperature: 0 (or under 1e-5, where dividing would overflow) means greedy: the most likely token. Otherwise
            logits are divided by it.
        top_k: keep the k most likely tokens, and what ties with the last of them; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens at least this share as likely as the most likely one; 0 keeps all.
        seed: key of the request's own random stream. The same seed gives the same tokens whatever the batch.
        repetition_penalty: positive logits of tokens in prompt or output are divided by it, negative ones multiplied.
        presence_penalty: subtracted from the logits of tokens in the output (OpenAI's definition).
        frequency_penalty: subtracted once for every time a token is in the output (OpenAI's definition).
        no_repeat_ngram_size: no n-gram of prompt and output comes twice; 0 = off.
        min_new_tokens: no EOS and no stop sequence ends the request before so many tokens.
        bad_words_ids: token sequences that are never completed (single EOS ids excepted, as in transformers).
        logit_bias: (id, bias) pairs added to the logits.
        sequence_bias: (ids, bias) pairs: added to the logit of the last id where the ones before it have just come.
        suppress_tokens: ids that are never chosen.
        begin_suppress_tokens: ids that are not chosen as first token.
        stop_sequences: token sequences that end the request when the output ends with one; they stay in the output.
        top_logprobs: how many of the most likely tokens to give with each token, beside its own log probability.
        logprobs_mode: log probabilities of the "processed" logits (penalties, bias, temperature and filters applied) or
            of the "raw" ones of the model.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    bad_words_ids: Sequences = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    stop_sequences: Sequences = ()
    top_logprobs: int = 0
    logprobs_mode: str = "processed"

    greedy: bool = field(init=False, repr=False, compare=False)
    counts_tokens: bool = field(init=False, repr=False, compare=False)
    """Whether a penalty or the n-gram rule looks at the tokens so far."""
    biased: bool = field(init=False, repr=False, compare=False)
    """Whether single logits are raised, lowered or forbidden."""
    processed: bool = field(init=False, repr=False, compare=False)
    """Whether the model's logits are changed before the token is chosen."""
    plain: bool = field(init=False, repr=False, compare=False)
    """Whether the token is the argmax of the model's own logits and nothing else is asked."""

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, low=0, note=" (0 = greedy)")
        _number("top_p", self.top_p, above=0, high=1, note=" (1 = off)")
        _number("min_p", self.min_p, low=0, high=1, note=" (0 = off)")
        _number("repetition_penalty", self.repetition_penalty, above=0, note=" (1 = off)")
        _number("presence_penalty", self.presence_penalty)
        _number("frequency_penalty", self.frequency_penalty)
        keep = _Keeper(self)
        keep("seed", _integer("seed", self.seed))
        keep("top_k", max(_integer("top_k", self.top_k, -1, " (0 or -1 = off)"), 0))
        keep("no_repeat_ngram_size", _integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, " (0 = off)"))
        keep("min_new_tokens", _integer("min_new_tokens", self.min_new_tokens, 0))
        keep("top_logprobs", _integer("top_logprobs", self.top_logprobs, 0))
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {self.logprobs_mode!r}")
        keep("bad_words_ids", _sequences("bad_words_ids", self.bad_words_ids))
        keep("stop_sequences", _sequences("stop_sequences", self.stop_sequences))
        keep("suppress_tokens", _ids("suppress_tokens", self.suppress_tokens))
        keep("begin_suppress_tokens", _ids("begin_suppress_tokens", self.begin_suppress_tokens))
        keep("logit_bias", _logit_bias(self.logit_bias))
        keep("sequence_bias", _sequence_bias(self.sequence_bias))
        keep("greedy", self.temperature < MIN_TEMPERATURE)
        penalties = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        keep("counts_tokens", penalties or self.no_repeat_ngram_size > 0)
        lists = (
            self.bad_words_ids, self.logit_bias, self.sequence_bias, self.suppress_tokens, self.begin_suppress_tokens
        )  # fmt: skip
        keep("biased", any(lists) or self.min_new_tokens > 0)
        keep("processed", not self.greedy or self.counts_tokens or self.biased)
        keep("plain", not self.processed and not self.top_logprobs)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """What can be set."""
        return tuple(f.name for f in fields(cls) if f.init)

    def override(self, **values: Any) -> SamplingParams:
        """A copy with the given fields; ValueError names a field that does not exist."""
        known = self.names()
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown sampling parameter {unknown[0]!r}; a request may set {', '.join(known)}")
        return replace(self, **values)

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError if a list names an id that the model does not have."""
        named: dict[str, Iterable[int]] = {
            "bad_words_ids": (i for word in self.bad_words_ids for i in word),
            "stop_sequences": (i for stop in self.stop_sequences for i in stop),
            "logit_bias": (i for i, _ in self.logit_bias),
            "sequence_bias": (i for ids, _ in self.sequence_bias for i in ids),
            "suppress_tokens": self.suppress_tokens,
            "begin_suppress_tokens": self.begin_suppress_tokens,
        }
        for name, ids in named.items():
            for i in ids:
                if i >= vocab_size:
                    raise ValueError(f"{name} names token {i}, outside the vocabulary 0 … {vocab_size - 1}")


class _Keeper:
    """Sets fields of a frozen instance while it is made."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params

    def __call__(self, name: str, value: Any) -> None:
        object.__setattr__(self._params, name, value)


def _number(
    name: str,
    value: Any,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    note: str = "",
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{name} must be a finite number of at most {LARGEST:g}, got {value!r}")
    if above == 0 and high is None and 0 < value < 1 / LARGEST:
        raise ValueError(f"{name} must be at least {1 / LARGEST:g}, got {value!r}")
    too_low = (low is not None and value < low) or (above is not None and value <= above)
    if too_low or (high is not None and value > high):
        if high is not None:
            allowed = f"in {'[' if above is None else '('}{low if above is None else above}, {high}]"
        else:
            allowed = f">= {low}" if above is None else f"> {above}"
        raise ValueError(f"{name} must be {allowed}{note}, got {value!r}")


def as_integer(value: Any) -> int | None:
    """``value`` if it is an integer, numpy's among them; a bool is none."""
    if type(value) is int:  # nearly always
        return value
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _integer(name: str, value: Any, low: int | None = None, note: str = "") -> int:
    number = as_integer(value)
    if number is None:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if low is not None and number < low:
        raise ValueError(f"{name} must be >= {low}{note}, got {value!r}")
    if low is not None and number > LARGEST_INTEGER:
        raise ValueError(f"{name} must be <= {LARGEST_INTEGER}, got {value!r}")
    return number


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    ids = []
    for given in value:
        i = as_integer(given)
        if i is None or i < 0:
            raise ValueError(f"{name} must hold token ids, integers >= 0, got {given!r}")
        ids.append(i)
    return tuple(ids)


def _sequences(name: str, value: Any) -> Sequences:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of lists of token ids, got {value!r}")
    result = []
    for sequence in value:
        if not isinstance(sequence, Sequence) or isinstance(sequence, str) or len(sequence) == 0:
            raise ValueError(f"{name} must be a list of non-empty lists of token ids, got {sequence!r} in it")
        result.append(_ids(name, sequence))
    return tuple(result)


def _bias(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (-LARGEST <= value <= LARGEST or value == -math.inf):
        raise ValueError(
            f"a bias in {name} must be a number of at most {LARGEST:g} (or -inf, to forbid), got {value!r}"
        )
    return float(value)


def _pairs(name: str, value: Any) -> list[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise ValueError(f"{name} must map tokens to numbers, got {value!r}")
    result = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"{name} must hold pairs of token and number, got {pair!r} in it")
        result.append((pair[0], pair[1]))
    return result


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    result: dict[int, float] = {}
    for token, bias in _pairs("logit_bias", value):
        number = int(token) if isinstance(token, str) and token.isdecimal() else token  # JSON's keys are strings
        result[_ids("logit_bias", (number,))[0]] = _bias("logit_bias", bias)
    return tuple(sorted(result.items()))


def _sequence_bias(value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    result: dict[tuple[int, ...], float] = {}
    for sequence, bias in _pairs("sequence_bias", value):
        result[_sequences("sequence_bias", [sequence])[0]] = _bias("sequence_bias", bias)
    return tuple(sorted(result.items()))
