"""What of a GenerationConfig the engine honours, and as which sampling settings."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from typing import Any

from transformers import GenerationConfig

from engine.names import unknown_name
from engine.sampling.params import SamplingParams

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "remove_invalid_values": (None, False),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "stop_strings": (None,),
    "token_healing": (None, False),
    "max_time": (None,),
    "prompt_lookup_num_tokens": (None,),
    "use_mtp": (None, False),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
}
"""Settings that the engine does not do, with the values at which they do nothing. Anything else is refused: a setting
is never dropped in silence."""

_WITHOUT_EFFECT = (
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "low_memory",
    "prefill_chunk_size",
    "disable_compile",
    "return_dict_in_generate",
    "length_penalty",
    "early_stopping",
)
"""How ``generate`` goes about it, or beams: nothing here follows them. Models carry some in their own GenerationConfig,
where they mean ``generate``; who asks for one is told."""

RANDOM = ("temperature", "top_k", "top_p", "min_p")
"""What shapes the distribution that is sampled from: without effect on greedy choice."""

_PROCESSORS = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
)
_BEYOND_TRANSFORMERS = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop_sequences",
    "top_logprobs",
    "logprobs_mode",
)
"""Settings of this engine that GenerationConfig has no field for; they are honoured where one carries them."""

PROCESSORS = (*RANDOM, *_PROCESSORS, "presence_penalty", "frequency_penalty", "logit_bias")
"""What changes logits: may differ between requests only with ``per_request_processors``."""


def generation_defaults(config: Any, overrides: dict[str, Any]) -> Any:
    """A private copy of a GenerationConfig with ``overrides`` applied.

    Raises:
        TypeError: no GenerationConfig, or an override that neither it nor the engine knows.
        ValueError: a setting the engine does not do, or an override without effect.
    """
    if not isinstance(config, GenerationConfig):
        raise TypeError(f"generation_config must be a transformers GenerationConfig, got {type(config).__name__}")
    config = copy.deepcopy(config)
    unknown = config.update(**overrides)
    for name in _BEYOND_TRANSFORMERS:
        if name in unknown:
            setattr(config, name, unknown.pop(name))
    if unknown:
        known = {*vars(config), *_BEYOND_TRANSFORMERS} - {*_NEUTRAL, *_WITHOUT_EFFECT}
        raise unknown_name("generation setting", next(iter(unknown)), (n for n in known if not n.startswith("_")))
    for name in RANDOM:
        if overrides.get(name) is not None and not config.do_sample:
            raise ValueError(f"{name}={overrides[name]!r} has no effect on greedy choice; it needs do_sample=True")
    for name in _WITHOUT_EFFECT:
        if overrides.get(name) is not None:
            raise ValueError(f"{name}={overrides[name]!r} has no effect on continuous batching; leave it out")
    if overrides.get("use_cache") is False:
        raise ValueError("use_cache=False is not supported by the engine; leave it out")
    for total, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if overrides.get(total) is not None and getattr(config, new) is not None:
            raise ValueError(
                f"{total}={overrides[total]!r} has no effect beside {new}={getattr(config, new)}; set {new} only, or "
                f"{new}=None"
            )
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise ValueError(f"{name}={value!r} is not supported by the engine; leave it at {neutral[-1]!r}")
    return config


def default_sampling(config: Any) -> SamplingParams:
    """Sampling settings that a GenerationConfig asks for; greedy unless ``do_sample``."""
    values = {name: getattr(config, name, None) for name in (*_PROCESSORS, *_BEYOND_TRANSFORMERS)}
    if config.do_sample:
        values.update({name: getattr(config, name, None) for name in RANDOM})
        if values["temperature"] is None:
            values["temperature"] = 1.0
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def eos_ids(eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
    """The ids that end a request; negative ones mean "none".

    Raises:
        ValueError: something that is no id.
    """
    if eos_token_id is None:
        return frozenset()
    given = eos_token_id.tolist() if hasattr(eos_token_id, "tolist") else eos_token_id
    ids = given if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [given]
    found = set()
    for token in ids:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ValueError(f"eos_token_id must be a token id or a list of them, got {eos_token_id!r}")
        if operator.index(token) >= 0:
            found.add(operator.index(token))
    return frozenset(found)
