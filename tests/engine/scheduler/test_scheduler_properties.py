"""Whatever arrives, whatever is cancelled: budgets hold, keys are right, and everybody comes to an end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.requests import Request, RequestStatus


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    cancel_after: int | None


PROMPTS = st.one_of(
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    # Families with a common beginning, so that pages are shared, evicted and found again.
    st.builds(lambda family, n, tail: [family] * n + tail, st.integers(5, 7), st.integers(4, 30), st.just([1, 2])),
)
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 12),
        PROMPTS.map(tuple),
        st.integers(1, 14),
        st.one_of(st.none(), st.none(), st.none(), st.integers(0, 10)),
    ),
    min_size=1,
    max_size=9,
)
SETTINGS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["fifo", "prefill_first"]),
        "windows": st.sampled_from([(None, None), (6, 6), (6, None, 6, None), (6, None, None, 9)]),
        "page_size": st.sampled_from([1, 4, 5, 16]),
        "num_blocks": st.integers(1, 40),
        "max_batch_tokens": st.integers(1, 30),
        "max_requests": st.integers(1, 5),
        "safety_margin": st.sampled_from([0.0, 0.15, 0.5, 1.0]),
        "share": st.booleans(),
        "depth": st.sampled_from([0, 1]),
        "num_host_blocks": st.sampled_from([0, 0, 3, 12, 200]),
    }
)


@settings(
    max_examples=600,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(options=SETTINGS, arrivals=ARRIVALS)
def test_every_request_that_fits_alone_finishes_within_all_budgets(
    options: dict[str, Any],
    arrivals: list[Arrival],
    driver: Callable[..., Any],
    make_request: Callable[..., Request],
) -> None:
    d = driver(**options)
    chunk = options["max_batch_tokens"]
    requests: dict[Request, Arrival] = {}
    for arrival in sorted(arrivals, key=lambda a: a.step):
        request = make_request(arrival.prompt, arrival.max_new_tokens)
        if d.cache.layout.blocks_needed(request.max_tokens, chunk) <= d.cache.pool.num_blocks:
            requests[request] = arrival
    pending = list(requests)
    for step in range(6000):
        while pending and requests[pending[0]].step <= step:
            d.add(pending.pop(0))
        for request, arrival in requests.items():
            if arrival.cancel_after is not None and step == arrival.step + arrival.cancel_after:
                d.cancel(request)
        if not pending and not d.scheduler.has_work:
            break
        d.step()
    d.run()

    assert all(r.is_over for r in requests), "somebody starved"
    for request, arrival in requests.items():
        if request.status is RequestStatus.FINISHED:
            assert request.num_generated == request.max_new_tokens
        else:
            assert arrival.cancel_after is not None
    for plan, counts in zip(d.plans, d.counts, strict=True):
        assert sum(counts.values()) <= chunk
        assert len(counts) <= options["max_requests"]
        assert len(counts) == len(plan.rows), "a request has one row a step"
        assert all(n >= 1 for n in counts.values())
        assert 0 <= plan.num_available_blocks <= options["num_blocks"]
    first = [r.request_id for p in d.plans for r in p.admitted]
    assert first == sorted(first, key=lambda name: int(name[1:])), "requests start in order of arrival"
    assert len(set(first)) == len(first)
    assert d.cache.pool.num_available == options["num_blocks"], "blocks leaked"
    assert d.scheduler.slots.num_free == options["max_requests"]
    assert d.scheduler.host.num_free == options["num_host_blocks"], "host blocks leaked"
    if options["num_host_blocks"] == 200:  # more than nine requests can fill
        assert all(r.recomputed_tokens == 0 for r in requests)
        assert sum(p.num_offloaded for p in d.plans) >= sum(p.num_restored for p in d.plans)
    assert sum(p.num_preempted for p in d.plans) <= d.scheduler.preemptions


def test_the_property_reaches_preemption_hits_and_the_margin(
    driver: Callable[..., Any], make_request: Callable[..., Request]
) -> None:
    """The paths that the property is about do occur with settings of its range."""
    d = driver(num_blocks=9, max_batch_tokens=12, max_requests=4, safety_margin=0.15)
    requests = [make_request([5] * 9 + [i], 14) for i in range(6)]
    for request in requests:
        d.add(request)
    d.run()
    assert d.scheduler.preemptions > 0
    assert sum(p.prefix_hit_tokens for p in d.plans) > 0
    assert any(p.admission_held for p in d.plans)
    assert d.cache.pool.evictions > 0
