"""A GenerationConfig as the engine takes it: what is obeyed, what is refused, and the defaults of a request."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from engine.sampling import SamplingParams
from engine.sampling.generation import default_sampling, eos_ids, generation_defaults


def test_eos_ids() -> None:
    assert eos_ids(None) == eos_ids(-1) == eos_ids([]) == frozenset()
    assert eos_ids(0) == {0}
    assert eos_ids([1, -1, 2]) == {1, 2}


UNSUPPORTED = [
    ("num_beams", 2),
    ("typical_p", 0.5),
    ("stop_strings", ["x"]),
    ("forced_eos_token_id", 1),
    ("remove_invalid_values", True),
    ("output_scores", True),
    ("guidance_scale", 1.5),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_a_generation_setting_that_is_not_done_is_refused(name: str, value: Any) -> None:
    """B09: never dropped in silence."""
    with pytest.raises(ValueError, match=f"{name}=.* is not supported by the engine"):
        generation_defaults(GenerationConfig(**{name: value}), {})
    with pytest.raises(ValueError, match=f"{name}=.* is not supported by the engine"):
        generation_defaults(GenerationConfig(), {name: value})


def test_overrides_are_applied_to_a_copy() -> None:
    config = GenerationConfig(max_new_tokens=3, eos_token_id=2)
    copy = generation_defaults(config, {"max_new_tokens": 5})
    assert (copy.max_new_tokens, copy.eos_token_id) == (5, 2)
    assert config.max_new_tokens == 3


def test_an_override_has_effect_or_is_refused() -> None:
    """A-gb-05."""
    with pytest.raises(TypeError, match="unknown generation setting 'foo'"):
        generation_defaults(GenerationConfig(), {"foo": 1})
    with pytest.raises(TypeError, match=r"setting 'max_new_token'. Did you mean 'max_new_tokens'\?"):
        generation_defaults(GenerationConfig(), {"max_new_token": 1})
    with pytest.raises(TypeError, match=r"setting 'stop_sequence'. Did you mean 'stop_sequences'\?"):
        generation_defaults(GenerationConfig(), {"stop_sequence": ((1,),)})
    with pytest.raises(ValueError, match=r"temperature=0.3 has no effect on greedy choice; it needs do_sample=True"):
        generation_defaults(GenerationConfig(), {"temperature": 0.3})
    assert generation_defaults(GenerationConfig(), {"temperature": 0.3, "do_sample": True}).temperature == 0.3


@pytest.mark.parametrize(
    ("own", "overrides", "complaint"),
    [
        ({"max_new_tokens": 8}, {"max_length": 5}, "max_length=5 has no effect beside max_new_tokens=8"),
        ({"min_new_tokens": 1}, {"min_length": 5}, "min_length=5 has no effect beside min_new_tokens=1"),
        ({}, {"use_cache": False}, "use_cache=False is not supported"),
        ({}, {"cache_implementation": "static"}, "cache_implementation='static' has no effect on continuous batching"),
        ({}, {"return_dict_in_generate": True}, "return_dict_in_generate=True has no effect"),
        ({}, {"length_penalty": 2.0}, "length_penalty=2.0 has no effect"),
    ],
)
def test_an_override_that_changes_nothing_is_refused(
    own: dict[str, Any], overrides: dict[str, Any], complaint: str
) -> None:
    """A-gb-05. In a model's own GenerationConfig the same is meant for ``generate`` and stays."""
    with pytest.raises(ValueError, match=complaint):
        generation_defaults(GenerationConfig(**own), overrides)
    both = {name: value for name, value in overrides.items() if name != "length_penalty"}
    generation_defaults(GenerationConfig(**own, **both), {})
    generation_defaults(GenerationConfig(), dict.fromkeys(overrides) | {"use_cache": True})


@pytest.mark.parametrize("given", [{"max_new_tokens": 4}, "greedy", None])
def test_something_else_is_no_generation_config(given: Any) -> None:
    with pytest.raises(TypeError, match=f"must be a transformers GenerationConfig, got {type(given).__name__}"):
        generation_defaults(given, {})


def test_settings_beyond_transformers_travel_with_the_config() -> None:
    config = generation_defaults(GenerationConfig(), {"presence_penalty": 0.5, "stop_sequences": [[1]]})
    assert default_sampling(config) == SamplingParams(presence_penalty=0.5, stop_sequences=((1,),))
    assert config == generation_defaults(GenerationConfig(), {"presence_penalty": 0.5, "stop_sequences": [[1]]})
    assert config != generation_defaults(GenerationConfig(), {"presence_penalty": 0.4, "stop_sequences": [[1]]})


def test_every_setting_of_a_generation_config_arrives() -> None:
    given: dict[str, Any] = {
        "do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2, "min_new_tokens": 1, "bad_words_ids": [[1]], "suppress_tokens": [2],
        "begin_suppress_tokens": [3], "sequence_bias": [[[4], 1.0]],
    }  # fmt: skip
    params = default_sampling(generation_defaults(GenerationConfig(**given), {}))
    del given["do_sample"]
    assert params == SamplingParams(**given)
    del given["temperature"], given["top_k"], given["top_p"], given["min_p"]
    greedy = default_sampling(generation_defaults(GenerationConfig(**given), {}))
    assert greedy == SamplingParams(**given)
    assert greedy.greedy


def test_sampling_defaults_follow_do_sample() -> None:
    assert default_sampling(GenerationConfig(temperature=0.3)) == SamplingParams()
    assert default_sampling(GenerationConfig(do_sample=True)) == SamplingParams(temperature=1.0)
    assert default_sampling(GenerationConfig(do_sample=True, temperature=0.3, top_k=5, top_p=0.5)) == SamplingParams(
        0.3, 5, 0.5
    )
