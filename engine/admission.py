"""What a request must be to be let in, and what of a GenerationConfig the engine honours."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from engine.cache import CacheLayout
from engine.model_shape import ModelShape
from engine.requests import Request
from engine.resolution import ResolvedConfig
from engine.sampling import SamplingParams

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "min_p": (None, 0.0),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "stop_strings": (None,),
    "max_time": (None,),
    "prompt_lookup_num_tokens": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
}
"""Settings that the engine does not do yet, with the values at which they do nothing. Anything else is refused: a
setting is never dropped in silence."""


class InvalidRequest(ValueError):
    """A request that can never be run; it is refused alone and disturbs no other."""


def generation_defaults(config: Any, overrides: dict[str, Any]) -> Any:
    """A private copy of a GenerationConfig with ``overrides`` applied.

    Raises:
        TypeError: an override that GenerationConfig does not know.
        ValueError: a setting the engine does not do, or an override without effect.
    """
    config = copy.deepcopy(config)
    unknown = config.update(**overrides)
    if unknown:
        raise TypeError(f"unknown generation setting {next(iter(unknown))!r}")
    for name in ("temperature", "top_k", "top_p"):
        if overrides.get(name) is not None and not config.do_sample:
            raise ValueError(f"{name}={overrides[name]!r} has no effect on greedy choice; it needs do_sample=True")
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise ValueError(f"{name}={value!r} is not supported by the engine; leave it at {neutral[-1]!r}")
    return config


def prefix_order(inputs: Sequence[Any]) -> list[int]:
    """Indices of ``inputs`` in an order that puts prompts with a common beginning beside each other. What is not a
    prompt at all may stand anywhere: it is refused at admission."""

    def key(index: int) -> list[int]:
        ids = inputs[index]
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        return [i if isinstance(i, int) else -1 for i in ids] if isinstance(ids, Sequence) else []

    return sorted(range(len(inputs)), key=key, reverse=True)


def default_sampling(config: Any) -> SamplingParams:
    """Sampling settings that a GenerationConfig asks for; greedy unless ``do_sample``."""
    if not config.do_sample:
        return SamplingParams()
    temperature = 1.0 if config.temperature is None else config.temperature
    top_p = 1.0 if config.top_p is None else config.top_p
    return SamplingParams(temperature=temperature, top_k=config.top_k or 0, top_p=top_p)


def eos_ids(eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
    """The ids that end a request; negative ones mean "none"."""
    if eos_token_id is None:
        return frozenset()
    ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    return frozenset(int(i) for i in ids if int(i) >= 0)


class Admission:
    """Checks requests against a model and a resolved configuration.

    Args:
        shape, config: what the request must fit.
        generation: GenerationConfig whose values a request may leave unsaid.
        seed: base of the random streams of requests without a seed of their own.
    """

    def __init__(self, shape: ModelShape, config: ResolvedConfig, generation: Any, seed: int) -> None:
        self._shape, self._config, self._generation, self._seed = shape, config, generation, seed
        self._sampling = default_sampling(generation)
        self._eos = eos_ids(generation.eos_token_id)

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
    ) -> Request:
        """Build a request, or raise `InvalidRequest` (a ValueError) naming the cause.

        Args:
            number: how many requests came before it; its random stream derives from it and the base seed.
            sampling: per-request overrides (temperature, top_k, top_p, seed).
        """
        try:
            prompt = self._prompt(input_ids)
            limit = self._new_tokens(len(prompt), max_new_tokens)
            eos = self._eos if eos_token_id is None else eos_ids(eos_token_id)
            params = self._params(number, sampling)
        except ValueError as error:
            raise InvalidRequest(f"request {request_id!r}: {error}") from None
        return Request.create(request_id, prompt, limit, eos, params, streaming, record_timestamps)

    def _prompt(self, input_ids: Any) -> list[int]:
        ids = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise ValueError(f"input_ids must be a list of token ids, got {type(input_ids).__name__}")
        if len(ids) == 0:
            raise ValueError("the prompt is empty; give at least one token id")
        vocab = self._shape.vocab_size
        for index, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValueError(f"input_ids[{index}] is {token!r}, not a token id")
            if not 0 <= token < vocab:
                raise ValueError(f"input_ids[{index}] is {token}, outside the vocabulary 0 … {vocab - 1}")
        return list(ids)

    def _new_tokens(self, prompt: int, requested: int | None) -> int:
        layout: CacheLayout = self._config.layout
        chunk = self._config.max_batch_tokens
        longest = self._shape.max_positions
        limit = self._generation.max_new_tokens if requested is None else requested
        if limit is None:  # until EOS, or as far as model and cache reach
            limit = (longest or self._config.num_blocks * layout.page_size) - prompt
            while limit > 1 and layout.blocks_needed(prompt + limit - 1, chunk) > self._config.num_blocks:
                limit -= layout.page_size
            limit = max(limit, 1)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"max_new_tokens must be an integer >= 1, got {limit!r}")
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

    def _params(self, number: int, overrides: dict[str, Any]) -> SamplingParams:
        given = {name: value for name, value in overrides.items() if value is not None}
        controls = sorted(set(given) - {"seed"})
        if controls and not self._config.per_request_processors:
            raise ValueError(
                f"{controls[0]} can be set per request only with ContinuousBatchingConfig(per_request_processors=True)"
            )
        if controls and not self._generation.do_sample:
            raise ValueError(f"{controls[0]} needs GenerationConfig(do_sample=True); it has no effect on greedy choice")
        if "seed" not in given:
            given["seed"] = (self._seed << 32) + number
        return self._sampling.override(**given)
