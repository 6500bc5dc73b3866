"""A load on several replicas, behind each router."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.capacity.load import Load
from harness.capacity.progress import Tell, tell_nothing
from harness.metrics import run_values
from harness.metrics.steady import SteadyState
from harness.simulate import ROUTERS, EngineSetup, StepTimeModel, shares_pages, simulate_fleet
from harness.slo import Slo
from workloads.workload import Workload

_COLUMNS = (
    "steady_state",
    "steady_reason",
    "steady_request_s",
    "steady_gen_tok_s",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "slo_met",
    "preemptions",
)


def simulated_routers(workload: Workload, setup: EngineSetup) -> tuple[str, ...]:
    """The routers that differ for this workload: where no prompt begins as another does, the prefix-aware one finds
    nothing and chooses as the least loaded one."""
    shares = shares_pages(workload, setup.layout.page_size)
    return tuple(router for router in ROUTERS if shares or router != "prefix_aware")


def fleet_table(
    workload: Workload,
    setup: EngineSetup,
    model: StepTimeModel,
    replicas: int,
    slo: Slo | None,
    tell: Tell = tell_nothing,
) -> pd.DataFrame:
    """One row a router: what clients saw of ``replicas`` engines. Throughput is that of the steady window: the whole
    run's would count the time in which its last requests drain."""
    rows: dict[str, dict[str, Any]] = {}
    routers = simulated_routers(workload, setup) if replicas > 1 else ROUTERS[:1]  # one engine leaves nothing to choose
    for i, router in enumerate(routers):
        count = len(workload)
        what = f"{count} requests on {replicas} GPUs behind router {router} ({i + 1} of {len(routers)})"
        tell(what, count, count * (len(routers) - i - 1))
        rows[router] = _row(workload, setup, model, replicas, router, slo)
    alike = rows[routers[-1]]  # what was not simulated chooses as the last one that was
    return pd.DataFrame([{"router": r, "replicas": replicas, **rows.get(r, alike)} for r in ROUTERS])


def _row(
    workload: Workload, setup: EngineSetup, model: StepTimeModel, replicas: int, router: str, slo: Slo | None
) -> dict[str, Any]:
    record = simulate_fleet(workload, setup, model, replicas, router, seed=0, slo=slo)
    values = run_values(record)
    asked, hit = record.counters["prefix_query_tokens"], record.counters["prefix_hit_tokens"]
    sent = None
    if values["steady_n"] is not None:
        sent = values["steady_n"] / (values["steady_end_s"] - values["steady_start_s"])
    share = None if not asked else float(hit or 0) / float(asked)
    return {"steady_sent_s": sent, **{c: values[c] for c in _COLUMNS}, "prefix_hit_share": share}


def fleet_at(
    load: Load,
    rate: float,
    setup: EngineSetup,
    model: StepTimeModel,
    replicas: int,
    slo: Slo | None,
    *,
    requests: int,
    most: int,
    tell: Tell = tell_nothing,
) -> pd.DataFrame:
    """:func:`fleet_table` of a load at ``rate``, with so many requests that its steady part shows.

    Args:
        requests: to begin with; where no router's run has a steady part, all are served again with ``most``.
    """
    trial = load.trial(min(requests, most), 0)
    table = fleet_table(trial.at(rate), setup, model, replicas, slo, tell)
    if (table["steady_state"] == SteadyState.STEADY).any() or requests >= most:
        return table
    longer = load.trial(most, 0)
    if len(longer.requests) <= len(trial.requests):
        return table
    return fleet_table(longer.at(rate), setup, model, replicas, slo, tell)
