"""Preemption by offload: nothing is computed twice, and a request may end wherever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.requests import Request, RequestStatus

Driver = Callable[..., Any]
MakeRequest = Callable[..., Request]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fifo", "prefill_first"])
@pytest.mark.parametrize("windows", [(None, None), (6, 6), (6, None)])
def test_what_was_computed_is_never_computed_again(
    windows: Any, policy: str, depth: int, driver: Driver, make_request: MakeRequest
) -> None:
    """A-off-03. The driver checks each position's keys, so a lost or swapped page would show."""
    blocks = 9 if windows != (6, None) else 16
    d = driver(policy, windows, num_blocks=blocks, max_batch_tokens=9, depth=depth, num_host_blocks=200)
    requests = [make_request([i, i, 1, 2, 3], 16) for i in range(6)]
    for request in requests:
        d.add(request)
    d.run()
    assert len(d.finished) == 6
    assert sum(p.num_offloaded for p in d.plans) > 0
    assert sum(p.num_restored for p in d.plans) > 0
    assert sum(r.recomputed_tokens for r in requests) == 0
    computed = sum(sum(c.values()) for c in d.counts)
    assert computed == sum(r.max_tokens for r in requests)
    assert d.scheduler.host.num_free == 200


def test_a_host_too_small_for_all_keeps_some(driver: Driver, make_request: MakeRequest) -> None:
    d = driver(num_blocks=9, max_batch_tokens=12, num_host_blocks=3, share=False)
    requests = [make_request([i, i, 1, 2, 3], 20) for i in range(6)]
    for request in requests:
        d.add(request)
    d.run()
    assert 0 < sum(p.num_offloaded for p in d.plans) < d.scheduler.preemptions
    assert sum(r.recomputed_tokens for r in requests) > 0


def test_a_request_cancelled_on_the_host_frees_it(driver: Driver, make_request: MakeRequest) -> None:
    d = driver(num_blocks=6, max_batch_tokens=12, num_host_blocks=50)
    requests = [make_request([i, i, 1, 2, 3], 14) for i in range(3)]
    for request in requests:
        d.add(request)
    while d.scheduler.host.num_free == 50:
        d.step()
    (victim,) = [r for r in requests if d.scheduler.host.kept_tokens(r)]
    assert victim.status is RequestStatus.PENDING
    d.cancel(victim)
    assert d.scheduler.host.num_free == 50
    d.run()
    assert len(d.finished) == 2


def test_children_are_offloaded_like_others(driver: Driver, make_request: MakeRequest) -> None:
    d = driver(num_blocks=9, max_batch_tokens=12, num_host_blocks=200)
    parent = make_request([1, 2, 3, 4, 5, 6], 16)
    parent.bear(3)
    family = [parent, *parent.children]
    d.add(parent)
    d.run()
    assert len(d.finished) == 4
    assert sum(p.num_forked for p in d.plans) > 0
    assert sum(p.num_restored for p in d.plans) > 0
    assert sum(r.recomputed_tokens for r in family) == 0


def test_after_a_weight_update_the_host_keeps_nothing(driver: Driver, make_request: MakeRequest) -> None:
    d = driver(num_blocks=6, max_batch_tokens=12, num_host_blocks=50)
    requests = [make_request([i, i, 1, 2, 3], 14) for i in range(3)]
    for request in requests:
        d.add(request)
    while d.scheduler.host.num_free == 50:
        d.step()
    d.scheduler.forget_prefixes()
    d.scheduler.check()
    assert d.scheduler.host.num_free == 50
    d.run()
    assert len(d.finished) == 3
    assert sum(r.recomputed_tokens for r in requests) > 0
