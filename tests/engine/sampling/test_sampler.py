"""Temperature and filters against plain torch, and the distribution and independence of what is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.kernels import filter_cuts_torch, gumbel_noise, kept_torch
from engine.sampling import Choice, SamplingParams, child_seed
from engine.sampling.random import stream_key

Choose = Callable[..., Choice]
Draw = Callable[..., list[int]]
Row = Callable[..., torch.Tensor]
NEG = float("-inf")


def filtered(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0, widest: int | None = None
) -> torch.Tensor:
    """Scaled logits with -inf where the filters cut, every row by the same settings."""
    n = len(logits)
    settings = [torch.full((n,), value) for value in (temperature, top_k or logits.shape[1], top_p, min_p)]
    cuts = filter_cuts_torch(logits, *settings, widest=widest)
    return (logits / temperature).masked_fill(~kept_torch(logits, cuts), NEG)


@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_filters_equal_plain_torch(top_k: int, top_p: float, min_p: float, filtered_row: Row) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)) * 3
    for widest in (None, top_k or 50):
        got = filtered(logits, 0.7, top_k, top_p, min_p, widest)
        for row in range(20):
            torch.testing.assert_close(got[row], filtered_row(logits[row] / 0.7, top_k, top_p, min_p))
        assert (got > NEG).any(-1).all(), "a token always stays"


@pytest.mark.parametrize("widest", [None, 7])
def test_filters_equal_those_of_transformers(widest: int | None) -> None:
    """Rows of different settings, with ties at the k-th place, as logits in bfloat16 have them."""
    logits = (torch.randn(400, 60, generator=torch.Generator().manual_seed(5)) * 3).bfloat16().float()
    assert any((row == row.topk(4).values[-1]).sum() > 1 for row in logits), "there are ties"
    for row in range(400):
        k, p, m = (1, 4, 7)[row % 3], (1.0, 0.95, 0.6)[row // 3 % 3], (0.0, 0.1, 0.4)[row // 9 % 3]
        expected = TopKLogitsWarper(k)(None, logits[row : row + 1])
        if p < 1:
            expected = TopPLogitsWarper(p)(None, expected)
        if m > 0:
            expected = MinPLogitsWarper(m)(None, expected)
        # Which of several equal tokens its top-p drops is chance: compare what stays by its values.
        assert sorted(filtered(logits[row : row + 1], 1.0, k, p, m, widest)[0].tolist()) == sorted(expected[0].tolist())


@pytest.mark.parametrize("widest", [None, 2])
def test_of_equal_tokens_the_lowest_ids_stay(widest: int | None) -> None:
    """By hand: weights 1, 0.37, 0.37, 0.37 of 2.10 in all, or with the last 0.14 of 2.24."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    for p, kept in ((1.0, [0, 1, 2, 4]), (0.4, [1]), (0.6, [0, 1]), (0.8, [0, 1, 2]), (0.9, [0, 1, 2, 4])):
        got = filtered(logits, 1.0, 2, p, widest=widest)
        assert [i for i in range(5) if got[0, i] > NEG] == kept, p


def test_each_row_obeys_its_own_settings(choose: Choose, filtered_row: Row) -> None:
    """A-pp-01, A-lp-02: different settings in one step."""
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(),
        SamplingParams(0.7, seed=1),
        SamplingParams(1.3, top_k=2, seed=2),
        SamplingParams(0.9, top_p=0.3, seed=3),
        SamplingParams(0.9, top_k=9, top_p=0.5, seed=4),
        SamplingParams(2.0, min_p=0.4, seed=5),
    ]
    tokens, logprobs, tops = choose(logits, params, [5, 6, 7, 8, 9, 10], return_logprobs=True).to_lists()
    assert tokens[0] == logits[0].argmax()
    assert tops == [None] * 6
    assert logprobs[0] == pytest.approx(logits[0].log_softmax(-1)[tokens[0]].item(), abs=1e-5)
    for row in range(1, 6):
        p = params[row]
        processed = filtered_row(logits[row] / p.temperature, p.top_k, p.top_p, p.min_p)
        noise = gumbel_noise(torch.tensor([stream_key(p.seed, 5 + row)]), 30)[0]
        assert tokens[row] == (processed + noise).argmax()
        assert logprobs[row] == pytest.approx(processed.log_softmax(-1)[tokens[row]].item(), abs=1e-5)


def test_all_greedy_is_one_argmax(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is gathered, uploaded or converted for rows that ask for nothing."""
    from engine.sampling import settings

    def no_upload(*_: Any) -> None:
        raise AssertionError("something was uploaded")

    monkeypatch.setattr(settings.Pack, "upload", no_upload)
    choice = choose(torch.tensor([[0.0, 2.0, 1.0]]), [SamplingParams(seed=i) for i in range(3)])
    assert choice.to_lists() == ([1] * 3, [None] * 3, [None] * 3)
    with pytest.raises(AssertionError, match="uploaded"):
        choose(torch.zeros(1, 3), [SamplingParams(1.0)])


def test_plain_rows_are_not_touched_by_their_mates(choose: Choose) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(8)).bfloat16()
    params = [SamplingParams(), SamplingParams(suppress_tokens=tuple(range(10))), SamplingParams()]
    tokens, logprobs, _ = choose(logits, params, return_logprobs=True).to_lists()
    alone = [choose(logits[i : i + 1], params[i : i + 1], return_logprobs=True).to_lists() for i in range(3)]
    assert tokens == [a[0][0] for a in alone]
    assert logprobs == [a[1][0] for a in alone]
    assert (tokens[0], tokens[2]) == (logits[0].argmax(), logits[2].argmax())


def test_top_logprobs_are_the_rows_own_number(choose: Choose) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    params = [SamplingParams(top_logprobs=k) for k in (0, 1, 3, 100)]
    tops = choose(logits, params, return_logprobs=True).to_lists()[2]
    expected = [(i, pytest.approx(logits[0].log_softmax(-1)[i].item())) for i in (1, 2, 3, 0)]
    assert tops == [None, expected[:1], expected[:3], expected]


def test_what_a_filter_excludes_is_no_top_token(choose: Choose) -> None:
    params = [
        SamplingParams(1.0, top_k=2, top_logprobs=3),
        SamplingParams(1.0, top_k=2, top_logprobs=3, logprobs_mode="raw"),
    ]
    _, _, (processed, raw) = choose(torch.tensor([[0.0, 3.0, 2.0, 1.0]]), params, return_logprobs=True).to_lists()
    assert [i for i, _ in processed] == [1, 2]
    assert [i for i, _ in raw] == [1, 2, 3]


@pytest.mark.parametrize("top_k", [0, -1, 1000])
def test_a_filter_that_is_off_reaches_every_token(top_k: int, draw: Draw) -> None:
    """B14: top_k 0 and -1 mean off, and more than the vocabulary is all of it."""
    assert set(draw(torch.zeros(1, 6), SamplingParams(1.0, top_k=top_k, seed=3), 300)) == set(range(6))


def test_a_small_but_valid_temperature_is_the_argmax(draw: Draw) -> None:
    logits = torch.tensor([[1e4, 1e4 + 1, -1e4]])
    assert set(draw(logits, SamplingParams(1e-5, seed=1), 50)) == {1}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.2, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_what_is_drawn_has_the_right_distribution(settings: dict[str, Any], draw: Draw, filtered_row: Row) -> None:
    """Chi-square of 20,000 draws over token indices of a single seed; 99.9 % quantiles of the distribution."""
    n, logits = 20_000, torch.tensor([[0.3, -1.0, 2.0, 0.0, 1.1, 0.7, -0.4, 1.6]])
    params = SamplingParams(**settings, seed=1234)
    kept = filtered_row(logits[0] / params.temperature, params.top_k, params.top_p, params.min_p)
    expected = kept.softmax(-1) * n
    counts = Counter(draw(logits, params, n))
    cells = [i for i in range(8) if expected[i] > 0]
    assert set(counts) == set(cells)
    assert len(cells) == 8 or settings.keys() - {"temperature"}
    statistic = sum((counts[i] - expected[i].item()) ** 2 / expected[i].item() for i in cells)
    assert statistic < {8: 24.32, 7: 22.46, 6: 20.52, 5: 18.47, 4: 16.27, 3: 13.82}[len(cells)]


@pytest.mark.parametrize("step", ["index", "seed"])
def test_neighbouring_draws_are_independent(step: str, draw: Draw, choose: Choose) -> None:
    """Chi-square of the 4 x 4 table of pairs (token i, token i + 1): consecutive indices, and consecutive seeds."""
    n, logits = 20_000, torch.zeros(1, 4)
    if step == "index":
        tokens = draw(logits, SamplingParams(1.0, seed=7), n)
    else:
        tokens = choose(logits, [SamplingParams(1.0, seed=s) for s in range(n)]).tokens.tolist()
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    expected = n / 2 / 16
    assert sum((pairs[a, b] - expected) ** 2 / expected for a in range(4) for b in range(4)) < 37.70


def test_noise_depends_on_seed_and_index_only(choose: Choose) -> None:
    """The stream of a row is the same whatever rows stand beside it, and in whatever order."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(1.0, seed=s) for s in (11, 12, 13, 14, 15, 16)]
    together = choose(logits, params, 3).tokens
    for row in range(6):
        assert choose(logits[row : row + 1], params[row : row + 1], 3).tokens[0] == together[row]
    mixed = [*params[:3], SamplingParams(), SamplingParams(2.0, top_k=3), *params[3:]]
    beside = choose(torch.cat((logits[:3], logits[:2], logits[3:])), mixed, 3).tokens
    assert [*beside[:3].tolist(), *beside[5:].tolist()] == together.tolist()
    assert choose(logits.flip(0), params[::-1], 3).tokens.flip(0).tolist() == together.tolist()


def test_keys_tell_seeds_and_indices_apart() -> None:
    keys = {stream_key(seed, index) for seed in (0, 1, 2**31, 2**32, (5 << 32) + 1, -3) for index in range(500)}
    assert len(keys) == 6 * 500
    assert all(0 <= key < 2**31 for key in keys)


def test_children_have_streams_of_their_own() -> None:
    seeds = [s for seed in (0, 1, 2, (7 << 32) + 1) for s in (seed, *(child_seed(seed, i) for i in range(100)))]
    assert len({stream_key(s, 0) for s in seeds}) == len(seeds)
    assert all(0 <= s < 2**64 for s in seeds)


def test_noise_is_finite_and_has_the_moments_of_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.tensor([stream_key(0, i) for i in range(200)]), 1000)
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772) < 0.02
    assert abs(noise.var().item() - 1.6449) < 0.05
