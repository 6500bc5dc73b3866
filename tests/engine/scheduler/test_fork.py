"""Children of a prompt: what they share, what they copy, and that they end like any other request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.requests import Request, RequestStatus

Drive = Callable[..., Any]
Make = Callable[..., Request]


def family(make_request: Make, length: int, new: int, children: int, **options: Any) -> list[Request]:
    parent = make_request([i % 5 for i in range(length)], new, **options)
    parent.bear(children)
    return [parent, *parent.children]


@pytest.mark.parametrize(
    ("length", "shared", "copied"), [(1, 0, False), (4, 0, True), (5, 1, False), (6, 1, True), (8, 1, True)]
)
def test_whole_pages_are_shared_and_the_last_one_is_copied(
    length: int, shared: int, copied: bool, driver: Drive, make_request: Make
) -> None:
    """Pages of 4; the last prompt token is each child's own to compute. It needs no copy if it begins a page."""
    d = driver(num_blocks=30)
    parent, *children = family(make_request, length, 6, 3)
    d.add(parent)
    plan = d.step()
    assert plan.num_forked == 3
    assert [c.request_id for c in plan.admitted] == [parent.request_id, *(c.request_id for c in children)]
    assert len(plan.copies) == (3 if copied else 0)
    table = parent.tables[0]
    for child in children:
        assert child.tables[0][:shared] == table[:shared]
        assert len(child.tables[0]) == shared + copied
        assert not set(child.tables[0][shared:]) & set(table)
        assert child.cached_tokens == child.num_computed == length - 1
        assert child.parent is None
    assert [source for source, _ in plan.copies] == [table[shared]] * len(plan.copies)
    d.run()
    assert {r.status for r in (parent, *children)} == {RequestStatus.FINISHED}
    assert len({tuple(r.tokens) for r in (parent, *children)}) == 1
    assert d.cache.pool.num_available == 30


def test_a_chunked_prompt_is_forked_when_it_is_complete(driver: Drive, make_request: Make) -> None:
    d = driver(max_batch_tokens=7, num_blocks=40)
    members = family(make_request, 20, 3, 2)
    d.add(members[0])
    assert [d.step().num_forked for _ in range(3)] == [0, 0, 2]
    assert all(p.num_waiting == 2 for p in d.plans[:2])
    assert d.plans[2].num_waiting == 0
    d.run()
    assert sum(sum(c.values()) for c in d.counts) == 20 + 2 + 3 * 2, "the prompt is computed once"


def test_a_parent_that_ends_at_once_has_forked(driver: Drive, make_request: Make) -> None:
    d = driver(num_blocks=20, share=False)
    members = family(make_request, 10, 1, 2)
    d.add(members[0])
    d.run()
    assert sum(p.num_forked for p in d.plans) == 2
    assert [r.num_generated for r in members] == [1, 1, 1]
    assert sum(sum(c.values()) for c in d.counts) == 12


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_requests": 1}, "slots"),
        ({"num_blocks": 4, "max_requests": 4}, "blocks"),
        ({"num_blocks": 8, "safety_margin": 0.9}, "margin"),
    ],
)
def test_children_without_room_are_ordinary_requests(
    options: dict[str, Any], why: str, driver: Drive, make_request: Make
) -> None:
    d = driver(**options)
    members = family(make_request, 14, 3, 2)
    later = make_request([1, 2, 3], 3)
    d.add(members[0])
    d.add(later)
    d.run()
    assert sum(p.num_forked for p in d.plans) == 0, why
    assert {r.status for r in (*members, later)} == {RequestStatus.FINISHED}
    order = [r.request_id for p in d.plans for r in p.admitted if r is not later]
    assert order == [r.request_id for r in members]
    assert sum(p.prefix_hit_tokens for p in d.plans) >= 2 * 12, "the prefix cache stands in"


def test_a_child_does_not_depend_on_its_parents_end(driver: Drive, make_request: Make) -> None:
    """The parent is cancelled before its prompt is complete; a waiting child can be cancelled too."""
    d = driver(max_batch_tokens=6, num_blocks=30)
    parent, first, second, third = family(make_request, 15, 4, 3)
    d.add(parent)
    d.step()
    d.cancel(second)
    assert parent.children == [first, third]
    d.cancel(parent)
    assert list(d.scheduler.waiting) == [first.request_id, third.request_id]
    d.run()
    assert [r.status.name for r in (parent, first, second, third)] == [
        "CANCELLED", "FINISHED", "CANCELLED", "FINISHED"
    ]  # fmt: skip
    assert d.cache.pool.num_available == 30


FAMILIES = st.lists(
    st.tuples(
        st.integers(0, 8),  # arrival
        st.integers(1, 24),  # prompt
        st.integers(1, 8),  # new tokens
        st.integers(0, 4),  # children
        st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 9), st.integers(0, 4))),  # cancel: when, which
    ),
    min_size=1,
    max_size=5,
)
SETTINGS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["fifo", "prefill_first"]),
        "windows": st.sampled_from([(None, None), (6, 6), (6, None, 6, None)]),
        "page_size": st.sampled_from([1, 4, 5, 16]),
        "num_blocks": st.integers(1, 50),
        "max_batch_tokens": st.integers(1, 30),
        "max_requests": st.integers(1, 6),
        "safety_margin": st.sampled_from([0.0, 0.15, 0.9]),
        "share": st.booleans(),
        "depth": st.sampled_from([0, 1]),
    }
)


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(options=SETTINGS, families=FAMILIES)
def test_families_come_to_an_end_with_the_right_keys(
    options: dict[str, Any], families: list[Any], driver: Drive, make_request: Make
) -> None:
    d = driver(**options)
    pending, everybody = [], []
    for arrival, length, new, children, cancel in sorted(families, key=lambda f: f[0]):
        members = family(make_request, length, new, children)
        if d.cache.layout.blocks_needed(members[0].max_tokens, options["max_batch_tokens"]) <= d.cache.pool.num_blocks:
            pending.append((arrival, members, cancel))
            everybody += members
    cancels = [(a + c[0], m[c[1]]) for a, m, c in pending if c is not None and c[1] < len(m)]
    for step in range(6000):
        while pending and pending[0][0] <= step:
            d.add(pending.pop(0)[1][0])
        for when, request in cancels:
            if when == step:
                d.cancel(request)
        if not pending and not d.scheduler.has_work:
            break
        d.step()
    d.run()
    cancelled = [request for _, request in cancels]
    for request in everybody:
        assert request.is_over
        assert request.num_generated == request.max_new_tokens or request in cancelled
        assert request.parent is None
        assert not request.children
    assert d.cache.pool.num_available == options["num_blocks"]
    assert d.scheduler._num_held == 0
    for plan, counts in zip(d.plans, d.counts, strict=True):
        assert sum(counts.values()) <= options["max_batch_tokens"]
        assert plan.num_running <= options["max_requests"]


@pytest.mark.parametrize("windows", [(None, None), (6, None, 6, None)])
def test_forked_children_are_preempted_and_come_back(
    windows: tuple[int | None, ...], driver: Drive, make_request: Make
) -> None:
    """What the property is about does occur with settings of its range."""
    d = driver(windows=windows, num_blocks=9 * (1 + (6 in windows)), max_batch_tokens=12)
    members = family(make_request, 9, 12, 3)
    d.add(members[0])
    d.run()
    assert sum(p.num_forked for p in d.plans) == 3
    assert sum(c.preemptions for c in members[1:]) > 0
    assert {r.num_generated for r in members} == {12}
