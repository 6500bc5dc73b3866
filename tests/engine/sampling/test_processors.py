"""Every processor, alone and with the others, against a twin that goes row by row and token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import Choice, SamplingParams
from engine.sampling.processors import forbid_repeated_ngrams, penalize_occurrence, penalize_repetition

Choose = Callable[..., Choice]
Row = Callable[..., torch.Tensor]
VOCAB = 13
NEG = float("-inf")

ids = st.integers(0, VOCAB - 1)
word = st.lists(ids, min_size=1, max_size=3)
bias = st.floats(-3, 3, width=32)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.5, 1, 1.7]),
    "top_k": st.sampled_from([-1, 1, 3, 100]),
    "top_p": st.sampled_from([0.3, 0.8, 1]),
    "min_p": st.sampled_from([0.05, 0.5]),
    "repetition_penalty": st.sampled_from([0.7, 1.3]),
    "presence_penalty": st.sampled_from([-0.5, 1.5]),
    "frequency_penalty": st.sampled_from([-0.5, 0.75]),
    "no_repeat_ngram_size": st.integers(1, 4),
    "min_new_tokens": st.integers(0, 4),
    "bad_words_ids": st.lists(word, max_size=3),
    "sequence_bias": st.lists(st.tuples(word, bias), max_size=3),
    "logit_bias": st.dictionaries(ids, bias, max_size=3),
    "suppress_tokens": st.lists(ids, max_size=2),
    "begin_suppress_tokens": st.lists(ids, max_size=2),
    "logprobs_mode": st.sampled_from(["processed", "raw"]),
}
row = st.tuples(
    st.fixed_dictionaries({}, optional=OPTIONS),
    st.lists(ids, min_size=1, max_size=6),
    st.lists(ids, max_size=6),
    st.frozensets(ids, max_size=2),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(row, min_size=1, max_size=5), st.integers(0, 2**20), st.booleans())
def test_any_mixture_equals_the_twin(
    choose: Choose, processed_row: Row, rows: list[Any], salt: int, in_flight: bool
) -> None:
    """Log probabilities of all tokens, and the token of greedy rows; the last token may be on the device only."""
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(salt)) * 2
    before = logits.clone()
    params = [SamplingParams(**options, seed=i, top_logprobs=VOCAB) for i, (options, *_) in enumerate(rows)]
    choice = choose(
        logits, params, histories=[(p, o) for _, p, o, _ in rows], eos=[e for *_, e in rows],
        in_flight=in_flight, return_logprobs=True,
    )  # fmt: skip
    assert torch.equal(logits, before), "the model's logits are left as they are"
    tokens, logprobs, tops = choice.to_lists()
    for i, (_, prompt, output, eos) in enumerate(rows):
        expected = processed_row(logits[i], params[i], prompt, output, eos)
        if expected.max() == NEG:  # everything is forbidden: no token is right, but none breaks the step either
            assert 0 <= tokens[i] < VOCAB
            continue
        assert expected[tokens[i]] > NEG
        if params[i].greedy:
            assert expected[tokens[i]] == pytest.approx(expected.max().item(), abs=1e-5)
        shown = (logits[i] if params[i].logprobs_mode == "raw" else expected).log_softmax(-1)
        assert logprobs[i] == pytest.approx(shown[tokens[i]].item(), abs=1e-4)
        top = tops[i]
        assert top is not None
        assert dict(top) == pytest.approx({t: v for t, v in enumerate(shown.tolist()) if v > NEG}, abs=1e-4)
        assert [v for _, v in top] == sorted((v for _, v in top), reverse=True)


def test_repetition_counts_a_token_once_and_by_the_sign_of_its_logit() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, NEG], [2.0, -2.0, 1.0, 0.0]])
    tokens = torch.tensor([[0, 1, 1, 3], [2, 4, 4, 4]])  # 4: padding
    got = penalize_repetition(logits, tokens, torch.tensor([2.0, 1.0]))
    assert got.tolist() == [[1.0, -4.0, 1.0, NEG], [2.0, -2.0, 1.0, 0.0]]


def test_presence_and_frequency_follow_the_definition_over_generated_tokens() -> None:
    logits = torch.zeros(2, 4)
    tokens = torch.tensor([[0, 0, 1, 2, 2], [3, 3, 4, 4, 4]])
    got = penalize_occurrence(
        logits, tokens, torch.tensor([5, 2]), torch.tensor([2, 1]), torch.tensor([0.5, 0.0]), torch.tensor([0.25, -1.0])
    )
    assert got.tolist() == [[0.0, -0.75, -1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("history", "size", "forbidden"),
    [
        ([1, 2, 3, 1, 2], 3, {3}),
        ([1, 2, 3, 1, 2], 2, {3}),
        ([1, 2, 1, 3, 1], 2, {2, 3}),
        ([1, 1, 1], 2, {1}),
        ([1, 2, 3], 1, {1, 2, 3}),
        ([1, 2], 3, set()),
        ([1, 2, 1], 3, set()),
        ([1, 2, 1, 2], 3, {1}),
        ([1, 2, 1, 2], 0, set()),
        ([], 2, set()),
        ([2, 1, 0, 0, 2], 2, {1}),  # the end is not joined to the beginning
    ],
)
def test_repeated_ngrams(history: list[int], size: int, forbidden: set[int]) -> None:
    tokens = torch.tensor([history + [5] * (8 - len(history))])
    got = forbid_repeated_ngrams(torch.zeros(1, 5), tokens, torch.tensor([len(history)]), torch.tensor([size]), 4)
    assert {i for i in range(5) if got[0, i] == NEG} == forbidden


@pytest.mark.parametrize("size", [60, 64, 65, 130, 199, 201, 2**22, 2**31 - 1])
def test_a_large_ngram_is_looked_for_no_longer_than_it_can_be_there(size: int) -> None:
    """One request's size, beyond its history even, keeps nobody waiting; the others' rules hold beside it."""
    history = [1, 2, 3] * 66 + [1, 2]
    small = [4] * 100 + [3, 4, 3, 4] * 25
    tokens = torch.tensor([history, small])
    lengths, sizes = torch.tensor([200, 200]), torch.tensor([size, 3])
    got = forbid_repeated_ngrams(torch.zeros(2, 5), tokens, lengths, sizes, size)
    for row, past, n in ((0, history, size), (1, small, 3)):
        seen = {past[i + n - 1] for i in range(len(past) - n + 1) if past[i : i + n - 1] == past[len(past) - n + 1 :]}
        assert {i for i in range(5) if got[row, i] == NEG} == seen
    assert (got[0] == NEG).any() == (size < 199)


def test_eos_comes_not_before_its_time(choose: Choose) -> None:
    logits, params = torch.tensor([[0.0, 9.0, 1.0]]), [SamplingParams(min_new_tokens=2)] * 3
    got = choose(logits, params, histories=[([0], [0] * i) for i in range(3)], eos=[frozenset({1})] * 3)
    assert got.tokens.tolist() == [2, 2, 1]


def test_an_eos_is_not_a_bad_word(choose: Choose) -> None:
    """As in transformers: a single EOS among the bad words is let through."""
    logits, params = torch.tensor([[0.0, 9.0, 1.0]]), [SamplingParams(bad_words_ids=((1,),))] * 2
    assert choose(logits, params, eos=[frozenset({1}), frozenset()]).tokens.tolist() == [1, 2]


def test_a_request_in_anothers_slot_has_its_own_history() -> None:
    from engine.requests import Request
    from engine.sampling import Sampler

    sampler = Sampler(torch.device("cpu"))
    params, last = SamplingParams(no_repeat_ngram_size=1, suppress_tokens=(0,)), torch.zeros(1, dtype=torch.int64)
    logits, slots = torch.tensor([[0.0, 5.0, 4.0, 3.0]]), torch.zeros(1, dtype=torch.int64)
    for prompt, expected in (([1, 2], 3), ([3], 1)):
        request = Request.create("r", prompt, 9, frozenset(), params)
        request.slot = 0
        assert sampler.choose(logits, [request], [len(prompt)], slots, last).tokens.tolist() == [expected]
        request.tokens.append(expected)
        again = sampler.choose(logits, [request], [len(prompt) + 1], slots, last)
        assert again.tokens.tolist() == [{3: 0, 1: 2}[expected]]
