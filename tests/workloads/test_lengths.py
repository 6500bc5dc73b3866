from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.config import LengthConfig, make_lengths
from workloads.lengths import Empirical, Fixed, LogNormal, LogUniform, Uniform


def test_fixed_has_no_variance() -> None:
    assert Fixed(7).sample(4, random.Random(0)) == [7] * 4


def test_uniform_reaches_both_ends() -> None:
    assert set(Uniform(3, 6).sample(500, random.Random(0))) == {3, 4, 5, 6}


@given(low=st.integers(1, 500), span=st.integers(0, 500), seed=st.integers(0, 50))
def test_bounded_distributions_stay_inside(low: int, span: int, seed: int) -> None:
    rng = random.Random(seed)
    for lengths in (Uniform(low, low + span), LogUniform(low, low + span), LogNormal(low, 2.0, low, low + span)):
        assert all(low <= n <= low + span for n in lengths.sample(20, rng))


def test_loguniform_median_is_the_geometric_mean() -> None:
    sample = LogUniform(16, 1600).sample(20_001, random.Random(1))
    assert statistics.median(sample) == pytest.approx(math.sqrt(16 * 1600), rel=0.05)


def test_lognormal_median_and_clipping() -> None:
    sample = LogNormal(100, 0.8, 10, 400).sample(20_001, random.Random(1))
    assert statistics.median(sample) == pytest.approx(100, rel=0.05)
    assert max(sample) == 400
    assert min(sample) >= 10


def test_empirical_keeps_to_values_and_weights() -> None:
    sample = Empirical([5, 50], [3, 1]).sample(20_000, random.Random(1))
    assert sample.count(5) / len(sample) == pytest.approx(0.75, abs=0.02)
    assert set(sample) == {5, 50}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LengthConfig("fixed"), "needs value"),
        (LengthConfig("fixed", value=0), "at least 1"),
        (LengthConfig("uniform", low=5, high=4), "low 5, high 4"),
        (LengthConfig("uniform", low=1, high=4, value=3), "no setting value: add .*value=null"),
        (LengthConfig("lognormal", median=-1, sigma=1, low=1, high=2), "median > 0"),
        (LengthConfig("empirical", values=[]), "at least one value"),
        (LengthConfig("empirical", values=[1, 2], weights=[1]), "as many as values"),
        (LengthConfig("unifrom", low=1, high=2), "Did you mean 'uniform'"),
    ],
)
def test_bad_settings_say_what_to_do(config: LengthConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_lengths(config, "workload.prompt_tokens")
