"""What a request must be to be let in."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from engine.cache import CacheLayout
from engine.model_shape import ModelShape
from engine.requests import Request
from engine.resolution import ResolvedConfig
from engine.sampling import SamplingParams
from engine.sampling.generation import PROCESSORS, RANDOM, default_sampling, eos_ids
from engine.sampling.params import as_integer
from engine.sampling.random import folded
from engine.sampling.rules import BiasRules

MAX_SEQUENCES = 16_384
"""Sequences of one prompt at the most. Each is a request in host memory from its admission on (1.1 kB, and 8 bytes a
token of its prompt), however few the cache can run at a time; vLLM's default limit of ``n`` is the same."""


class InvalidRequest(ValueError):
    """A request that can never be run; it is refused alone and disturbs no other."""


def sequence_count(given: Any) -> int:
    """``num_return_sequences`` as a number (None = 1); ValueError if it is none or more than :data:`MAX_SEQUENCES`."""
    if given is None:
        return 1
    count = as_integer(given)
    if count is None or count < 1:
        raise ValueError(f"num_return_sequences must be an integer >= 1, got {given!r}")
    if count > MAX_SEQUENCES:
        raise ValueError(
            f"num_return_sequences={count} is more than {MAX_SEQUENCES} sequences of a prompt; ask for fewer, or "
            "add the request several times with other seeds"
        )
    return count


def prefix_order(inputs: Sequence[Any]) -> list[int]:
    """Indices of ``inputs`` in an order that puts prompts with a common beginning beside each other. What is not a
    prompt at all may stand anywhere: it is refused at admission."""

    def key(index: int) -> list[int]:
        ids = inputs[index]
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        return [i if isinstance(i, int) else -1 for i in ids] if isinstance(ids, Sequence) else []

    return sorted(range(len(inputs)), key=key, reverse=True)


class Admission:
    """Checks requests against a model and a resolved configuration.

    Args:
        shape, config: what the request must fit.
        generation: GenerationConfig whose values a request may leave unsaid.
        seed: base of the random streams of requests without a seed of their own.
    """

    def __init__(self, shape: ModelShape, config: ResolvedConfig, generation: Any, seed: int) -> None:
        self._shape, self._config, self._generation = shape, config, generation
        self._seed = folded(seed)
        self._sampling = default_sampling(generation)
        self._check(self._sampling)
        self._eos = self._reachable(eos_ids(generation.eos_token_id))

    def admit(
        self,
        request_id: str,
        number: int,
        input_ids: Any,
        max_new_tokens: int | None,
        streaming: bool,
        record_timestamps: bool,
        eos_token_id: int | Iterable[int] | None,
        sampling: dict[str, Any],
        num_return_sequences: int | None = None,
    ) -> Request:
        """Build a request with its children, or raise `InvalidRequest` (a ValueError) naming the cause.

        Args:
            number: how many requests came before it; its random stream derives from it and the base seed.
            sampling: per-request overrides, by field of `SamplingParams`.
            num_return_sequences: it and its children; None = the GenerationConfig's.
        """
        try:
            if not isinstance(request_id, str):
                raise ValueError("request_id must be a string")
            for name, flag in (("streaming", streaming), ("record_timestamps", record_timestamps)):
                if not isinstance(flag, bool):
                    raise ValueError(f"{name} must be True or False, got {flag!r}")
            prompt = self._prompt(input_ids)
            limit = self._new_tokens(len(prompt), max_new_tokens)
            eos = self._eos if eos_token_id is None else self._reachable(eos_ids(eos_token_id))
            params = self._params(number, sampling, len(prompt))
            self._leaves_something(params, eos, prompt, limit)
            if params.min_new_tokens > limit:
                raise ValueError(f"min_new_tokens={params.min_new_tokens} is more than max_new_tokens={limit}")
            asked = self._generation.num_return_sequences if num_return_sequences is None else num_return_sequences
            sequences = sequence_count(asked)
        except ValueError as error:
            raise InvalidRequest(f"request {request_id!r}: {error}") from None
        request = Request.create(request_id, prompt, limit, eos, params, streaming, record_timestamps)
        request.bear(sequences - 1)
        return request

    def _reachable(self, ids: frozenset[int]) -> frozenset[int]:
        """Without ids outside the vocabulary: a model with fewer tokens than its tokenizer never generates those."""
        return frozenset(i for i in ids if i < self._shape.vocab_size)

    def _prompt(self, input_ids: Any) -> list[int]:
        ids = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray):
            raise ValueError(f"input_ids must be a list of token ids, got {type(input_ids).__name__}")
        if len(ids) == 0:
            raise ValueError("the prompt is empty; give at least one token id")
        vocab = self._shape.vocab_size
        # The usual prompt passes in three scans at C speed: a burst of long prompts must not hold up the loop's thread.
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab:
            return list(ids)
        return [_token_id(token, index, vocab) for index, token in enumerate(ids)]

    def _new_tokens(self, prompt: int, requested: int | None) -> int:
        layout: CacheLayout = self._config.layout
        chunk = self._config.max_batch_tokens
        longest = self._shape.max_positions
        limit = self._generation.max_new_tokens if requested is None else requested
        total = getattr(self._generation, "max_length", None)
        if limit is None and total is not None:  # transformers counts the prompt here
            if total <= prompt:
                raise ValueError(f"{prompt} prompt tokens leave nothing of max_length={total}; set max_new_tokens")
            limit = total - prompt
        if limit is None:  # until EOS, or as far as model and cache reach
            limit = (longest or self._config.num_blocks * layout.page_size) - prompt
            while limit > 1 and layout.blocks_needed(prompt + limit - 1, chunk) > self._config.num_blocks:
                limit -= layout.page_size
            limit = max(limit, 1)
        given, limit = limit, as_integer(limit)
        if limit is None or limit < 1:
            raise ValueError(f"max_new_tokens must be an integer >= 1, got {given!r}")
        if longest is not None and prompt + limit > longest + 1:
            raise ValueError(
                f"{prompt} prompt tokens and max_new_tokens={limit} exceed the model's {longest} positions; "
                "shorten the prompt or lower max_new_tokens"
            )
        need = layout.blocks_needed(prompt + limit - 1, chunk)
        if need > self._config.num_blocks:
            raise ValueError(
                f"{prompt} prompt tokens and max_new_tokens={limit} need {need} KV blocks of {layout.page_size} "
                f"tokens, the cache has {self._config.num_blocks}; raise num_blocks or lower max_new_tokens"
            )
        return limit

    def _params(self, number: int, overrides: dict[str, Any], prompt: int) -> SamplingParams:
        given = {name: value for name, value in overrides.items() if value is not None}
        generation, defaults = self._generation, self._sampling
        if given:
            params = defaults.override(**given)
            self._check(params)
            changed = [
                name for name in PROCESSORS if name in given and getattr(params, name) != getattr(defaults, name)
            ]
            if changed and not self._config.per_request_processors:
                raise ValueError(
                    f"{changed[0]} can be set per request only with "
                    "ContinuousBatchingConfig(per_request_processors=True)"
                )
            if not generation.do_sample:
                for name in changed:
                    if name in RANDOM:
                        raise ValueError(
                            f"{name} needs GenerationConfig(do_sample=True); it has no effect on greedy choice"
                        )
        implied: dict[str, Any] = {}
        if "seed" not in given:
            implied["seed"] = (self._seed << 32) + number  # 64 bits
        # transformers' min_length counts the prompt and gives way to min_new_tokens.
        if "min_new_tokens" not in given and generation.min_new_tokens is None and generation.min_length:
            implied["min_new_tokens"] = max(0, generation.min_length - prompt)
        return defaults.override(**given, **implied)

    def _leaves_something(self, params: SamplingParams, eos: frozenset[int], prompt: list[int], limit: int) -> None:
        """Refuse rules that forbid every token, by themselves or after tokens that may come."""
        vocab = self._shape.vocab_size
        lists = (params.logit_bias, params.sequence_bias, params.bad_words_ids, params.suppress_tokens)
        named = sum(map(len, lists)) + len(params.begin_suppress_tokens) + len(eos)
        if named >= vocab:
            rules = BiasRules.of(params, eos)
            what = f"bias, suppressed tokens, bad words and min_new_tokens forbid all {vocab} tokens"
            if rules.leaves_nothing(vocab):
                raise ValueError(f"{what}; leave one to choose")
            if (after := rules.leaves_nothing_after(vocab)) is not None:
                raise ValueError(f"{what} after {list(after)}; leave one to choose")
        if params.no_repeat_ngram_size == 1 and len(prompt) + limit + named > vocab:
            most = BiasRules.of(params, eos).distinct_tokens(vocab, prompt, eos)
            if most is not None and limit > most:
                raise ValueError(
                    f"no_repeat_ngram_size=1 lets {most} tokens follow this prompt in a vocabulary of {vocab}, "
                    f"max_new_tokens={limit} asks for more; lower it"
                )

    def _check(self, params: SamplingParams) -> None:
        params.check_vocabulary(self._shape.vocab_size)
        if self._config.return_logprobs:
            return
        for name, neutral in (("top_logprobs", 0), ("logprobs_mode", "processed")):
            value = getattr(params, name)
            if value != neutral:
                raise ValueError(f"{name}={value!r} needs ContinuousBatchingConfig(return_logprobs=True)")


def _token_id(token: Any, index: int, vocab: int) -> int:
    """One id of a prompt as an int (numpy's integers are ids as well); ValueError says which one is none."""
    try:
        value = operator.index(token)
    except TypeError:
        value = None
    if value is None or isinstance(token, bool):
        raise ValueError(f"input_ids[{index}] is {token!r}, not a token id")
    if not 0 <= value < vocab:
        raise ValueError(f"input_ids[{index}] is {value}, outside the vocabulary 0 … {vocab - 1}")
    return value
