"""What chunks say, without a network."""

from __future__ import annotations

import json

import pytest

from harness.backends.http.answer import AnswerReader, Delivered, error_message
from harness.backends.http.events import ServerEvent
from harness.record import Outcome


def read(chunks, cap=64, running=False):
    reader = AnswerReader(cap, running)
    found = [reader.take(ServerEvent("", c if isinstance(c, str) else json.dumps(c))) for c in chunks]
    return reader, found


HIDDEN = Delivered(None, None)


def test_b15_usage_in_a_chunk_with_empty_text(text, usage):
    reader, found = read([text("a"), text("b"), text("c"), text("", "stop", usage=usage(9, 3)), "[DONE]"])
    assert found == [HIDDEN, HIDDEN, HIDDEN, None, None]
    assert (reader.output_tokens, reader.prompt_tokens, reader.counted_by) == (3, 9, "total")
    assert reader.outcome(truncated=False) == (Outcome.OK_EOS, None)


def test_b15_usage_in_a_chunk_without_choices_and_none_at_all(text, usage):
    reader, _ = read([text("a"), text("b", "length"), {"choices": [], "usage": usage(9, 2)}, "[DONE]"], cap=2)
    assert (reader.output_tokens, reader.counted_by) == (2, "total")
    silent, _ = read([text("a"), text("b", "length"), "[DONE]"])
    assert (silent.output_tokens, silent.counted_by) == (None, "nothing")


def test_ids_say_how_many_also_where_the_text_is_empty(text):
    """A character spread over three tokens: two deltas are empty and are tokens all the same."""
    chunks = [text("", token_ids=[195]), text("é", token_ids=[169]), text("xy", token_ids=[7, 8])]
    reader, found = read([{"choices": [{"delta": {"role": "assistant"}}]}, *chunks, text("", "length")])
    assert found == [None, Delivered((195,), 1), Delivered((169,), 1), Delivered((7, 8), 2), None]
    assert reader.counted_by is None


def test_logprobs_say_how_many(text):
    chat = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a"}, {"token": ""}]}}]}
    reader, found = read([text("ab", logprobs={"tokens": ["a", "b"]}), text("", logprobs={"tokens": ["c"]}), chat])
    assert [d.count for d in found] == [2, 1, 2]
    assert reader.counted_by == "logprobs"


def test_running_usage_says_how_many(text, usage):
    """Held-back text: the second token has no text yet, the third brings both; the last usage is the total again."""
    chunks = [
        text("a", usage=usage(4, 1)),
        text("", usage=usage(4, 2)),
        text("bc", usage=usage(4, 3)),
        text("d", "stop", usage=usage(4, 3)),
        {"choices": [], "usage": usage(4, 3)},
    ]
    reader, found = read(chunks, running=True)
    assert found == [Delivered(None, 1)] * 3 + [None, None]
    assert (reader.counted_by, reader.output_tokens) == ("counts", 3)


def test_a_total_is_not_taken_for_a_running_count(text, usage):
    """The server states usage once, with its last text: that is no delivery of three tokens."""
    reader, found = read([text("a"), text("b"), text("c", "stop", usage=usage(4, 3))], running=True)
    assert found == [HIDDEN] * 3
    assert (reader.counted_by, reader.output_tokens) == ("total", 3)
    assert not reader.states_usage_throughout


@pytest.mark.parametrize("bad", ["NaN", "null", "-1", '"3"', "true", "Infinity", "1" + 30 * "0", "1e30"])
def test_a_count_that_is_none_is_unknown(bad):
    reader, found = read(
        [f'{{"choices": [{{"text": "a", "finish_reason": "length"}}], "usage": {{"completion_tokens": {bad}}}}}']
    )
    assert found == [HIDDEN]
    assert reader.output_tokens is None


def test_nan_among_logprobs_changes_nothing():
    reader, found = read(['{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [NaN]}}]}'])
    assert found == [Delivered(None, 1)]
    assert reader.error is None


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("stop", Outcome.OK_EOS),
        ("length", Outcome.OK_LENGTH),
        ("abort", Outcome.CANCELLED),
        ("content_filter", Outcome.ENGINE_ERROR),
    ],
)
def test_reasons(text, reason, outcome):
    assert read([text("a", reason)])[0].outcome(truncated=True)[0] is outcome


def test_ends_without_a_reason(text, usage):
    cut, _ = read([text("a")])
    assert cut.outcome(truncated=True)[0] is Outcome.STREAM_TRUNCATED
    early, _ = read([text("a"), "[DONE]"])
    assert early.outcome(truncated=False)[0] is Outcome.STREAM_TRUNCATED
    full, _ = read([text("a"), text("b"), {"choices": [], "usage": usage(1, 2)}, "[DONE]"], cap=2)
    assert full.outcome(truncated=False)[0] is Outcome.OK_LENGTH
    nothing, _ = read(["[DONE]"])
    assert nothing.outcome(truncated=False)[0] is Outcome.EMPTY


def test_errors_in_the_stream(text):
    broken, _ = read([text("a"), {"error": {"message": "CUDA out of memory", "code": 500}}])
    assert broken.outcome(truncated=False) == (Outcome.OOM_DECODE, "CUDA out of memory")
    first, _ = read([{"error": "no free blocks"}])
    assert first.outcome(truncated=False)[0] is Outcome.CACHE_EXHAUSTED
    kind = AnswerReader(4, False)
    assert kind.take(ServerEvent("error", '{"detail": "gone"}')) is None
    assert kind.error == "gone"
    garbage, _ = read([text("a"), "not json"])
    assert garbage.outcome(truncated=False)[0] is Outcome.ENGINE_ERROR
    assert "not json" in garbage.error
    assert error_message({"error": {"message": "a\n b"}}) == "a b"


def test_a_whole_answer_is_one_delivery(usage):
    reader = AnswerReader(8, False)
    whole = {"choices": [{"message": {"content": "abc"}, "finish_reason": "stop"}], "usage": usage(3, 5)}
    assert reader.take_chunk(whole) == Delivered(None, 5)
    assert (reader.counted_by, reader.outcome(truncated=False)[0]) == ("counts", Outcome.OK_EOS)


@pytest.mark.parametrize("stated", [10**9, 65, 0, 2.5, -5, True, "9"])
@pytest.mark.parametrize("running", [False, True])
def test_a_count_that_cannot_be_true_is_not_believed(text, usage, stated, running):
    """Two texts with a cap of 64: the number is above it, none although text came, or no whole number."""
    chunks = [text("a"), text("b", "length"), {"choices": [], "usage": usage(9, stated)}, "[DONE]"]
    if running:
        chunks[0] = text("a", usage=usage(9, stated))
    reader, found = read(chunks, running=running)
    assert found == [HIDDEN, HIDDEN, None, None]
    assert (reader.output_tokens, reader.counted_by, reader.prompt_tokens) == (None, "impossible", 9)
    assert reader.outcome(truncated=False) == (Outcome.OK_LENGTH, None)


def test_a_running_count_that_falls_is_not_believed(text, usage):
    reader, found = read([text("a", usage=usage(4, 3)), text("b", "stop", usage=usage(4, 1))], running=True)
    assert found == [Delivered(None, 3), HIDDEN]
    assert (reader.output_tokens, reader.counted_by) == (None, "impossible")


def test_zeros_while_it_runs_are_mended_by_a_total_that_can_be_true(text, usage):
    chunks = [text("a", usage=usage(4, 0)), text("b", "stop", usage=usage(4, 0)), {"choices": [], "usage": usage(4, 2)}]
    reader, found = read(chunks, running=True)
    assert found == [HIDDEN, HIDDEN, None]  # when each came is kept
    assert (reader.output_tokens, reader.counted_by) == (2, "total")


def test_ids_count_beside_an_impossible_number(text, usage):
    reader, found = read([text("ab", "stop", token_ids=[5, 6], usage=usage(4, 10**9))])
    assert (found, reader.output_tokens, reader.counted_by) == ([Delivered((5, 6), 2)], None, None)


def test_a_count_with_nothing_delivered_says_so(text, usage):
    """Its record is EMPTY, a failure; this is why."""
    reader, found = read([text("", "stop"), {"choices": [], "usage": usage(4, 7)}])
    assert found == [None, None]
    assert reader.outcome(truncated=False)[1] == "the server counts 7 generated tokens and delivered none"
    assert read([text("", "stop"), {"choices": [], "usage": usage(4, 0)}])[0].outcome(truncated=False)[1] is None


def test_prompts_of_no_tokens_and_fractions_are_unstated(text):
    for bad in (0, 1.5, -1, True):
        stated = {"prompt_tokens": bad, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0.5}}
        reader, _ = read([text("a", "stop", usage=stated)])
        assert (reader.prompt_tokens, reader.cached_tokens, reader.output_tokens) == (None, None, 1)


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        ({"choices": "abc"}, "choices that are no list of objects: 'abc'"),
        ({"choices": 5}, "choices that are no list of objects"),
        ({"choices": {"text": "a"}}, "choices that are no list of objects"),
        ({"choices": [7]}, "choices that are no list of objects"),
        ({"choices": [{"delta": "abc"}]}, "a delta that is no object: 'abc'"),
        ({"choices": [{"message": ["abc"]}]}, "a message that is no object"),
        ({"choices": [{"text": "a", "logprobs": [1]}]}, "a logprobs that is no object"),
        ({"choices": [{"text": "a", "logprobs": {"tokens": 4}}]}, "logprobs that are no list: '4'"),
        ({"choices": [{"text": "a", "token_ids": 4}]}, "token_ids that are no list: '4'"),
    ],
)
def test_chunks_of_other_types_are_an_error_in_words(text, chunk, says):
    reader, found = read([text("a"), chunk, text("b", "length")])
    assert found[:2] == [HIDDEN, None]
    outcome, why = reader.outcome(truncated=False)
    assert outcome is Outcome.ENGINE_ERROR
    assert says in why
    assert read([text("a"), {"choices": None}, text("b", "length")])[0].error is None
