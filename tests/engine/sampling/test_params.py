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
        ("top_k", -2, ">= -1"),
        ("top_k", 1.5, "integer"),
        ("top_k", True, "integer"),
        ("seed", "42", "integer"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be .*{allowed}.*got") as caught:
        SamplingParams(**{field: value})
    assert repr(value) in str(caught.value)


def test_integers_are_numbers() -> None:
    """B14: 1 is 1.0."""
    assert SamplingParams(temperature=1, top_p=1) == SamplingParams(temperature=1.0, top_p=1.0)


def test_a_temperature_that_would_overflow_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-40).greedy
    assert not SamplingParams(temperature=1e-3).greedy


def test_override_keeps_the_rest_and_names_what_it_does_not_know() -> None:
    assert SamplingParams(temperature=0.5, top_k=3).override(top_p=0.9) == SamplingParams(0.5, 3, 0.9)
    with pytest.raises(ValueError, match=r"unknown sampling parameter 'warmth'.*temperature"):
        SamplingParams().override(warmth=0.1)
