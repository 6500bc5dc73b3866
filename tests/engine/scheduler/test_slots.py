"""The arrays by slot: they are the requests' counters while those run, and disagreement is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.requests import FinishReason, Request, RequestStatus
from engine.sampling import SamplingParams
from engine.scheduler import Collected, StepRows
from engine.scheduler.slots import EOS_WIDTH

Make = Callable[..., Request]
Drive = Callable[..., Any]


def test_counters_move_into_the_slot_and_back(driver: Drive, make_request: Make) -> None:
    d = driver(depth=1)
    request = make_request(range(6), 5)
    d.add(request)
    d.step()
    slots = d.scheduler.slots
    assert request.slots is slots
    assert (slots.num_computed[request.slot], slots.num_in_flight[request.slot]) == (6, 1)
    assert (request.num_computed, request.num_in_flight) == (6, 1)
    d.cancel(request)
    assert (request.slots, request.slot) == (None, -1)
    assert (request.num_computed, request.num_in_flight) == (6, 1), "its token is still on the way"
    d.run()
    assert request.num_in_flight == 0
    assert request.num_generated == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_token_for_a_slot_with_a_new_owner_goes_to_nobody(depth: int, driver: Drive, make_request: Make) -> None:
    """One slot: the first request ends with a token on its way, the second takes the slot before that comes."""
    d = driver(depth=depth, max_requests=1)
    first, second = make_request(range(6), 9), make_request([4, 4, 4], 3)
    d.add(first)
    d.add(second)
    d.step()
    d.step()
    slot = first.slot
    d.cancel(first)
    generated = first.num_generated
    d.step()
    assert second.slot == slot
    d.run()
    assert first.num_generated == generated
    assert second.num_generated == 3


def test_only_rows_with_a_page_to_begin_reach_the_cache(
    driver: Drive, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = driver(page_size=8, num_blocks=40, max_batch_tokens=64)
    requests = [make_request([i] * 5, 24) for i in range(4)]
    for request in requests:
        d.add(request)
    d.step()
    d.step()
    asked = []
    extend = d.cache.extend
    monkeypatch.setattr(d.cache, "extend", lambda request, end: asked.append(end) or extend(request, end))
    d.run()
    assert sorted(set(asked)) == [9, 17, 25], "positions 8, 16 and 24 begin pages"
    assert len(asked) == 3 * 4


@pytest.mark.parametrize("extra", [0, EOS_WIDTH])
def test_each_stop_rule_ends_its_own_request(extra: int, driver: Drive, make_request: Make) -> None:
    """Beside a request that goes on: an EOS id (of few, of many), a stop sequence, the length."""
    d = driver(num_blocks=60, max_batch_tokens=64)
    go_on, eos, stop, length = (make_request([2, 3, i], 12) for i in range(4))
    for request in (go_on, eos, stop, length):
        d.add(request)  # the driver's model is known beforehand
    want = {r: d._sequences[r.request_id][3:] for r in (go_on, eos, stop, length)}
    cut = next(i for i in range(1, 12) if want[eos][i] not in want[eos][:i])
    eos.eos_token_ids = frozenset({want[eos][cut], *range(100, 100 + extra)})
    stop.sampling = SamplingParams(stop_sequences=(tuple(want[stop][2:4]),))
    length.max_new_tokens = 3
    d.run()
    assert eos.tokens[3:] == want[eos][: cut + 1]
    assert stop.tokens[-2:] == want[stop][2:4]
    assert stop.num_generated <= 4
    assert length.tokens[3:] == want[length][:3]
    assert go_on.tokens[3:] == want[go_on]
    reasons = [r.finish_reason for r in (eos, stop, length, go_on)]
    assert reasons == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH]


def test_streams_and_ends_are_heard_of_others_not(driver: Drive, make_request: Make) -> None:
    d = driver()
    streamed, silent = make_request([1, 2], 3, streaming=True), make_request([3, 4], 2)
    d.add(streamed)
    d.add(silent)
    d.run()
    a, b = streamed.request_id, silent.request_id
    assert d.heard == [(a, 1), (a, 2), (b, 2), (a, 3)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_request_takes_the_token_that_was_on_its_way(
    depth: int, driver: Drive, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = driver(num_blocks=6, max_batch_tokens=16, depth=depth, share=False)
    requests = [make_request([i] * 7, 8, streaming=True, record_timestamps=True) for i in range(4)]
    late: list[Request] = []
    collect = d.scheduler.collect

    def watched(rows: StepRows, *arguments: Any, **options: Any) -> Collected:
        late.extend(r for r in rows.requests if r.status is RequestStatus.PENDING)
        return collect(rows, *arguments, **options)

    monkeypatch.setattr(d.scheduler, "collect", watched)
    for request in requests:
        d.add(request)
    d.run()
    assert d.scheduler.preemptions > 0
    assert bool(late) is (depth == 1), "it happened"
    assert all(len(r.timestamps or ()) == r.num_generated == 8 for r in requests)
    for request in requests:
        heard = [count for name, count in d.heard if name == request.request_id]
        assert heard == list(range(1, 9)), "each token is told once, in order"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("num_known", "num_known"),
        ("newest", "newest"),
        ("limit", "limit"),
        ("pages", "pages"),
        ("eos", "eos"),
        ("settled_until", "outgrow"),
        ("register_at", "misses"),
    ],
)
def test_check_finds_an_array_that_disagrees(name: str, match: str, driver: Drive, make_request: Make) -> None:
    d = driver()
    request = make_request(range(6), 5)
    d.add(request)
    d.step()
    d.scheduler.check()
    getattr(d.scheduler.slots, name)[request.slot] += np.int64(100)
    with pytest.raises(RuntimeError, match=match):
        d.scheduler.check()
