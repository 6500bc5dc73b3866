"""Where a service stops keeping up: the knee of an open-loop sweep over arrival rates.

While a service keeps up, n requests take the time over which they are sent plus what the last one needs: throughput
follows the rate. Beyond its capacity a queue grows as long as requests come, throughput stays where it is and the time
to the first token grows with the length of the run, so it says nothing but that. The knee is the last rate that is
followed, before the first that is not.

"What the last one needs" is taken from the lowest rate (95th percentile of the time from due to last token), where
nobody waits for anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FOLLOWED = 0.9
"""Share of the throughput of a service that keeps up, from which a rate counts as followed."""

DIVERGED = 3.0
"""A TTFT p95 above this multiple of the lowest rate's has left its floor."""


@dataclass(frozen=True, slots=True)
class Load:
    """One arm of the ramp: medians over its runs.

    Attributes:
        offered: requests/s sent.
        served: requests/s answered over the whole run.
        requests: sent.
        sending_s: from the first due time to the last.
        ttft_p95_ms: from the due time.
        e2e_p95_ms: from submission to the last token.
        saturated: whether a run of it was found to have a growing queue.
        slo_met: None without an SLO.
    """

    offered: float
    served: float
    requests: int
    sending_s: float
    ttft_p95_ms: float
    e2e_p95_ms: float
    saturated: bool
    slo_met: bool | None


@dataclass(frozen=True, slots=True)
class JudgedLoad:
    """A load and how it was met.

    Attributes:
        expected: requests/s that a service which keeps up would have answered.
        followed: whether it did.
        diverged: whether the TTFT left its floor.
    """

    load: Load
    expected: float
    followed: bool
    diverged: bool


@dataclass(frozen=True, slots=True)
class Knee:
    """The result of a ramp; loads by rate.

    Attributes:
        last_followed: highest rate followed, with none below it that was not; None if not even the lowest.
        first_lost: the next rate, which was not followed; None if all were.
        capacity: largest throughput seen, requests/s.
        diverged_from: lowest rate whose TTFT left its floor; None if none did.
        within_slo: highest rate that keeps the SLO, with none below it that does not; None if not even the lowest, or
            without one.
    """

    loads: tuple[JudgedLoad, ...]
    last_followed: float | None
    first_lost: float | None
    capacity: float
    diverged_from: float | None
    within_slo: float | None


def find_knee(loads: Sequence[Load]) -> Knee:
    """Judge the loads of a ramp.

    Raises:
        ValueError: fewer than two different rates: there is no ramp.
    """
    ordered = sorted(loads, key=lambda load: load.offered)
    if len({load.offered for load in ordered}) < 2:
        raise ValueError(f"a knee needs at least two rates, got {len(ordered)}")
    floor = ordered[0]
    judged = tuple(_judge(load, floor) for load in ordered)
    lost = next((k for k, j in enumerate(judged) if not j.followed), len(judged))
    broken = next((k for k, j in enumerate(judged) if j.load.slo_met is not True), len(judged))
    return Knee(
        loads=judged,
        last_followed=judged[lost - 1].load.offered if lost else None,
        first_lost=judged[lost].load.offered if lost < len(judged) else None,
        capacity=max(load.served for load in ordered),
        diverged_from=next((j.load.offered for j in judged if j.diverged), None),
        within_slo=judged[broken - 1].load.offered if broken else None,
    )


def _judge(load: Load, floor: Load) -> JudgedLoad:
    expected = load.requests / (load.sending_s + floor.e2e_p95_ms / 1e3)
    followed = load.served >= FOLLOWED * expected and not load.saturated
    return JudgedLoad(load, expected, followed, load.ttft_p95_ms > DIVERGED * floor.ttft_p95_ms)
