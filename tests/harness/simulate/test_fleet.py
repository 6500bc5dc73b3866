"""Routers by hand, and a fleet that shares the work."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from harness.simulate import ROUTERS, simulate, simulate_fleet
from harness.simulate.fleet import LeastLoaded, PrefixAware, RoundRobin, make_router
from workloads.workload import ScheduledRequest, Workload


def replicas(*loads: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(outstanding=load) for load in loads]


def request(*ids: int) -> ScheduledRequest:
    return ScheduledRequest("r", 0.0, ids, 4)


def test_round_robin_and_least_loaded() -> None:
    router, fleet = RoundRobin(), replicas(9, 0, 0)
    assert [router.choose(request(1), fleet) for _ in range(4)] == [0, 1, 2, 0]
    assert LeastLoaded().choose(request(1), replicas(3, 1, 1)) == 1


def test_the_longest_known_beginning_wins_unless_it_waits_too_long() -> None:
    router = PrefixAware(page_size=2, imbalance=3)
    assert router.choose(request(1, 2, 3, 4, 5), replicas(0, 0)) == 0
    assert router.choose(request(7, 7, 7), replicas(1, 0)) == 1
    assert router.choose(request(1, 2, 3, 4, 9), replicas(3, 0)) == 0  # two pages known there
    assert router.choose(request(1, 2, 8, 8, 9), replicas(3, 0)) == 0  # one page
    assert router.choose(request(1, 2, 3, 4, 9), replicas(4, 0)) == 1  # four more than the least loaded
    assert router.choose(request(2, 2, 2), replicas(1, 0)) == 1  # nothing known


def groups(n: int) -> Workload:
    """Requests of six groups in a mixed order, each group with 40 tokens in common."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, 6, size=n)
    requests = (ScheduledRequest(f"r{i}", i / 400, (*[int(g) + 1] * 40, 100 + i, 1), 6) for i, g in enumerate(chosen))
    return Workload("groups", tuple(requests))


def test_one_replica_is_a_plain_simulation(by_hand: SimpleNamespace) -> None:
    workload = groups(20)
    alone = simulate(workload, by_hand.setup(), by_hand.model())
    for router in ROUTERS:
        fleet = simulate_fleet(workload, by_hand.setup(), by_hand.model(), 1, router)
        assert [list(r.chunks) for r in fleet.requests] == [list(r.chunks) for r in alone.requests]


def test_more_replicas_are_faster_and_prefixes_are_found_again(by_hand: SimpleNamespace) -> None:
    setup = by_hand.setup(num_blocks=40)
    runs = {router: simulate_fleet(groups(120), setup, by_hand.model(), 3, router) for router in ROUTERS}
    alone = simulate(groups(120), setup, by_hand.model())
    assert runs["round_robin"].t_end_ns < 0.7 * alone.t_end_ns
    hits = {router: run.counters["prefix_hit_tokens"] for router, run in runs.items()}
    assert hits["prefix_aware"] > 1.1 * hits["round_robin"] > 0
    assert all(r.outcome.ok for run in runs.values() for r in run.requests)


def test_what_a_fleet_refuses(by_hand: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="round_robin, least_loaded, prefix_aware"):
        make_router("random", 4)
    with pytest.raises(ValueError, match="at least 1"):
        simulate_fleet(groups(2), by_hand.setup(), by_hand.model(), 0, "round_robin")


def test_a_closed_loop_before_a_fleet(by_hand: SimpleNamespace) -> None:
    """Two places, two replicas: each request has a replica to itself, so all take the same 6.5 ms."""
    workload = by_hand.workload(*[(0.0, 4, 2)] * 6, concurrency=2)
    record = simulate_fleet(workload, by_hand.setup(), by_hand.model(), 2, "least_loaded")
    spans = [(r.t_done_ns or 0) - (r.t_submit_ns or 0) for r in record.requests]
    assert max(spans) - min(spans) <= 1_000_000  # half a ms between turns, at the most one more
    assert record.requests[-1].t_submit_ns == pytest.approx(2 * 6_500_000, abs=1_500_000)
