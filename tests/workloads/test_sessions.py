"""Conversations: histories, waits and due times of turns, and the hash of a workload that has them."""

from __future__ import annotations

from typing import Any

import pytest

from workloads import ScheduledRequest, Workload, build_workload
from workloads.config import LengthConfig, SessionsWorkload
from workloads.describe import describe, prefix_reuse

BURST = {"kind": "burst"}


def sessions(**given: Any) -> SessionsWorkload:
    fixed: dict[str, Any] = {
        "sessions": 3,
        "turns": LengthConfig("fixed", value=3),
        "new_tokens": LengthConfig("fixed", value=10),
        "output_tokens": LengthConfig("fixed", value=6),
        "system_tokens": 4,
        "think_s": 2.0,
        "think_cv": 0.0,
    }
    return SessionsWorkload(**(fixed | given))


def build(arrival: Any = BURST, **given: Any) -> Workload:
    return build_workload(sessions(**given), arrival, vocab_size=1000, seed=3)


def test_each_turn_repeats_what_was_said() -> None:
    w = build()
    assert [len(r.prompt_ids) for r in w.requests] == [14, 30, 46] * 3  # 4 + 10, then 6 answered and 10 new
    for first, second, third in (w.requests[k : k + 3] for k in (0, 3, 6)):
        assert second.prompt_ids[:14] == first.prompt_ids
        assert third.prompt_ids[:30] == second.prompt_ids
        assert [r.follows for r in (first, second, third)] == [None, first.request_id, second.request_id]
        assert [r.think_s for r in (first, second, third)] == [0.0, 2.0, 2.0]
        assert [r.takes_answer for r in (first, second, third)] == [False, True, True]
        assert [(r.prefix_group, r.prefix_tokens) for r in (first, second, third)] == [
            (first.prefix_group, 14),
            (first.prefix_group, 20),
            (first.prefix_group, 36),
        ]
    assert len({r.prompt_ids[:4] for r in w.requests}) == 1  # the system prompt
    assert len({r.prompt_ids[:5] for r in w.requests}) > 1
    assert w.sessions == 3


def test_arrivals_are_those_of_conversations() -> None:
    w = build({"kind": "constant", "rate": 0.5})
    assert [r.due_s for r in w.requests] == [0.0] * 3 + [2.0] * 3 + [4.0] * 3


def test_an_answer_replaces_the_plan() -> None:
    w = build()
    first, second, third = w.requests[:3]
    sent = second.answering(first, first.prompt_ids, (7, 8))  # it stopped early
    assert sent.prompt_ids == (*first.prompt_ids, 7, 8, *second.prompt_ids[20:])
    after = third.answering(second, sent.prompt_ids, (1, 2, 3, 4, 5, 6))
    assert after.prompt_ids == (*sent.prompt_ids, 1, 2, 3, 4, 5, 6, *third.prompt_ids[36:])
    answers = {first.request_id: (7, 8), second.request_id: (1, 2, 3, 4, 5, 6)}
    assert w.sent_ids(third.request_id, answers) == after.prompt_ids
    assert w.sent_ids(first.request_id, {}) == first.prompt_ids
    with pytest.raises(KeyError):
        w.sent_ids(third.request_id, {first.request_id: (7, 8)})


def test_the_open_form_knows_everything_beforehand() -> None:
    w = build({"kind": "constant", "rate": 1.0}, sessions=2, loop="open", history="planned")
    assert [r.due_s for r in w.requests] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]  # turns of the two, every 2 s, interleaved
    assert [len(r.prompt_ids) for r in w.requests] == [14, 14, 30, 30, 46, 46]
    assert all(r.follows is None and not r.takes_answer for r in w.requests)
    assert w.requests[4].prompt_ids[:30] == w.requests[2].prompt_ids
    assert [r.request_id for r in w.requests] == [f"r{k:05d}" for k in range(6)]


def test_planned_histories_in_the_closed_form() -> None:
    w = build(history="planned")
    assert [r.follows is None for r in w.requests[:3]] == [True, False, False]
    assert not any(r.takes_answer for r in w.requests)


def test_a_cap_ends_a_conversation_and_is_noted() -> None:
    w = build(context_cap=40)  # 30 + 6 fits, 46 does not
    assert [len(r.prompt_ids) for r in w.requests] == [14, 30] * 3
    assert w.notes == ("3 turns are left out: with them a conversation is longer than 40 tokens",)
    assert [r.prompt_ids for r in build().requests if len(r.prompt_ids) < 40] == [r.prompt_ids for r in w.requests]
    with pytest.raises(ValueError, match="no first turn is so short"):
        build(context_cap=10)


def test_a_closed_loop_holds_conversations() -> None:
    w = build({"kind": "closed_loop", "concurrency": 2, "think_s": 5.0, "think_cv": 0.0})
    assert w.concurrency == 2
    assert [r.think_s for r in w.requests] == [5.0, 2.0, 2.0] * 3
    described = describe(w)
    assert (described.sessions, described.waiting_requests) == (3, 7)
    assert described.rate_request_s is None is described.gap_cv


def test_reuse_counts_prompts_and_answers() -> None:
    """A conversation without system prompt: 10, 26, 42 tokens; blocks of 4.

    Of turn 1, 10 + 6 - 1 = 15 tokens were computed, 3 whole blocks; turn 2 finds 12 of 26. Of turn 2, 31: 7 blocks, so
    turn 3 finds 28 of 42. Without answers inside, turn 2 finds the 2 whole blocks of turn 1's prompt, turn 3 the 6 of
    turn 2's.
    """
    one = {"sessions": 1, "system_tokens": 0}
    assert prefix_reuse(build(**one), 4) == pytest.approx((12 + 28) / 78)
    assert prefix_reuse(build(**one, history="planned"), 4) == pytest.approx((8 + 24) / 78)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loop": "opne"}, "Did you mean 'open'"),
        ({"history": "plan"}, "Did you mean 'planned'"),
        ({"loop": "open"}, r"set workload\.history=planned"),
        ({"sessions": 0}, r"workload\.sessions is 0"),
        ({"system_tokens": -1}, r"workload\.system_tokens is -1"),
        ({"think_s": -1.0}, r"workload\.think_s"),
        ({"turns": LengthConfig("fixed")}, r"workload\.turns: kind fixed needs value"),
    ],
)
def test_settings_that_mean_nothing(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**given)


def test_recorded_times_are_not_those_of_conversations() -> None:
    with pytest.raises(ValueError, match="as_recorded needs a workload with times"):
        build({"kind": "as_recorded"})


def test_waits_are_part_of_the_hash_and_plain_hashes_stay() -> None:
    plain = Workload("w", (ScheduledRequest("a", 0.0, (1, 2), 3), ScheduledRequest("b", 0.5, (3,), 4)))
    # Its value before there were sessions: committed results name such hashes.
    assert plain.content_hash == "7df87fd510904aaafff3b2128e714eb0ed08b88ad324f74dd2aa30f004d1bbbc"
    waits = Workload("w", (ScheduledRequest("a", 0.0, (1, 2), 3), ScheduledRequest("b", 0.5, (3,), 4, follows="a")))
    thinks = Workload(
        "w", (ScheduledRequest("a", 0.0, (1, 2), 3), ScheduledRequest("b", 0.5, (3,), 4, follows="a", think_s=1.0))
    )
    assert len({plain.content_hash, waits.content_hash, thinks.content_hash}) == 3
    assert build().content_hash == build().content_hash != build(think_s=3.0).content_hash


def test_a_chain_that_cannot_be_sent_is_refused() -> None:
    a = ScheduledRequest("a", 0.0, (1,), 1)
    for others in (
        [ScheduledRequest("b", 0.0, (1,), 1, follows="c")],
        [ScheduledRequest(name, 0.0, (1,), 1, follows="a") for name in ("b", "c")],
    ):
        with pytest.raises(ValueError, match="each may follow one"):
            Workload("w", (a, *others))
    with pytest.raises(ValueError, match="takes an answer but follows none"):
        Workload("w", (ScheduledRequest("a", 0.0, (1,), 1, takes_answer=True),))
