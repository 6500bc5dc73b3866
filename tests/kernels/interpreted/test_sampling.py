"""Random choice: the kernels against their twins and against fp64, and the sampler on the kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import kernels
from engine.kernels import (
    Cuts,
    filter_cuts,
    filter_cuts_torch,
    greedy_argmax,
    gumbel_argmax,
    gumbel_argmax_torch,
    gumbel_noise,
    kept_torch,
)
from engine.kernels.filters import NEIGHBOURS, TILE
from engine.requests import Request
from engine.sampling import Choice, Sampler, SamplingParams
from engine.sampling import operators as sampling
from engine.sampling.filters import cuts_by_search
from engine.sampling.random import stream_key

NEG = float("-inf")


def random_logits(rows: int, vocab: int, kind: str, seed: int) -> torch.Tensor:
    """Rows inside a wider tensor of NaN."""
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    x = {
        "peaked": x * 4,
        "flat": x * 0.1,
        "equal": torch.zeros_like(x),
        "ties": (x * 3).round(),
        "bfloat16": (x * 3).bfloat16(),
        "float16": (x * 3).half(),
        "forbidden": torch.where(x > 0.5, x, NEG).index_fill(1, torch.tensor([vocab // 2]), 1.0),
        "outliers": torch.where(x > 1.5, -1e30, x * 10),
        "far apart": x.sign() * (x * 30).exp2(),
    }[kind]
    wide = torch.full((rows, vocab + 7), float("nan"), dtype=x.dtype)
    wide[:, :vocab] = x
    return wide[:, :vocab]


def check_cuts(
    logits: torch.Tensor, each: list[tuple[float, int, float, float]], exactly: Callable[..., Any]
) -> torch.Tensor:
    """Kernel and twin keep what the definition keeps, one set of settings a row; returns the mask."""
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*each, strict=True))
    masks = [
        kept_torch(logits, find(logits, temperature, top_k, top_p, min_p)) for find in (filter_cuts, filter_cuts_torch)
    ]
    for row, mine in enumerate(each):
        kept, doubtful = exactly(logits[row], *mine)
        finite = logits[row] > NEG
        for mask in masks:
            assert ((mask[row] == kept) | doubtful | ~finite).all(), mine
            assert (mask[row] & finite).any(), "a token always stays"
    return masks[0]


KINDS = ["peaked", "flat", "equal", "ties", "bfloat16", "float16", "forbidden", "outliers", "far apart"]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([1, 5, 63, 97, 200]),
    st.sampled_from([1, 2, 7, 50, 10**6]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-3]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 99),
)
def test_cuts(filtered_exactly, kind, vocab, top_k, top_p, min_p, seed) -> None:
    check_cuts(random_logits(1, vocab, kind, seed), [(0.7, min(top_k, vocab), top_p, min_p)], filtered_exactly)


@pytest.mark.parametrize("kind", ["peaked", "flat", "bfloat16"])
def test_cuts_of_a_large_ragged_vocabulary(kind: str, filtered_exactly: Callable[..., Any]) -> None:
    """More neighbourhoods than one look takes in; a k beyond their number; bounds from largest values or none."""
    vocab = 2 * NEIGHBOURS * TILE + 1000
    each = [(1.0, 50, 0.9, 0.0), (1.0, vocab, 0.9, 0.0), (0.8, 2000, 1.0, 0.0), (1.3, vocab, 1.0, 0.05)]
    mask = check_cuts(random_logits(4, vocab, kind, 3), each, filtered_exactly)
    kept = mask.sum(1).tolist()
    assert 1 <= kept[0] <= 60
    assert kept[2] >= 2000
    if kind == "flat":
        assert kept[1] > 0.8 * vocab


def test_ties_that_top_p_splits_keep_their_lowest_ids() -> None:
    """Of 5000 equal tokens the first 1250 weigh a quarter; of three equal ones behind a larger, by hand, one or two."""
    one, vocab = torch.ones(1), torch.tensor([5000])
    cuts = filter_cuts(torch.zeros(1, 5000), one, vocab, one * 0.25, one * 0)
    assert (cuts.values.tolist(), cuts.last_ids.tolist()) == ([0.0], [1249])
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    for p, kept in ((1.0, [0, 1, 2, 4]), (0.4, [1]), (0.6, [0, 1]), (0.8, [0, 1, 2])):
        cuts = filter_cuts(logits, one, torch.tensor([2]), one * p, one * 0)
        assert kept_torch(logits, cuts)[0].nonzero()[:, 0].tolist() == kept


def test_rows_without_filters_are_left_whole_and_others_chosen_by_their_number() -> None:
    logits = random_logits(5, 90, "peaked", 1)
    rows = torch.tensor([3, 0])
    cuts = filter_cuts(logits, torch.ones(2), torch.tensor([90, 4]), torch.ones(2), torch.zeros(2), rows)
    assert cuts.values.tolist() == [NEG, logits[0].sort(descending=True).values[3].item()]
    assert kept_torch(logits[rows], cuts).sum(1).tolist() == [90, 4]
    with pytest.raises(ValueError, match="must be contiguous"):
        filter_cuts(torch.zeros(4, 4).T, *[torch.ones(4)] * 4)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.sampled_from(KINDS), st.integers(0, 3), st.sampled_from([1, 97, 4096, 5000]), st.booleans(), st.integers(0, 99)
)
def test_draws(kind, rows, vocab, cut, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(rows, vocab, kind, seed)
    temperature = torch.rand(rows, generator=generator) + 0.2
    keys = torch.randint(0, 2**31, (rows,), generator=generator)
    cuts = None
    if cut:
        k, off = torch.full((rows,), max(vocab // 3, 1)), torch.ones(rows)
        cuts = filter_cuts_torch(logits, temperature, k, off, off * 0) if rows else Cuts(off, off.int())
    got = gumbel_argmax(logits, temperature, keys, cuts)
    assert torch.equal(got, gumbel_argmax_torch(logits, temperature, keys, cuts))
    if cuts is not None:
        assert kept_torch(logits, cuts).gather(1, got[:, None]).all()


def test_the_kernels_noise_is_the_generators() -> None:
    """Of equal logits the largest noise wins: one wrong bit in a word would move it."""
    keys = torch.tensor([stream_key(seed, index) for seed in (0, 1, -5, 2**40) for index in range(10)])
    logits = torch.zeros(1, 9000).expand(40, -1)
    assert torch.equal(gumbel_argmax(logits, torch.ones(40), keys), gumbel_noise(keys, 9000).argmax(1))


def test_the_same_key_draws_the_same_whatever_the_row() -> None:
    logits = random_logits(1, 300, "flat", 5).expand(6, -1)
    keys = torch.tensor([stream_key(7, index) for index in (3, 0, 3, 1, 2, 3)])
    tokens = gumbel_argmax(logits, torch.ones(6), keys).tolist()
    assert tokens[0] == tokens[2] == tokens[5]
    assert len(set(tokens)) == 4
    assert gumbel_argmax(logits[:1], torch.ones(1), keys[2:3]).tolist() == tokens[:1]


def test_only_the_rows_that_sample_are_written() -> None:
    logits, rows, keys = random_logits(5, 40, "flat", 2), torch.tensor([4, 1]), torch.tensor([11, 12])
    slots = torch.tensor([3, 0, 6, 5, 1])
    outs, lasts = [], []
    for draw in (gumbel_argmax, gumbel_argmax_torch):
        out, last = torch.full((5,), -7), torch.full((7,), -8)
        assert draw(logits, torch.ones(2), keys, None, rows, out, slots, last) is out
        outs.append(out.tolist())
        lasts.append(last.tolist())
    one, four = ((logits[r] + gumbel_noise(k[None], 40)[0]).argmax().item() for r, k in ((1, keys[1]), (4, keys[0])))
    assert outs == [[-7, one, -7, -7, four]] * 2
    assert lasts == [[one, four, -8, -8, -8, -8, -8]] * 2
    with pytest.raises(ValueError, match="give the tokens of all in out"):
        gumbel_argmax(logits, torch.ones(2), keys, None, rows)
    with pytest.raises(ValueError, match="give slots and last_token both"):
        gumbel_argmax(logits, torch.ones(2), keys, None, rows, outs and torch.zeros(5, dtype=torch.int64), slots)


def test_what_is_drawn_has_the_right_distribution() -> None:
    """Chi-square of 400 draws over the indices of one seed; 99.9 % quantile of the distribution."""
    n, logits = 400, torch.tensor([[0.3, -1.0, 2.0, 0.0, 1.1, 0.7, -0.4, 1.6]])
    p = SamplingParams(1.2, 6, 0.9)
    one = torch.ones(1)
    cuts = filter_cuts(logits, one * p.temperature, torch.tensor([p.top_k]), one * p.top_p, one * 0)
    expected = (logits[0] / p.temperature).masked_fill(~kept_torch(logits, cuts)[0], NEG).softmax(-1) * n
    keys = torch.tensor([stream_key(99, index) for index in range(n)])
    every = Cuts(cuts.values.expand(n).contiguous(), cuts.last_ids.expand(n).contiguous())
    counts = Counter(gumbel_argmax(logits.expand(n, -1), one.expand(n) * p.temperature, keys, every).tolist())
    cells = [i for i in range(8) if expected[i] > 0]
    assert set(counts) == set(cells)
    assert len(cells) == 5
    statistic = sum((counts[i] - expected[i].item()) ** 2 / expected[i].item() for i in cells)
    assert statistic < 18.47


PARAMS = [
    SamplingParams(),
    SamplingParams(0.7, 20, 0.95, seed=5),
    SamplingParams(1.0, top_p=0.5, seed=6),
    SamplingParams(1.0, seed=8),
    SamplingParams(1.0, min_p=0.05, seed=7, top_logprobs=4),
]
RULES = SamplingParams(1.1, 9, repetition_penalty=1.3, seed=4)


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(
    "params",
    [PARAMS, PARAMS[1:], [PARAMS[0]] * 2, [*PARAMS, RULES], [RULES, PARAMS[3]], [RULES, PARAMS[0]]],
    ids=["mixed", "all random", "greedy", "mixed, changed", "all changed", "some changed"],
)
def test_the_sampler_on_kernels(params: list[SamplingParams], logprobs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(len(params), 150, generator=torch.Generator().manual_seed(3)) * 2
    launched: Counter[str] = Counter()

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            launched[name] += 1
            return kernel(*arguments, **options)

        return call

    def step(sampler: Sampler) -> tuple[Choice, list[int]]:
        requests = []
        for slot, p in enumerate(params):
            request = Request.create(str(slot), [1, 2, 1, 2, 3], 9, frozenset(), p)
            request.slot = slot
            requests.append(request)
        last = torch.ones(8, dtype=torch.int64)
        n = len(params)
        return sampler.choose(logits, requests, [6] * n, torch.arange(n), last), last.tolist()

    twins, twins_last = step(Sampler(torch.device("cpu"), logprobs))
    on_kernels = sampling.Operators(
        counted("greedy", greedy_argmax), counted("gumbel", gumbel_argmax), counted("cuts", cuts_by_search)
    )
    monkeypatch.setattr(sampling.Operators, "choose", lambda device: on_kernels)
    got, last = step(Sampler(torch.device("cpu"), logprobs))
    assert got.tokens.tolist() == twins.tokens.tolist() == last[: len(params)] == twins_last[: len(params)]
    assert last[len(params) :] == [1] * (8 - len(params))
    assert (got.logprobs is not None) is logprobs
    if logprobs:
        torch.testing.assert_close(got.logprobs, twins.logprobs)
        assert [top and [i for i, _ in top] for top in got.to_lists()[2]] == [
            top and [i for i, _ in top] for top in twins.to_lists()[2]
        ]
    some_random = any(not p.greedy for p in params)
    assert launched["greedy"] == any(p.greedy for p in params)
    assert launched["gumbel"] == launched["cuts"] == some_random


def test_warming_up_launches_every_kernel_in_both_types(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            cut = name == "gumbel" and arguments[2] is not None
            seen.add((name, cut, logits.dtype))
            return kernel(logits, *arguments, **options)

        return call

    operators = sampling.Operators(
        noted("greedy", greedy_argmax), noted("gumbel", gumbel_argmax), noted("cuts", cuts_by_search)
    )
    monkeypatch.setattr(sampling.Operators, "choose", lambda device: operators)
    Sampler(torch.device("cpu")).warm_up(97, torch.bfloat16, torch.device("cpu"))
    ways = [("greedy", False), ("gumbel", False), ("gumbel", True), ("cuts", False)]
    assert seen == {(name, cut, dtype) for name, cut in ways for dtype in (torch.bfloat16, torch.float32)}


def test_kernels_are_chosen_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampling.Operators.choose(torch.device("cpu")).gumbel_argmax is gumbel_argmax_torch
    monkeypatch.setattr(kernels, "why_no_triton", lambda device: None)
    assert sampling.Operators.choose(torch.device("cuda")).filter_cuts is cuts_by_search
    monkeypatch.setattr(kernels, "why_no_triton", lambda device: "too old")
    assert sampling.Operators.choose(torch.device("cuda")).gumbel_argmax is gumbel_argmax_torch
