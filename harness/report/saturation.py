"""The knee of a sweep over arrival rates, in words, as a table and as a picture's data."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.saturation import DIVERGED, FOLLOWED, Knee, Load, find_knee
from harness.report.arms import Arm, by_facet
from harness.report.page import section, text_table
from harness.report.quantity import number
from harness.report.slo import slo_met

VARIABLE = "arrival.rate"


def knees(arms: Sequence[Arm]) -> dict[str, Knee]:
    """By facet and engine, where the arms are a ramp of arrival rates with known rates and latencies."""
    found = {}
    for facet, members in by_facet(arms).items():
        ramp = [a for a in members if a.variable == VARIABLE and not a.is_replica]
        for engine in dict.fromkeys(a.engine for a in ramp):
            loads = [load for a in ramp if a.engine == engine and (load := _load(a))]
            if len({load.offered for load in loads}) > 1:
                found[" · ".join(part for part in (facet, engine) if part)] = find_knee(loads)
    return found


def _load(arm: Arm) -> Load | None:
    """None where the arm has no rate (a burst) or no answered request."""
    names = ("offered_request_s", "request_s", "ttft_sched_p95_ms", "e2e_p95_ms", "n_requests")
    spreads = [arm.spread(name) for name in names]
    known = [spread.median for spread in spreads if spread is not None]
    if len(known) < len(names) or not known[0] > 0:
        return None
    offered, served, ttft, e2e, requests = known
    saturated = bool((arm.measured["steady_state"] == "saturated").any())
    return Load(offered, served, int(requests), (requests - 1) / offered, ttft, e2e, saturated, slo_met(arm))


def knee_sentences(arms: Sequence[Arm]) -> list[str]:
    """The answer to "how many requests a second?", a line a ramp."""
    found = knees(arms)
    return [in_words(knee, name if len(found) > 1 else "") for name, knee in found.items()]


def in_words(knee: Knee, name: str = "") -> str:
    """The knee, the TTFT on both sides of it, and what keeps the SLO."""
    rates = {j.load.offered: j.load for j in knee.loads}
    low, high = min(rates), max(rates)
    where = f"{name}: " if name else ""
    if knee.last_followed is None:
        text = (
            f"{where}not even {number(low)} requests/s are followed ({number(knee.capacity)} were answered): the knee "
            "lies below the rates tried"
        )
    elif knee.first_lost is None:
        text = (
            f"{where}throughput follows the load up to {number(high)} requests/s, the highest tried: the knee lies "
            "above it"
        )
    else:
        before, after = rates[knee.last_followed], rates[knee.first_lost]
        text = (
            f"{where}throughput follows the load up to {number(before.offered)} requests/s; offered "
            f"{number(after.offered)}, {number(after.served)} are answered and TTFT p95 goes from "
            f"{number(before.ttft_p95_ms)} to {number(after.ttft_p95_ms)} ms: the knee lies between the two, capacity "
            f"is about {number(knee.capacity)} requests/s"
        )
    if knee.diverged_from is not None and (knee.first_lost is None or knee.diverged_from < knee.first_lost):
        text += f"; TTFT p95 leaves its floor earlier, at {number(knee.diverged_from)} requests/s"
    if any(load.slo_met is not None for load in rates.values()):
        kept = "at no rate tried" if knee.within_slo is None else f"up to {number(knee.within_slo)} requests/s"
        text += f". The SLO is kept {kept}"
    return text[0].upper() + text[1:] + "." if not name else text + "."


def saturation_section(arms: Sequence[Arm]) -> str:
    """One row a rate; "" if no ramp of rates was measured."""
    rows = []
    found = knees(arms)
    for name, knee in found.items():
        for j in knee.loads:
            load = j.load
            met = {None: "–", True: "kept", False: "BROKEN"}[load.slo_met]
            state = "queue grew" if load.saturated else "followed" if j.followed else "not followed"
            cells = [number(load.offered), number(load.served), number(j.expected), state]
            cells += [number(load.ttft_p95_ms) + (" ▲" if j.diverged else ""), number(load.e2e_p95_ms), met]
            rows.append([*([name] if len(found) > 1 else []), *cells])
    if not rows:
        return ""
    header = ["offered [requests/s]", "answered", "if it kept up", "load", "TTFT p95 [ms]", "e2e p95 [ms]", "SLO"]
    return section(
        "Saturation",
        f"<p>A rate is followed if at least {FOLLOWED:.0%} of the throughput of a service that keeps up is answered "
        "and no queue grew to the end of the run. ▲: TTFT p95 (from the due time) above "
        f"{DIVERGED:g} times the lowest rate's. Beyond the knee latencies grow with the length of the run.</p>",
        text_table([*(["what"] if len(found) > 1 else []), *header], rows),
    )
