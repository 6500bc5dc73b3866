"""A request's counters, and snapshots of it that never change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers.generation.continuous_batching import RequestStatus as TransformersStatus

from engine import FinishReason, GenerationOutput, RequestStatus
from engine.requests import Request

Make = Callable[..., Request]


def test_statuses_equal_those_of_transformers() -> None:
    """A-str-02."""
    for status in TransformersStatus:
        assert RequestStatus[status.name] == status
        assert RequestStatus[status.name] == status.value
    assert max(TransformersStatus) < RequestStatus.CANCELLED


def test_a_snapshot_stays_as_it_was(make_request: Make) -> None:
    request = make_request([1, 2, 3], 3, record_timestamps=True)
    request.status = RequestStatus.DECODING
    request.append(7, 1.0, -0.5)
    assert not request.comes_to_its_end()
    first = GenerationOutput(request)
    request.append(8, 2.0, -0.25)
    request.append(9, 3.0, -0.125)
    assert request.comes_to_its_end()
    request.end(RequestStatus.FINISHED)
    last = GenerationOutput(request)
    assert (first.generated_tokens, first.logprobs, first.status) == ([7], [-0.5], RequestStatus.DECODING)
    assert first.timestamps == [1.0]
    assert last.timestamps == [1.0, 2.0, 3.0]
    assert (first.finish_reason, first.error, first.lifespan[1]) == (None, None, -1.0), "it was not over then"
    assert not first.is_finished()
    assert (last.generated_tokens, last.logprobs) == ([7, 8, 9], [-0.5, -0.25, -0.125])
    assert last.tokens_since(1) == [8, 9]
    assert last.prompt_ids == first.prompt_ids == [1, 2, 3]
    assert last.finish_reason == FinishReason.LENGTH == "length"
    assert last.is_finished()
    last.generated_tokens.append(0)
    assert last.generated_tokens == [7, 8, 9], "lists are copies"


def test_timestamps_only_on_request(make_request: Make) -> None:
    assert GenerationOutput(make_request([1])).timestamps is None
    assert GenerationOutput(make_request([1], record_timestamps=True)).timestamps == []


def test_eos_is_kept_and_is_a_stop_even_as_the_last_allowed_token(make_request: Make) -> None:
    """B18: EOS on the last allowed token is a stop."""
    request = make_request([1], 2)
    request.eos_token_ids = frozenset({5})
    request.append(4, 1.0)
    assert not request.comes_to_its_end()
    request.append(5, 2.0)
    assert request.comes_to_its_end()
    assert request.finish_reason is FinishReason.STOP
    assert request.num_generated == 2


def test_the_last_token_is_never_fed_back(make_request: Make) -> None:
    request = make_request(range(5), 3)
    assert request.max_tokens == 7
    request.num_computed, request.num_in_flight = 5, 1
    assert (request.num_tokens, request.needs) == (6, 1)
    request.num_computed, request.num_in_flight = 7, 3
    assert request.needs == 0


def test_a_request_ends_once(make_request: Make) -> None:
    request = make_request([1])
    request.end(RequestStatus.CANCELLED, "because")
    assert request.error == "because"
    assert request.ended_time > 0
    with pytest.raises(RuntimeError, match="already ended as CANCELLED"):
        request.end(RequestStatus.FINISHED)
    assert "CANCELLED" in repr(GenerationOutput(request))
    assert "because" in repr(GenerationOutput(request))
