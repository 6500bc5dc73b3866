"""The whole plan: how much one GPU carries under an SLO, what limits it, and how many are needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pandas as pd

from harness.capacity.binding import Binding, LittlesLaw, binding_constraint, littles_law
from harness.capacity.load import Load
from harness.capacity.memory import KvCapacity, kv_capacity, typical_lengths
from harness.capacity.progress import Say, TimeToGo, say_nothing
from harness.capacity.recommend import Setting, candidates, improve, recommended
from harness.capacity.replay import fleet_at, simulated_routers
from harness.capacity.search import MOST, Capacity, NothingMeets, Trials, find_capacity
from harness.report.read import Results
from harness.simulate import EngineSetup, StepTimeModel, Validation, fit_steps, read_setup, validate
from harness.simulate.source import measured_runs
from harness.slo import Slo
from workloads.workload import Workload

MOST_REPLICAS = 32
"""Larger fleets are not replayed: more of the same."""

WIDE = 0.3
"""Seeds that differ by more than this share are worth a remark."""


FEWEST = 10
"""Requests of a recorded workload that a rate can be told from."""


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
        if self.target_rate is not None and not 0 < self.target_rate < math.inf:
            raise ValueError(f"target_rate must be above 0 requests/s and finite, got {self.target_rate}")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom is a share of the capacity from 0 to below 1, got {self.headroom}")
        if self.price_per_gpu_hour is not None and not 0 < self.price_per_gpu_hour < math.inf:
            raise ValueError(f"price_per_gpu_hour must be above 0 and finite, got {self.price_per_gpu_hour}")
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


def make_plan(
    results: Results,
    workload: Workload,
    settings: PlanSettings,
    say: Say = say_nothing,
    known: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """Plan for ``workload`` from measured runs.

    The engine's settings are those of the first measured run; step times are fitted to all of them.

    Args:
        say: told what is being done and how long it may take, since it takes minutes.
        known: given what is known before other settings are tried, and before the fleet is replayed.

    Raises:
        ModelError, SetupError: the runs cannot be simulated; ValueError: the question means nothing. One line each.
    """
    if not settings.slo.run_limits:
        raise ValueError("no SLO: give limits of a run, for example slo.ttft_p95_ms=500, or slo=chat")
    load = Load.of(workload)  # refuses what has no rate before anything is fitted
    if load.spec is None and len(workload) < FEWEST:
        raise ValueError(f"{len(workload)} requests are too few to find a rate: at least {FEWEST} are needed")
    runs = measured_runs(results)
    validation = validate(results, lambda run_id: say(f"predicting measured run {run_id} from the others"))
    say(f"fitting step times to {len(runs)} runs")
    setup, model = read_setup(results, runs[0]), fit_steps(results, runs)
    kv = kv_capacity(setup, typical_lengths(workload))
    notes = [*model.notes, *validation.notes]
    if unseen := model.unseen_prompts([len(r.prompt_ids) for r in workload.requests]):
        notes.append(unseen)
    if len(workload) < settings.requests and load.spec is None:
        notes.append(f"the workload has {len(workload)} requests, fewer than the {settings.requests} asked for a run")
    blank = Plan(settings, workload, setup, model, validation, kv, tuple(notes))
    course = TimeToGo(say)
    # Trials grow, to twice their length as a rule; how many GPUs are to be replayed is not known yet.
    tries, replays = len(candidates(setup)) * settings.recommend, 0 if settings.target_rate is None else 8
    course.later = settings.requests * (2 * tries + replays)
    try:
        found = find_capacity(
            load,
            setup,
            model,
            settings.slo,
            requests=settings.requests,
            seeds=range(settings.seeds),
            tell=course.within("capacity"),
        )
    except NothingMeets as error:
        return replace(blank, unmet=str(error))
    sources = _sources(results, runs[0])
    answer = partial(_answered, blank, found, sources)
    known(answer(setup, {}, None))
    setup_after, tried, improved = setup, dict[str, str](), None
    if settings.recommend:
        course.later = settings.requests * replays
        setup_after, tried, improved = _better_settings(load, setup, model, settings, found, course)
    plan = answer(setup_after, tried, improved)
    known(plan)
    return _with_fleet(plan, load, setup_after, course)


def _answered(
    blank: Plan,
    found: Capacity,
    sources: dict[str, str],
    setup: EngineSetup,
    tried: dict[str, str],
    improved: Capacity | None,
) -> Plan:
    """The plan but for its fleet: what follows from the capacity with the measured settings and with ``setup``."""
    settings, chosen = blank.settings, improved or found
    kept, notes = chosen.kept[0], [*blank.notes]
    gpus = _gpus_needed(chosen, settings)
    if settings.target_rate is not None and gpus is None:
        notes.append("the seeds differ so much that the interval reaches 0: no number of GPUs follows; raise seeds")
    notes += _remarks(found, chosen)
    cost = None
    if settings.price_per_gpu_hour is not None:
        carried = settings.target_rate / gpus if settings.target_rate and gpus else kept.rate * (1 - settings.headroom)
        tokens = kept.values["generated_tokens"] / kept.values["n_ok"]
        cost = cost_per_million(settings.price_per_gpu_hour, carried, tokens)
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in blank.workload.requests)
    steps = int(kept.values["steps"])
    return replace(
        blank,
        notes=tuple(notes),
        capacity=found,
        improved=improved,
        binding=binding_constraint(found.deciding),
        little=littles_law(kept),
        gpus=gpus,
        cost_per_million=cost,
        recommended=tuple(recommended(setup, sources, tried, int(kept.values["running_max"]), longest)),
        extrapolated=int(kept.record.counters["extrapolated_steps"] or 0) / steps if steps else None,
    )


def _with_fleet(plan: Plan, load: Load, setup: EngineSetup, course: TimeToGo) -> Plan:
    """The target rate on that many GPUs behind each router, with the same requests."""
    settings, chosen, gpus = plan.settings, plan.improved or plan.capacity, plan.gpus
    if gpus is None or settings.target_rate is None or chosen is None:
        return plan
    if gpus > MOST_REPLICAS:
        note = f"a fleet of {gpus} GPUs is not replayed (more than {MOST_REPLICAS})"
        return replace(plan, notes=(*plan.notes, note))
    course.later = 0
    length = {"requests": settings.requests * gpus, "most": chosen.requests * min(gpus, 4)}
    tell = course.within("fleet")
    table = fleet_at(load, settings.target_rate, setup, plan.model, gpus, settings.slo, **length, tell=tell)
    notes = list(plan.notes)
    if "prefix_aware" not in simulated_routers(plan.workload, setup):
        page = setup.layout.page_size
        notes.append(f"no two prompts share a page of {page} tokens: prefix aware is the same as least loaded")
    return replace(plan, fleet=table, notes=tuple(notes))


def _better_settings(
    load: Load, setup: EngineSetup, model: StepTimeModel, settings: PlanSettings, found: Capacity, course: TimeToGo
) -> tuple[EngineSetup, dict[str, str], Capacity | None]:
    """Settings that carry more than the measured ones, what was tried for each, and their capacity; the measured ones
    and None if none do."""
    base, seed = found.by_seed[0], 0
    length = len(found.kept[0].record.requests)
    same, later = {seed: load.trial(length, seed)}, course.later
    ahead = len(candidates(setup))

    def capacity_of(other: EngineSetup, shown: str, count: int = 1) -> Capacity:
        course.later = later + ahead * length
        tell = course.within(f"trying {shown}")
        bounds = {"requests": found.requests, "most": max(found.requests, MOST * settings.requests)}
        return find_capacity(load, other, model, settings.slo, **bounds, seeds=range(count), start=base, tell=tell)

    def meets(other: EngineSetup, shown: str, rate: float) -> bool:
        nonlocal ahead
        ahead -= 1
        course.later = later

        def tell(text: str, requests: int, after: int) -> None:
            course.begins(f"trying {shown}: {text}", requests, ahead * length)

        return Trials(load, other, model, settings.slo, (seed,), length, length, tell, same).run(rate, seed).met

    chosen, tried = improve(setup, base, meets, capacity_of)
    if chosen == setup:
        return setup, tried, None
    ahead = 0
    return chosen, tried, capacity_of(chosen, "the recommended settings", settings.seeds)


def _gpus_needed(capacity: Capacity, settings: PlanSettings) -> int | None:
    """GPUs for the target rate with headroom; None without a target, or if nothing is sure of one GPU's capacity."""
    if settings.target_rate is None or not capacity.sure:
        return None
    return math.ceil(settings.target_rate / (capacity.sure * (1 - settings.headroom)))


def _remarks(found: Capacity, chosen: Capacity) -> list[str]:
    """What makes the capacity less sure than its interval says."""
    remarks = [short_words(chosen)] if chosen.short else []
    if chosen.unconfirmed:
        remarks.append(
            "a seed's capacity rests on requests that pile up in one trial, and there are no more requests to see "
            "whether they do so in a longer one: the capacity may be higher"
        )
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


def _sources(results: Results, run_id: str) -> dict[str, str]:
    rows = results.of_run("config", run_id)
    return {str(f): str(s) for f, s in zip(rows["field"], rows["source"], strict=True)}
