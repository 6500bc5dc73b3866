"""Values of a request's sampling settings."""

from __future__ import annotations

from typing import Any

import pytest

from engine.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, ">= 0"),
        ("temperature", float("nan"), "finite"),
        ("temperature", float("inf"), "finite"),
        ("temperature", "hot", "finite number"),
        ("temperature", True, "finite number"),
        ("top_p", 0, r"\(0, 1\]"),
        ("top_p", 1.01, r"\(0, 1\]"),
        ("top_p", None, "finite number"),
        ("min_p", -0.1, r"\[0, 1\]"),
        ("min_p", 1.1, r"\[0, 1\]"),
        ("repetition_penalty", 0, "> 0"),
        ("repetition_penalty", -1.0, "> 0"),
        ("presence_penalty", float("inf"), "finite number"),
        ("frequency_penalty", "1", "finite number"),
        ("top_k", -2, ">= -1"),
        ("top_k", 1.5, "integer"),
        ("top_k", True, "integer"),
        ("seed", "42", "integer"),
        ("no_repeat_ngram_size", -1, ">= 0"),
        ("min_new_tokens", 1.0, "integer"),
        ("top_logprobs", -1, ">= 0"),
        ("logprobs_mode", "cooked", "one of processed, raw"),
        ("bad_words_ids", [[1], []], "non-empty lists"),
        ("bad_words_ids", [1, 2], "list of non-empty lists"),
        ("bad_words_ids", "12", "list of lists"),
        ("stop_sequences", [[1.5]], "list of token ids|token ids"),
        ("stop_sequences", ["end"], "list of non-empty lists"),
        ("suppress_tokens", [-1], "integers >= 0"),
        ("suppress_tokens", 5, "list of token ids"),
        ("begin_suppress_tokens", [True], "integers >= 0"),
        ("logit_bias", {"a": 1.0}, "integers >= 0"),
        ("logit_bias", {3: "x"}, "a number"),
        ("logit_bias", {3: float("inf")}, "a number"),
        ("logit_bias", {3: float("nan")}, "a number"),
        ("logit_bias", 3, "map tokens to numbers"),
        ("logit_bias", [(1, 2, 3)], "pairs"),
        ("sequence_bias", {(): 1.0}, "non-empty lists"),
        ("sequence_bias", [[3, 1.0]], "non-empty lists"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}.* must .*({allowed}).*got"):
        SamplingParams(**{field: value})


def test_integers_are_numbers() -> None:
    """B14: 1 is 1.0."""
    assert SamplingParams(temperature=1, top_p=1) == SamplingParams(temperature=1.0, top_p=1.0)


def test_a_temperature_that_would_overflow_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-40).greedy
    assert not SamplingParams(temperature=1e-3).greedy


def test_top_k_is_off_at_zero_and_minus_one() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()


def test_lists_and_mappings_in_any_usual_form() -> None:
    one = SamplingParams(
        bad_words_ids=[[1], (2, 3)],  # type: ignore[arg-type]
        stop_sequences=([4, 5],),  # type: ignore[arg-type]
        suppress_tokens=range(2),  # type: ignore[arg-type]
        logit_bias={"7": 1, 3: -2.5},  # type: ignore[arg-type]
        sequence_bias=[[[8, 9], 0.5]],  # type: ignore[arg-type]
    )
    assert one.bad_words_ids == ((1,), (2, 3))
    assert one.stop_sequences == ((4, 5),)
    assert one.suppress_tokens == (0, 1)
    assert one.logit_bias == ((3, -2.5), (7, 1.0))
    assert one.sequence_bias == (((8, 9), 0.5),)
    assert one == SamplingParams(
        bad_words_ids=((1,), (2, 3)), stop_sequences=((4, 5),), suppress_tokens=(0, 1),
        logit_bias=((7, 1.0), (3, -2.5)), sequence_bias={(8, 9): 0.5},  # type: ignore[arg-type]
    )  # fmt: skip
    assert hash(one)


@pytest.mark.parametrize(
    ("values", "plain", "processed"),
    [
        ({}, True, False),
        ({"seed": 3, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, True, False),  # greedy: filters change nothing
        ({"stop_sequences": [[1]], "logprobs_mode": "raw"}, True, False),
        ({"temperature": 1.0}, False, True),
        ({"top_logprobs": 2}, False, False),
        ({"repetition_penalty": 1.1}, False, True),
        ({"presence_penalty": -0.1}, False, True),
        ({"no_repeat_ngram_size": 2}, False, True),
        ({"min_new_tokens": 2}, False, True),
        ({"logit_bias": {1: 2.0}}, False, True),
        ({"bad_words_ids": []}, True, False),
    ],
)
def test_what_needs_more_than_an_argmax_is_known(values: dict[str, Any], plain: bool, processed: bool) -> None:
    params = SamplingParams(**values)
    assert (params.plain, params.processed) == (plain, processed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", [[1], [2, 10]]),
        ("stop_sequences", [[10]]),
        ("logit_bias", {10: 1}),
        ("sequence_bias", {(10, 1): 1.0}),
        ("suppress_tokens", [3, 10]),
        ("begin_suppress_tokens", [10]),
    ],
)
def test_ids_outside_the_vocabulary_are_named(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    params.check_vocabulary(11)
    with pytest.raises(ValueError, match=f"{name} names token 10, outside the vocabulary 0 … 9"):
        params.check_vocabulary(10)


def test_override_keeps_the_rest_and_names_what_it_does_not_know() -> None:
    assert SamplingParams(temperature=0.5, top_k=3).override(top_p=0.9) == SamplingParams(0.5, 3, 0.9)
    with pytest.raises(ValueError, match=r"unknown sampling parameter 'warmth'.*temperature, top_k, top_p, seed"):
        SamplingParams().override(warmth=0.1)
    with pytest.raises(ValueError, match="unknown sampling parameter 'plain'"):
        SamplingParams().override(plain=True)
