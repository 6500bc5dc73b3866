"""Token budget, phases, margin, preemption, order: one rule at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.requests import Request, RequestStatus

Make = Callable[..., Request]
Drive = Callable[..., Any]


def test_a_prompt_beyond_the_budget_is_computed_in_chunks(driver: Drive, make_request: Make) -> None:
    """A-mbt-03: 40 tokens, 16 a step: 16, 16, 8, then one token a step."""
    d = driver(max_batch_tokens=16)
    d.add(make_request(range(40), 4, request_id="a"))
    d.run()
    assert [c["a"] for c in d.counts] == [16, 16, 8, 1, 1, 1]
    assert [p.rows[0].samples for p in d.plans] == [False, False, True, True, True, True]


def test_decode_rows_come_first_under_fifo(driver: Drive, make_request: Make) -> None:
    d = driver("fifo", max_batch_tokens=8, num_blocks=32)
    d.add(make_request(range(4), 6, request_id="a"))
    d.step()
    d.add(make_request(range(50, 70), 2, request_id="b"))
    d.run()
    assert d.counts[:4] == [{"a": 4}, {"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6}]


def test_prefill_first_lets_prompts_take_the_budget(driver: Drive, make_request: Make) -> None:
    d = driver("prefill_first", max_batch_tokens=8, num_blocks=32)
    d.add(make_request(range(4), 6, request_id="a"))
    d.step()
    d.add(make_request(range(50, 70), 2, request_id="b"))
    d.run()
    assert d.counts[:4] == [{"a": 4}, {"b": 8}, {"b": 8}, {"b": 4, "a": 1}]


def test_a_finished_request_makes_room_at_the_next_step(driver: Drive, make_request: Make) -> None:
    """A-over-02: two may run; the third starts one step after the first to finish."""
    d = driver(max_requests=2, num_blocks=32)
    for name, n in (("a", 2), ("b", 6), ("c", 2)):
        d.add(make_request(range(4), n, request_id=name))
    d.run()
    assert [sorted(c) for c in d.counts[:4]] == [["a", "b"], ["a", "b"], ["b", "c"], ["b", "c"]]
    assert d.plans[2].num_available_blocks >= d.plans[1].num_available_blocks - 1


@pytest.mark.parametrize("policy", ["fifo", "prefill_first"])
@pytest.mark.parametrize(("held", "free", "admits"), [(86, 0.14, False), (84, 0.16, True), (85, 0.15, True)])
def test_the_margin_stops_prefills_below_it(
    policy: str, held: int, free: float, admits: bool, driver: Drive, make_request: Make
) -> None:
    """A-margin-01: 100 blocks, margin 0.15: at 14 % free nothing is admitted while something decodes, at 16 % it is."""
    d = driver(policy, num_blocks=100, max_batch_tokens=400, safety_margin=0.15, share=False)
    d.add(make_request(range(4 * held - 2), 4, request_id="old"))  # its decode steps stay on the last page
    d.step()
    assert d.cache.free_fraction == pytest.approx(free)
    d.add(make_request(range(4), 2, request_id="new"))
    plan = d.step()
    assert ("new" in d.counts[-1]) is admits
    assert plan.admission_held is not admits
    assert d.counts[-1]["old"] == 1, "those that decode go on"
    d.run()
    assert sorted(d.finished) == ["new", "old"]


def test_the_margin_also_holds_a_half_done_prefill(driver: Drive, make_request: Make) -> None:
    d = driver(num_blocks=20, max_batch_tokens=16, safety_margin=0.5, share=False)
    d.add(make_request(range(4), 30, request_id="a"))
    d.step()
    d.add(make_request(range(48), 2, request_id="b"))
    d.step()
    assert d.counts[-1] == {"a": 1, "b": 15}
    while "b" in d.counts[-1]:
        d.step()
    assert d.plans[-1].admission_held
    d.run()
    assert d.finished == ["a", "b"]


@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_the_ends_of_the_margin(margin: float, driver: Drive, make_request: Make) -> None:
    """A-margin-02: 0 never holds; 1 lets requests run one after another, but run."""
    d = driver(num_blocks=32, max_batch_tokens=4, safety_margin=margin)
    for i in range(3):
        d.add(make_request([i] * 4, 3, request_id=f"r{i}"))
    d.run()
    held = [p.admission_held for p in d.plans]
    assert any(held) is (margin == 1.0)
    assert (max(len(c) for c in d.counts) == 1) is (margin == 1.0)
    assert d.finished == ["r0", "r1", "r2"]


def test_the_youngest_gives_way_and_returns_to_the_head_of_the_queue(driver: Drive, make_request: Make) -> None:
    d = driver(num_blocks=6, max_batch_tokens=16, share=False)
    requests = [make_request([i] * 7, 8, request_id=f"r{i}") for i in range(4)]
    for request in requests:
        d.add(request)
    while not d.scheduler.preemptions:
        d.step()
    victim = next(r for r in requests if r.preemptions)
    assert victim is max((r for r in requests if r.preemptions or r.slot >= 0), key=requests.index)
    assert next(iter(d.scheduler.waiting)) == victim.request_id
    assert (victim.tables, victim.slot, victim.num_computed) == ((), -1, 0)
    assert victim.status is RequestStatus.PENDING
    d.run()
    assert d.finished == ["r0", "r1", "r2", "r3"]
    assert all(r.num_generated == 8 for r in requests)
    assert victim.recomputed_tokens > 0


def test_what_the_prefix_cache_kept_is_not_computed_again_after_a_preemption(driver: Drive, make_request: Make) -> None:
    recomputed = {}
    for share in (True, False):
        d = driver(num_blocks=8, share=share)
        requests = [make_request([i] * 8, 12, request_id=f"r{i}") for i in range(3)]
        for request in requests:
            d.add(request)
        d.run()
        assert d.scheduler.preemptions > 0
        recomputed[share] = sum(r.recomputed_tokens for r in requests)
    assert recomputed[True] < recomputed[False]


def test_nothing_is_admitted_in_a_step_that_preempts(driver: Drive, make_request: Make) -> None:
    d = driver(num_blocks=6, share=False)
    for i in range(5):
        d.add(make_request([i] * 7, 8))
    d.run()
    preempting = [p for p in d.plans if p.num_preempted]
    assert preempting
    assert not any(p.admitted for p in preempting)


def test_all_of_a_prompt_must_find_room_before_it_starts(driver: Drive, make_request: Make) -> None:
    d = driver(num_blocks=8, max_batch_tokens=8, share=False)
    d.add(make_request(range(12), 4, request_id="a"))
    d.add(make_request(range(20, 44), 2, request_id="b"))  # 6 pages; 5 are left beside "a"
    d.run()
    assert not any("a" in c and "b" in c for c in d.counts)
    assert d.scheduler.preemptions == 0


def test_prefix_hits_are_counted_once_however_long_a_request_waits_for_room(driver: Drive, make_request: Make) -> None:
    d = driver(num_blocks=10, max_batch_tokens=64)
    d.add(make_request(range(16), 1, request_id="warm"))
    d.run()
    d.add(make_request(range(50, 66), 12, request_id="a"))
    d.step()
    late = make_request([*range(16), *range(70, 82)], 2, request_id="late")
    d.add(late)
    d.run()
    waited = sum(1 for p in d.plans if p.num_waiting)
    assert waited > 3, "the test is about waiting"
    assert d.scheduler.preemptions == 0
    assert sum(p.prefix_hit_tokens for p in d.plans) == late.cached_tokens
    assert sum(p.prefix_query_tokens for p in d.plans) == 16 + 16 + 28


def test_a_cancelled_request_gives_its_blocks_and_its_slot_back(driver: Drive, make_request: Make) -> None:
    d = driver(num_blocks=8, max_requests=1, share=False)
    a, b = make_request(range(9), 9), make_request(range(9), 2)
    d.add(a)
    d.add(b)
    d.step()
    assert d.cache.pool.num_available == 5
    d.cancel(a)
    assert d.cache.pool.num_available == 8
    d.run()
    assert d.finished == [b.request_id]


def test_a_row_in_flight_is_not_scheduled_past_its_last_token(driver: Drive, make_request: Make) -> None:
    d = driver(depth=1)
    a = make_request(range(4), 3)
    d.add(a)
    d.run()
    assert [c[a.request_id] for c in d.counts] == [4, 1, 1]
    assert a.num_generated == 3


def test_check_finds_a_shared_slot(driver: Drive, make_request: Make) -> None:
    d = driver()
    a, b = make_request(range(4)), make_request(range(4))
    d.add(a)
    d.add(b)
    d.step()
    b.slot = a.slot
    with pytest.raises(RuntimeError, match="slots"):
        d.scheduler.check()
