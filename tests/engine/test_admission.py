"""What is let in, what is refused and in which words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from engine import WorkloadHints
from engine.admission import MAX_SEQUENCES, Admission, InvalidRequest, prefix_order
from engine.model_shape import ModelShape
from engine.requests import Request
from engine.resolution import resolve

Admit = Callable[..., Request]


@pytest.fixture
def admission(m1: Any, c1: Callable[..., Any]) -> Callable[..., Admit]:
    """``admission(generation=..., **config)`` gives ``admit(prompt, **request)``."""

    def build(generation: Any = None, **config: Any) -> Admit:
        shape = ModelShape.of(m1)
        resolved = resolve(c1(**config), shape, WorkloadHints(), "eager", memory_probe=lambda _: 2**32)
        gate = Admission(shape, resolved, generation or GenerationConfig(max_new_tokens=4), seed=9)

        def admit(
            prompt: Any,
            max_new_tokens: Any = None,
            eos_token_id: Any = None,
            number: int = 0,
            num_return_sequences: Any = None,
            **s: Any,
        ) -> Request:
            return gate.admit("q", number, prompt, max_new_tokens, False, False, eos_token_id, s, num_return_sequences)

        return admit

    return build


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        ([], "the prompt is empty"),
        ([5, 500, 3], r"input_ids\[1\] is 500, outside the vocabulary 0 … 96"),
        ([97], r"input_ids\[0\] is 97, outside"),
        ([5, -1, 3], r"input_ids\[1\] is -1, outside"),
        ([5, 1.0], r"input_ids\[1\] is 1.0, not a token id"),
        ([True], "not a token id"),
        ([[1, 2]], "not a token id"),
        ("text", "must be a list of token ids, got str"),
        (b"ab", "must be a list of token ids, got bytes"),
        (None, "must be a list of token ids, got NoneType"),
        (7, "must be a list of token ids, got int"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_named(prompt: Any, cause: str, admission: Callable[..., Admit]) -> None:
    with pytest.raises(InvalidRequest, match=f"request 'q': .*{cause}"):
        admission()(prompt)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"streaming": "yes"}, "streaming must be True or False, got 'yes'"),
        ({"streaming": []}, r"streaming must be True or False, got \[\]"),
        ({"streaming": 1}, "streaming must be True or False, got 1"),
        ({"record_timestamps": None}, "record_timestamps must be True or False, got None"),
        ({"request_id": 5}, "request 5: request_id must be a string"),
        ({"request_id": ["a"]}, "request_id must be a string"),
    ],
)
def test_an_argument_of_another_type_is_refused_and_ends_nobody(
    given: dict[str, Any], cause: str, open_manager: Any
) -> None:
    """The flags go into arrays that all running requests share; an id is a key."""
    manager = open_manager()
    manager.add_request([1, 2], request_id="mate")
    with pytest.raises(InvalidRequest, match=cause):
        manager.add_request([1, 2, 3], **given)
    assert [(o.request_id, o.status.name) for o in manager] == [("mate", "FINISHED")]


@pytest.mark.parametrize("prompt", [[1, 2, 96], (1, 2, 96), torch.tensor([1, 2, 96]), np.array([1, 2, 96])])
def test_any_sequence_of_ids_will_do(prompt: Any, admission: Callable[..., Admit]) -> None:
    request = admission()(prompt)
    assert request.tokens == [1, 2, 96]
    assert request.num_prompt == 3
    assert request.tokens is not prompt


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_a_bad_max_new_tokens(value: Any, admission: Callable[..., Admit]) -> None:
    with pytest.raises(InvalidRequest, match="max_new_tokens must be an integer >= 1"):
        admission()([1], value)


def test_a_request_that_can_never_fit_is_refused(admission: Callable[..., Admit]) -> None:
    """B02: 30 + 12 tokens need ceil(41 / 4) = 11 of 8 blocks."""
    admit = admission(num_blocks=8)
    with pytest.raises(InvalidRequest, match=r"need 11 KV blocks of 4 tokens, the cache has 8; raise num_blocks"):
        admit([1] * 30, 12)
    with pytest.raises(InvalidRequest, match="KV blocks"):
        admit([1] * 40, 1)
    assert admit([1] * 30, 3).max_new_tokens == 3  # 32 positions: exactly 8 blocks
    with pytest.raises(InvalidRequest):
        admit([1] * 30, 4)


def test_a_request_longer_than_the_models_positions_is_refused(admission: Callable[..., Admit]) -> None:
    admit = admission(num_blocks=200)
    assert admit([1] * 500, 13).max_new_tokens == 13  # the last token needs no position
    with pytest.raises(InvalidRequest, match="exceed the model's 512 positions"):
        admit([1] * 500, 14)


def test_without_a_limit_a_request_may_go_as_far_as_model_and_cache_reach(admission: Callable[..., Admit]) -> None:
    open_end = GenerationConfig(eos_token_id=5)
    by_model = admission(open_end, num_blocks=200)([1] * 12)
    assert by_model.max_new_tokens == 500
    by_cache = admission(open_end, num_blocks=8)([1] * 12)
    assert 12 + by_cache.max_new_tokens - 1 <= 32
    assert by_cache.max_new_tokens >= 17


def test_the_request_overrides_the_shared_settings(admission: Callable[..., Admit]) -> None:
    """A-mgr-03."""
    admit = admission(GenerationConfig(max_new_tokens=4, eos_token_id=[3, 5]))
    assert (admit([1]).max_new_tokens, admit([1]).eos_token_ids) == (4, {3, 5})
    assert (admit([1], 9).max_new_tokens, admit([1], eos_token_id=7).eos_token_ids) == (9, {7})
    assert admit([1], eos_token_id=-1).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("given", "words"),
    [({"temperature": 0.5}, "temperature"), ({"top_k": 5}, "top_k"), ({"top_p": 0.5, "seed": 1}, "top_p")],
)
def test_a_request_value_is_obeyed_or_refused(
    given: dict[str, Any], words: str, admission: Callable[..., Admit]
) -> None:
    """A-pp-02, A-pp-04: refused without per_request_processors, and, naming it, without do_sample."""
    sampling = GenerationConfig(max_new_tokens=4, do_sample=True, temperature=0.7, top_k=9)
    with pytest.raises(InvalidRequest, match=f"{words} can be set per request only with .*per_request_processors=True"):
        admission(sampling)([1], **given)
    with pytest.raises(InvalidRequest, match=f"{words} needs GenerationConfig.do_sample=True"):
        admission(per_request_processors=True)([1], **given)
    params = admission(sampling, per_request_processors=True)([1], **given).sampling
    for name, value in given.items():
        assert getattr(params, name) == value


def test_what_looks_back_or_at_single_tokens_needs_no_do_sample(admission: Callable[..., Admit]) -> None:
    greedy = GenerationConfig(max_new_tokens=4, repetition_penalty=1.2, eos_token_id=5)
    values: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 2,
        "bad_words_ids": [[1]],
        "logit_bias": {1: 2.0},
        "sequence_bias": [[[1, 2], 2.0]],
        "suppress_tokens": [1],
        "begin_suppress_tokens": [1],
    }
    for name, value in values.items():
        assert getattr(admission(greedy, per_request_processors=True)([1], **{name: value}).sampling, name)
        with pytest.raises(InvalidRequest, match=f"{name} can be set per request only with .*per_request_processors"):
            admission(greedy)([1], **{name: value})


def test_a_value_equal_to_the_default_is_always_fine(admission: Callable[..., Admit]) -> None:
    config = GenerationConfig(max_new_tokens=4, repetition_penalty=1.2, bad_words_ids=[[1]], min_new_tokens=2)
    same = {"repetition_penalty": 1.2, "bad_words_ids": [[1]], "min_new_tokens": 2, "top_k": -1, "temperature": 0}
    assert admission(config)([1], **same).sampling == admission(config)([1]).sampling
    off = admission(config, per_request_processors=True)([1], bad_words_ids=[], min_new_tokens=0).sampling
    assert (off.bad_words_ids, off.min_new_tokens, off.repetition_penalty) == ((), 0, 1.2)


def test_what_does_not_change_logits_needs_no_permission(admission: Callable[..., Admit]) -> None:
    given = {"seed": 4, "stop_sequences": [[1, 2]], "top_logprobs": 3, "logprobs_mode": "raw"}
    params = admission(return_logprobs=True)([1], **given).sampling
    assert (params.stop_sequences, params.top_logprobs, params.logprobs_mode) == (((1, 2),), 3, "raw")


def test_least_lengths(admission: Callable[..., Admit]) -> None:
    """transformers' min_length counts the prompt and gives way to min_new_tokens."""
    admit = admission(GenerationConfig(max_new_tokens=9, min_length=6, eos_token_id=5), per_request_processors=True)
    assert [admit([1] * n).sampling.min_new_tokens for n in (1, 5, 6, 7)] == [5, 1, 0, 0]
    assert admit([1], min_new_tokens=2).sampling.min_new_tokens == 2
    both = admission(GenerationConfig(max_new_tokens=9, min_length=6, min_new_tokens=1))
    assert both([1]).sampling.min_new_tokens == 1
    with pytest.raises(InvalidRequest, match="min_new_tokens=10 is more than max_new_tokens=9"):
        admit([1], min_new_tokens=10)


def test_max_length_counts_the_prompt(admission: Callable[..., Admit]) -> None:
    admit = admission(GenerationConfig(max_length=10))
    assert (admit([1] * 4).max_new_tokens, admit([1] * 4, 9).max_new_tokens) == (6, 9)
    with pytest.raises(InvalidRequest, match="10 prompt tokens leave nothing of max_length=10"):
        admit([1] * 10)


def test_a_bad_or_unknown_sampling_value_is_the_requests_fault(admission: Callable[..., Admit]) -> None:
    admit = admission(GenerationConfig(max_new_tokens=4, do_sample=True), per_request_processors=True)
    with pytest.raises(InvalidRequest, match="temperature must be >= 0"):
        admit([1], temperature=-1)
    with pytest.raises(InvalidRequest, match="unknown sampling parameter 'warmth'"):
        admit([1], warmth=0.1)
    with pytest.raises(InvalidRequest, match="suppress_tokens names token 97, outside the vocabulary 0 … 96"):
        admit([1], suppress_tokens=[3, 97])


def test_requests_without_a_seed_get_different_ones_from_the_base_seed(admission: Callable[..., Admit]) -> None:
    admit = admission(GenerationConfig(max_new_tokens=4, do_sample=True))
    seeds = [admit([1], number=i).sampling.seed for i in range(3)]
    assert len(set(seeds)) == 3
    assert seeds == [admit([1], number=i).sampling.seed for i in range(3)]
    assert admit([1], seed=42).sampling.seed == 42


def test_a_request_is_as_many_as_it_asks_for(admission: Callable[..., Admit]) -> None:
    config = GenerationConfig(max_new_tokens=4, num_return_sequences=3, do_sample=True)
    parent = admission(config)([1, 2])
    assert [c.request_id for c in parent.children] == ["q__child#0", "q__child#1"]
    assert len({r.sampling.seed for r in (parent, *parent.children)}) == 3
    for child in parent.children:
        assert (child.parent, child.tokens, child.max_new_tokens) == (parent, [1, 2], 4)
        assert child.sampling.override(seed=0) == parent.sampling.override(seed=0)
    assert [len(admission(config)([1], num_return_sequences=n).children) for n in (1, 4)] == [0, 3]
    for bad in (0, -1, 1.0, True):
        with pytest.raises(InvalidRequest, match="num_return_sequences must be an integer >= 1"):
            admission()([1], num_return_sequences=bad)


def test_more_sequences_than_memory_is_meant_for_are_refused_before_they_are_built(
    admission: Callable[..., Admit], monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = admission()
    assert len(admit([1], num_return_sequences=MAX_SEQUENCES).children) == MAX_SEQUENCES - 1
    monkeypatch.setattr(Request, "bear", lambda request, count: pytest.fail(f"{count} children are built"))
    for many in (MAX_SEQUENCES + 1, 10**12):
        with pytest.raises(InvalidRequest, match=f"request 'q': num_return_sequences={many} is more than 16384"):
            admit([1], num_return_sequences=many)
    with pytest.raises(InvalidRequest, match="num_return_sequences=1000000000 is more than"):
        admission(GenerationConfig(num_return_sequences=10**9, do_sample=True))([1])


@pytest.mark.parametrize(
    "forbids_all",
    [
        {"suppress_tokens": range(97)},
        {"begin_suppress_tokens": range(97)},
        {"bad_words_ids": [[i] for i in range(97)], "eos_token_id": -1},
        {"logit_bias": dict.fromkeys(range(50), -math.inf), "suppress_tokens": range(40, 97)},
        {"suppress_tokens": range(96), "eos_token_id": 96, "min_new_tokens": 2},
    ],
)
def test_a_request_that_leaves_no_token_to_choose_is_refused(
    forbids_all: dict[str, Any], admission: Callable[..., Admit]
) -> None:
    """Else a forbidden one would be its output."""
    admit = admission(per_request_processors=True)
    with pytest.raises(InvalidRequest, match="forbid all 97 tokens"):
        admit([1, 2], **forbids_all)
    for one_left in ({"suppress_tokens": range(96)}, {"begin_suppress_tokens": range(1, 97), "suppress_tokens": [3]}):
        admit([1, 2], **one_left)


def test_every_bit_of_the_base_seed_counts(m1: Any, c1: Callable[..., Any]) -> None:
    resolved = resolve(c1(), ModelShape.of(m1), WorkloadHints(), "eager", memory_probe=lambda _: 2**32)

    def seeds(base: int) -> tuple[int, ...]:
        gate = Admission(ModelShape.of(m1), resolved, GenerationConfig(max_new_tokens=4), base)
        requests = [gate.admit("q", n, [1], None, False, False, None, {}) for n in range(3)]
        return tuple(request.sampling.seed for request in requests)

    bases = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64, 2**64 + 1, 10**40]
    assert len({seeds(base) for base in bases}) == len(bases)
    assert all(0 <= seed < 2**64 for base in bases for seed in seeds(base))
    assert seeds(7) == (7 << 32, (7 << 32) + 1, (7 << 32) + 2)


def test_prompts_with_a_common_beginning_come_together() -> None:
    inputs = [[1, 2, 3], [9, 9], [1, 2, 4], [9, 8], None, "text", [1, "a"], torch.tensor([9, 9, 1])]
    order = prefix_order(inputs)
    assert sorted(order) == list(range(8))
    assert order[:5] == [7, 1, 3, 2, 0]


def test_what_leaves_no_token_later_is_refused_as_well(admission: Callable[..., Admit]) -> None:
    """97 tokens: none may come twice, or none may follow a token that may come."""
    admit = admission(per_request_processors=True)
    once: dict[str, Any] = {"no_repeat_ngram_size": 1}
    assert admit([1, 2, 2], max_new_tokens=95, **once).max_new_tokens == 95
    with pytest.raises(InvalidRequest, match=r"lets 95 tokens follow this prompt .* max_new_tokens=96 asks for more"):
        admit([1, 2, 2], max_new_tokens=96, **once)
    with pytest.raises(InvalidRequest, match="lets 91 tokens follow"):
        admit([1, 2], max_new_tokens=92, suppress_tokens=range(1, 7), **once)
    with pytest.raises(InvalidRequest, match="lets 0 tokens follow"):
        admit([1, 2], max_new_tokens=1, begin_suppress_tokens=[0, *range(3, 97)], **once)
    # An EOS that is free ends it in time; one of the prompt, or one that may not come yet, does not.
    admit([1, 2], max_new_tokens=120, eos_token_id=5, **once)
    with pytest.raises(InvalidRequest, match="lets 95 tokens follow"):
        admit([1, 5], max_new_tokens=120, eos_token_id=5, **once)
    with pytest.raises(InvalidRequest, match="lets 94 tokens follow"):
        admit([1, 2], max_new_tokens=120, eos_token_id=5, min_new_tokens=95, **once)

    nothing_after_7 = [[7, i] for i in range(97)]
    with pytest.raises(InvalidRequest, match=r"forbid all 97 tokens after \[7\]; leave one to choose"):
        admit([1, 2], bad_words_ids=nothing_after_7)
    with pytest.raises(InvalidRequest, match=r"after \[3, 7\]"):
        admit(
            [1, 2],
            bad_words_ids=[*nothing_after_7[:50], *([3, 7, i] for i in range(50, 90))],
            suppress_tokens=range(90, 97),
        )
    admit([1, 2], bad_words_ids=nothing_after_7[1:])


def test_numpys_integers_are_integers(admission: Callable[..., Admit]) -> None:
    admit = admission(per_request_processors=True)
    three = np.int64(3)
    request = admit([1, 2], max_new_tokens=three, min_new_tokens=np.int32(1), suppress_tokens=[three], seed=np.uint8(9))
    assert (request.max_new_tokens, request.sampling.min_new_tokens, request.sampling.seed) == (3, 1, 9)
    kept = (request.max_new_tokens, request.sampling.min_new_tokens, *request.sampling.suppress_tokens)
    assert {type(value) for value in kept} == {int}
    for none in (np.bool_(True), True, np.float64(3), 3.0, "3"):
        with pytest.raises(InvalidRequest, match="max_new_tokens must be an integer >= 1"):
            admit([1, 2], max_new_tokens=none)
