"""Workloads of bursts: phases of equal requests with prompts of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workloads import ScheduledRequest, Workload, build_workload
from workloads.arrivals import Burst, Poisson
from workloads.config import BurstsWorkload
from workloads.describe import describe

CONFIG = BurstsWorkload(sizes=[1, 3], prompt_tokens=5, output_tokens=9, pause_s=0.5, measured_gaps=[2, 8])


def build(seed: int = 0, **changes: object) -> Workload:
    return build_workload(replace(CONFIG, **changes), Burst(), vocab_size=50, seed=seed)  # type: ignore[type-var]


def test_every_burst_is_a_phase_and_waits_for_the_one_before() -> None:
    workload = build()
    assert [r.phase for r in workload.requests] == [0, 1, 1, 1]
    assert [r.think_s for r in workload.requests] == [0.0, 0.5, 0.5, 0.5]
    assert {(len(r.prompt_ids), r.max_new_tokens, r.due_s) for r in workload.requests} == {(5, 9, 0.0)}
    assert len({r.prompt_ids for r in workload.requests}) == 4
    assert (workload.phases, workload.waits, workload.measured_gaps) == ((0, 1), True, (2, 8))
    assert describe(workload).waiting_requests == 3


def test_the_seed_and_the_phases_are_part_of_the_hash() -> None:
    hashes = {w.content_hash for w in (build(), build(seed=1), build(sizes=[2, 2]))}
    assert len(hashes) == 3
    assert build().content_hash == build().content_hash
    assert not build(sizes=[4]).waits  # one phase waits for nothing


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sizes": []}, "workload.sizes"),
        ({"sizes": [2, 0]}, "workload.sizes"),
        ({"output_tokens": 0}, "workload.output_tokens"),
        ({"pause_s": -1.0}, "workload.pause_s"),
        ({"measured_gaps": [2, 9]}, "workload.measured_gaps"),
        ({"measured_gaps": [5, 4]}, "workload.measured_gaps"),
    ],
)
def test_settings_that_mean_nothing(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(**changes)


def test_other_arrivals_and_mixed_waits_are_refused() -> None:
    with pytest.raises(ValueError, match="arrival=burst"):
        build_workload(CONFIG, Poisson(rate=1.0), vocab_size=50, seed=0)
    first, second = ScheduledRequest("a", 0.0, (1,), 1, phase=0), ScheduledRequest("b", 0.0, (1,), 1)
    with pytest.raises(ValueError, match="all its requests in them"):
        Workload("w", (first, second))
