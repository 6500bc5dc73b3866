"""Temperature, top-k and top-p against plain torch, and the distribution and independence of what is drawn."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine.sampling import RandomRows, SamplingParams, sample
from engine.sampling.random import gumbel_noise, stream_key
from engine.sampling.sampler import filter_top_k_top_p

CPU = torch.device("cpu")


def plain_filter(row: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """One row, token by token."""
    kept = row.clone()
    if top_k > 0:
        order = row.argsort(descending=True)
        kept[order[top_k:]] = float("-inf")
    probabilities = kept.softmax(-1)
    reached = 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if reached >= top_p:
            kept[token] = float("-inf")
        reached += probabilities[token].item()
    return kept


def draw(logits: torch.Tensor, params: SamplingParams, n: int, first: int = 0) -> list[int]:
    rows = RandomRows.build([params] * n, range(first, first + n), logits.shape[-1], CPU)
    return sample(logits.expand(n, -1), rows)[0].tolist()


@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_filters_equal_plain_torch(top_k: int, top_p: float) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)) * 3
    got = filter_top_k_top_p(
        logits, torch.full((20,), top_k if top_k else 50), torch.full((20,), top_p, dtype=torch.float32)
    )
    for row in range(20):
        torch.testing.assert_close(got[row], plain_filter(logits[row], top_k, top_p))
    assert (got > float("-inf")).any(-1).all(), "a token always stays"


def test_each_row_obeys_its_own_settings() -> None:
    """A-pp-01: different settings in one step."""
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(),
        SamplingParams(0.7, seed=1),
        SamplingParams(1.3, top_k=2, seed=2),
        SamplingParams(0.9, top_p=0.3, seed=3),
    ]
    rows = RandomRows.build(params, [5, 6, 7, 8], 30, CPU)
    assert rows is not None
    assert rows.rows.tolist() == [1, 2, 3]
    tokens, logprobs = sample(logits, rows, return_logprobs=True)
    assert logprobs is not None
    assert tokens[0] == logits[0].argmax()
    for row in (1, 2, 3):
        p = params[row]
        processed = plain_filter(logits[row] / p.temperature, p.top_k, p.top_p)
        noise = gumbel_noise(torch.tensor([stream_key(p.seed, 5 + row)]), 30)[0]
        assert tokens[row] == (processed + noise).argmax()
        torch.testing.assert_close(logprobs[row], processed.log_softmax(-1)[tokens[row]], atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(-1)[tokens[0]], atol=1e-5, rtol=0)


def test_all_greedy_needs_no_random_rows() -> None:
    assert RandomRows.build([SamplingParams()] * 3, [0, 0, 0], 10, CPU) is None
    assert sample(torch.tensor([[0.0, 2.0, 1.0]]), None) == (torch.tensor([1]), None)


@pytest.mark.parametrize("top_k", [0, -1, 1000])
def test_a_filter_that_is_off_reaches_every_token(top_k: int) -> None:
    """B14: top_k 0 and -1 mean off, and more than the vocabulary is all of it."""
    assert set(draw(torch.zeros(1, 6), SamplingParams(1.0, top_k=top_k, seed=3), 300)) == set(range(6))


def test_a_small_but_valid_temperature_is_the_argmax() -> None:
    logits = torch.tensor([[1e4, 1e4 + 1, -1e4]])
    assert set(draw(logits, SamplingParams(1e-5, seed=1), 50)) == {1}


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.5, "top_k": 4}])
def test_what_is_drawn_has_the_right_distribution(settings: dict[str, float]) -> None:
    """Chi-square of 20,000 draws over token indices of a single seed; 99.9 % quantiles of the distribution."""
    n, logits = 20_000, torch.tensor([[0.3, -1.0, 2.0, 0.0, 1.1, 0.7, -0.4, 1.6]])
    params = SamplingParams(**settings, seed=1234)  # type: ignore[arg-type]
    expected = plain_filter(logits[0] / params.temperature, params.top_k, 1.0).softmax(-1) * n
    counts = Counter(draw(logits, params, n))
    cells = [i for i in range(8) if expected[i] > 0]
    assert set(counts) == set(cells)
    statistic = sum((counts[i] - expected[i].item()) ** 2 / expected[i].item() for i in cells)
    assert statistic < {8: 24.32, 4: 16.27}[len(cells)]


@pytest.mark.parametrize("step", ["index", "seed"])
def test_neighbouring_draws_are_independent(step: str) -> None:
    """Chi-square of the 4 x 4 table of pairs (token i, token i + 1): consecutive indices, and consecutive seeds."""
    n, logits = 20_000, torch.zeros(1, 4)
    if step == "index":
        tokens = draw(logits, SamplingParams(1.0, seed=7), n)
    else:
        rows = RandomRows.build([SamplingParams(1.0, seed=s) for s in range(n)], [0] * n, 4, CPU)
        tokens = sample(logits.expand(n, -1), rows)[0].tolist()
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    expected = n / 2 / 16
    assert sum((pairs[a, b] - expected) ** 2 / expected for a in range(4) for b in range(4)) < 37.70


def test_noise_depends_on_seed_and_index_only() -> None:
    """The stream of a row is the same whatever rows stand beside it, and in whatever order."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(1.0, seed=s) for s in (11, 12, 13, 14, 15, 16)]
    together = sample(logits, RandomRows.build(params, [3] * 6, 40, CPU))[0]
    for row in range(6):
        alone = sample(logits[row : row + 1], RandomRows.build([params[row]], [3], 40, CPU))[0]
        assert alone[0] == together[row]
    backwards = sample(logits.flip(0), RandomRows.build(params[::-1], [3] * 6, 40, CPU))[0]
    assert backwards.flip(0).tolist() == together.tolist()


def test_keys_tell_seeds_and_indices_apart() -> None:
    keys = {stream_key(seed, index) for seed in (0, 1, 2**31, 2**32, (5 << 32) + 1, -3) for index in range(500)}
    assert len(keys) == 6 * 500
    assert all(0 <= key < 2**31 for key in keys)


def test_noise_is_finite_and_has_the_moments_of_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.tensor([stream_key(0, i) for i in range(200)]), 1000)
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772) < 0.02
    assert abs(noise.var().item() - 1.6449) < 0.05
