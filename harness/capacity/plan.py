"""The whole plan: how much one GPU carries under an SLO, what limits it, and how many are needed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd

from harness.capacity.binding import Binding, LittlesLaw, binding_constraint, littles_law
from harness.capacity.load import Load
from harness.capacity.memory import KvCapacity, kv_capacity, typical_lengths
from harness.capacity.progress import Say, say_nothing
from harness.capacity.recommend import Setting, improve, recommended
from harness.capacity.search import MOST, Capacity, NothingMeets, find_capacity, run_at
from harness.metrics import run_values
from harness.report.read import Results
from harness.simulate import (
    ROUTERS,
    EngineSetup,
    StepTimeModel,
    Validation,
    fit_steps,
    read_setup,
    simulate_fleet,
    validate,
)
from harness.simulate.source import measured_runs
from harness.slo import Slo
from workloads.workload import Workload

MOST_REPLICAS = 32
"""Larger fleets are not replayed: more of the same."""

WIDE = 0.3
"""Seeds that differ by more than this share are worth a remark."""


@dataclass(frozen=True)
class PlanSettings:
    """What is asked.

    Attributes:
        slo: limits of a run.
        target_rate: requests/s that are to be served; None = only one GPU's capacity.
        headroom: share of a GPU's capacity that is left free for peaks and failures.
        price_per_gpu_hour: in any currency; None = no cost.
        requests, seeds: of each simulated run to begin with (it grows until what it shows lasts, up to
            :data:`~harness.capacity.search.MOST` times as many), and how many searches the interval rests on.
        recommend: also try other settings.
    """

    slo: Slo
    target_rate: float | None = None
    headroom: float = 0.2
    price_per_gpu_hour: float | None = None
    requests: int = 1000
    seeds: int = 3
    recommend: bool = True

    def __post_init__(self) -> None:
        if self.target_rate is not None and not self.target_rate > 0:
            raise ValueError(f"target_rate must be above 0 requests/s, got {self.target_rate}")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom is a share of the capacity from 0 to below 1, got {self.headroom}")
        if self.price_per_gpu_hour is not None and not self.price_per_gpu_hour > 0:
            raise ValueError(f"price_per_gpu_hour must be above 0, got {self.price_per_gpu_hour}")
        for name, least in (("requests", 40), ("seeds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Plan:
    """What was found. ``capacity`` is None, and ``unmet`` says why, where no rate keeps the SLO.

    Attributes:
        capacity: with the measured settings; improved: with the recommended ones, None where those are the same.
        binding: of the measured settings; what follows is of the recommended ones.
        gpus: for the target rate with headroom; cost_per_million: of generated tokens, at that utilisation.
        fleet: one row a router, of that many GPUs at the target rate; empty without a target.
        extrapolated: share of the steps at the capacity that are larger than any measured one.
    """

    settings: PlanSettings
    workload: Workload
    setup: EngineSetup
    model: StepTimeModel
    validation: Validation
    kv: KvCapacity
    notes: tuple[str, ...]
    unmet: str | None = None
    capacity: Capacity | None = None
    improved: Capacity | None = None
    binding: Binding | None = None
    little: LittlesLaw | None = None
    gpus: int | None = None
    cost_per_million: float | None = None
    fleet: pd.DataFrame = field(default_factory=pd.DataFrame)
    recommended: tuple[Setting, ...] = ()
    extrapolated: float | None = None


def make_plan(results: Results, workload: Workload, settings: PlanSettings, say: Say = say_nothing) -> Plan:
    """Plan for ``workload`` from measured runs.

    The engine's settings are those of the first measured run; step times are fitted to all of them.

    Args:
        say: told what is being done, since it takes minutes.

    Raises:
        ModelError, SetupError: the runs cannot be simulated; ValueError: the question means nothing. One line each.
    """
    if not settings.slo.run_limits:
        raise ValueError("no SLO: give limits of a run, for example slo.ttft_p95_ms=500, or slo=chat")
    load = Load.of(workload)  # refuses what has no rate before anything is fitted
    runs = measured_runs(results)
    validation = validate(results, lambda run_id: say(f"predicting measured run {run_id} from the others"))
    say(f"fitting step times to {len(runs)} runs")
    setup, model = read_setup(results, runs[0]), fit_steps(results, runs)
    kv = kv_capacity(setup, typical_lengths(workload))
    notes = [*model.notes, *validation.notes]
    if len(workload) < settings.requests and load.spec is None:
        notes.append(f"the workload has {len(workload)} requests, fewer than the {settings.requests} asked for a run")
    plan = partial(Plan, settings, workload, setup, model, validation, kv)
    seeds, told = range(settings.seeds), _prefixed(say, "capacity")
    try:
        found = find_capacity(load, setup, model, settings.slo, requests=settings.requests, seeds=seeds, say=told)
    except NothingMeets as error:
        return plan(tuple(notes), unmet=str(error))
    setup_after, tried, improved = setup, dict[str, str](), None
    if settings.recommend:
        setup_after, tried, improved = _better_settings(load, setup, model, settings, found, say)
    chosen = improved or found
    kept = chosen.kept[0]
    gpus = _gpus_needed(chosen, settings)
    if settings.target_rate is not None and gpus is None:
        notes.append("the seeds differ so much that the interval reaches 0: no number of GPUs follows; raise seeds")
    notes += _remarks(found, chosen)
    cost = None
    if settings.price_per_gpu_hour is not None:
        carried = settings.target_rate / gpus if settings.target_rate and gpus else kept.rate * (1 - settings.headroom)
        tokens = kept.values["generated_tokens"] / kept.values["n_ok"]
        cost = cost_per_million(settings.price_per_gpu_hour, carried, tokens)
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in workload.requests)
    config = recommended(setup_after, _sources(results, runs[0]), tried, int(kept.values["running_max"]), longest)
    fleet = _fleet(load, setup_after, model, settings, gpus, chosen.requests, notes, say)
    steps = int(kept.values["steps"])
    return plan(
        tuple(notes),
        capacity=found,
        improved=improved,
        binding=binding_constraint(found.broken[0]),
        little=littles_law(kept),
        gpus=gpus,
        cost_per_million=cost,
        fleet=fleet,
        recommended=tuple(config),
        extrapolated=int(kept.record.counters["extrapolated_steps"] or 0) / steps if steps else None,
    )


def _better_settings(
    load: Load, setup: EngineSetup, model: StepTimeModel, settings: PlanSettings, found: Capacity, say: Say
) -> tuple[EngineSetup, dict[str, str], Capacity | None]:
    """Settings that carry more than the measured ones, what was tried for each, and their capacity; the measured ones
    and None if none do."""
    base, seed = found.by_seed[0], 0
    same = load.trial(len(found.kept[0].record.requests), seed)

    def capacity_of(other: EngineSetup, shown: str, count: int = 1) -> Capacity:
        told = _prefixed(say, f"trying {shown}")
        length = {"requests": found.requests, "most": max(found.requests, MOST * settings.requests)}
        return find_capacity(load, other, model, settings.slo, **length, seeds=range(count), start=base, say=told)

    def meets(other: EngineSetup, shown: str, rate: float) -> bool:
        say(f"trying {shown}: simulating {len(same.requests)} requests at {rate:.3g}/s")
        return run_at(same, rate, seed, other, model, settings.slo).met

    chosen, tried = improve(setup, base, meets, capacity_of)
    if chosen == setup:
        return setup, tried, None
    return chosen, tried, capacity_of(chosen, "the recommended settings", settings.seeds)


def _gpus_needed(capacity: Capacity, settings: PlanSettings) -> int | None:
    """GPUs for the target rate with headroom; None without a target, or if nothing is sure of one GPU's capacity."""
    if settings.target_rate is None or not capacity.sure:
        return None
    return math.ceil(settings.target_rate / (capacity.sure * (1 - settings.headroom)))


def _remarks(found: Capacity, chosen: Capacity) -> list[str]:
    """What makes the capacity less sure than its interval says."""
    remarks = [short_words(chosen)] if chosen.short else []
    if len(found.by_seed) > 1 and max(found.by_seed) > (1 + WIDE) * min(found.by_seed):
        shown = ", ".join(f"{rate:.3g}" for rate in found.by_seed)
        remarks.append(
            f"stretches of the workload differ: the seeds found {shown} requests/s; raise requests (longer stretches) "
            "or seeds (more of them)"
        )
    return remarks


def short_words(capacity: Capacity) -> str:
    """Why a trial at the capacity does not show that the rate lasts."""
    judged = [p.judged for p in capacity.kept if p.judged is not None and not p.long_enough]
    return (
        f"trials ended at {capacity.requests:,} requests ({MOST} times what was asked for, or all there are), where "
        f"{max(j.wanted for j in judged):,} would show a rate that lasts (at the capacity they span "
        f"{min(j.stays for j in judged):.1f} of the longest stays): the capacity may be lower; raise requests"
    )


def cost_per_million(price_per_gpu_hour: float, requests_s: float, tokens: float) -> float:
    """What a million generated tokens cost on a GPU that carries so many requests of ``tokens`` generated tokens each.
    In the long run as many leave as arrive: how long a run's last requests take has no part in it."""
    return price_per_gpu_hour / 3600 / (requests_s * tokens) * 1e6


def _fleet(
    load: Load,
    setup: EngineSetup,
    model: StepTimeModel,
    settings: PlanSettings,
    gpus: int | None,
    requests: int,
    notes: list[str],
    say: Say,
) -> pd.DataFrame:
    """The target rate on that many GPUs behind each router, with the same requests."""
    if gpus is None or settings.target_rate is None:
        return pd.DataFrame()
    if gpus > MOST_REPLICAS:
        notes.append(f"a fleet of {gpus} GPUs is not replayed (more than {MOST_REPLICAS})")
        return pd.DataFrame()
    workload = load.trial(requests * min(gpus, 4), 0).at(settings.target_rate)
    return fleet_table(workload, setup, model, gpus, settings.slo, say=say)


def _prefixed(say: Say, what: str) -> Say:
    return lambda text: say(f"{what}: {text}")


def fleet_table(
    workload: Workload,
    setup: EngineSetup,
    model: StepTimeModel,
    replicas: int,
    slo: Slo | None,
    say: Say = say_nothing,
) -> pd.DataFrame:
    """One row a router: what clients saw of ``replicas`` engines. Throughput is that of the steady window: the whole
    run's would count the time in which its last requests drain."""
    rows: list[dict[str, Any]] = []
    for router in ROUTERS:
        say(f"{len(workload)} requests on {replicas} GPUs behind router {router}")
        record = simulate_fleet(workload, setup, model, replicas, router, seed=0, slo=slo)
        values = run_values(record)
        asked, hit = record.counters["prefix_query_tokens"], record.counters["prefix_hit_tokens"]
        columns = (
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
        share = None if not asked else float(hit or 0) / float(asked)
        sent = None
        if values["steady_n"] is not None:
            sent = values["steady_n"] / (values["steady_end_s"] - values["steady_start_s"])
        found = {"steady_sent_s": sent, **{c: values[c] for c in columns}, "prefix_hit_share": share}
        rows.append({"router": router, "replicas": replicas, **found})
    return pd.DataFrame(rows)


def _sources(results: Results, run_id: str) -> dict[str, str]:
    rows = results.of_run("config", run_id)
    return {str(f): str(s) for f, s in zip(rows["field"], rows["source"], strict=True)}
