"""Several replicas behind a router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from harness.record import RunRecord
from harness.simulate.clients import serve
from harness.simulate.replica import Replica
from harness.simulate.setup import EngineSetup
from harness.simulate.simulation import recorded
from harness.simulate.step_time import StepTimeModel
from harness.slo import Slo
from workloads.workload import ScheduledRequest, Workload


class Router(Protocol):
    """Chooses the replica of each request when it comes."""

    def choose(self, wanted: ScheduledRequest, replicas: Sequence[Replica]) -> int: ...


class RoundRobin:
    """One after the other, whatever they have to do."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, wanted: ScheduledRequest, replicas: Sequence[Replica]) -> int:
        chosen = self._next % len(replicas)
        self._next += 1
        return chosen


class LeastLoaded:
    """The replica with the fewest requests that have not ended; the first of several."""

    def choose(self, wanted: ScheduledRequest, replicas: Sequence[Replica]) -> int:
        return min(range(len(replicas)), key=lambda i: replicas[i].outstanding)


class PrefixAware:
    """The replica that was sent the longest beginning of the prompt before, unless it has far more to do than the
    least loaded one, which is the choice without such a beginning.

    What a replica was sent is known by the pages of its prompts, as a router would know it: it does not see what the
    replica has evicted since.

    Args:
        page_size: tokens a page of the replicas' caches holds.
        imbalance: requests more than the least loaded replica that a hit is worth.
    """

    def __init__(self, page_size: int, imbalance: int = 16) -> None:
        self._page = page_size
        self._imbalance = imbalance
        self._sent: dict[int, set[int]] = {}  # by page (its content and all before it), replicas that were sent it

    def choose(self, wanted: ScheduledRequest, replicas: Sequence[Replica]) -> int:
        loads = [replica.outstanding for replica in replicas]
        least = min(range(len(replicas)), key=loads.__getitem__)
        pages = _pages(wanted.prompt_ids, self._page)
        able = {i for i, load in enumerate(loads) if load <= loads[least] + self._imbalance}
        chosen = least
        for page in pages:
            able &= self._sent.get(page, set())
            if not able:
                break
            chosen = min(able, key=loads.__getitem__)
        for page in pages:
            self._sent.setdefault(page, set()).add(chosen)
        return chosen


def _pages(ids: Sequence[int], size: int) -> list[int]:
    """The whole pages of a prompt, each with everything before it, as hashes."""
    pages, before = [], 0
    for start in range(0, len(ids) - size, size):
        before = hash((before, tuple(ids[start : start + size])))
        pages.append(before)
    return pages


def shares_pages(workload: Workload, page_size: int) -> bool:
    """Whether any prompt begins with a whole page of another's; True too where prompts take in answers, which are not
    known before."""
    seen = set[int]()
    for request in workload.requests:
        first = _pages(request.prompt_ids[: page_size + 1], page_size)
        if request.takes_answer or not seen.isdisjoint(first):
            return True
        seen.update(first)
    return False


ROUTERS = ("round_robin", "least_loaded", "prefix_aware")


def make_router(name: str, page_size: int) -> Router:
    """The router called ``name``; ValueError naming those there are."""
    if name not in ROUTERS:
        raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {name!r}")
    if name == "round_robin":
        return RoundRobin()
    return LeastLoaded() if name == "least_loaded" else PrefixAware(page_size)


def simulate_fleet(
    workload: Workload,
    setup: EngineSetup,
    model: StepTimeModel,
    replicas: int,
    router: str,
    seed: int | None = None,
    *,
    slo: Slo | None = None,
    identity: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Serve a workload on ``replicas`` equal engines; every router gets the same requests and seeds.

    The step log of the result is the first replica's; requests, tokens and counters are of all.

    Raises:
        ValueError: no such router, or no replica.
    """
    if replicas < 1:
        raise ValueError(f"a fleet has at least 1 replica, got {replicas}")
    chooser = make_router(router, setup.layout.page_size)
    rngs = [None if seed is None else np.random.default_rng([seed, i]) for i in range(replicas)]
    fleet = [Replica(setup, model, rng) for rng in rngs]
    sent = serve(workload, fleet, chooser.choose, {}, model.send_ms / 1000)
    return recorded(workload, fleet, sent, model, slo=slo, identity=identity)
