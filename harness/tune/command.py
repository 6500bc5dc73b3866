"""What ``cb-tune`` does with its arguments: the settings with the highest rate under an SLO."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.capacity.load import Load
from harness.capacity.progress import Progress, Tell, tell_nothing
from harness.capacity.question import Question, QuestionError, configuration, parse, slo_of, workload_asked
from harness.capacity.search import Capacity, NothingMeets, find_capacity
from harness.gpus import gpu_names
from harness.interruption import by, exit_code, interrupting, signal_of
from harness.report.read import Results, ResultsError
from harness.simulate import EngineSetup, ModelError, SetupError, fit_steps, read_setup, validate
from harness.simulate.source import measured_runs, read_all
from harness.slo import Slo
from harness.tune.confirm import Confirmation, confirm
from harness.tune.engine_runs import check_machine, engine_measure, job_config
from harness.tune.space import baseline, changes, variables
from harness.tune.study import Choice, TuneError, choose, engines_tried, open_study, ranked, search_settings

RESULT = "tuned.yaml"
SUMMARY = "tuning.json"


@dataclass(frozen=True)
class TuneSettings:
    """What is asked; see :data:`harness.tune.app.USAGE`."""

    trials: int = 40
    requests: int = 600
    repeats: int = 5
    confirm: bool = True
    load: float = 0.8
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("requests", 40), ("repeats", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.load <= 1:
            raise ValueError(f"load is a share of the capacity above 0 and up to 1, got {self.load}")


def run(arguments: Sequence[str]) -> int:
    """Exit status 0; 1 if no settings keep the SLO; 2 with one line on standard error if nothing can be tuned; 128 and
    the number of the signal that interrupted it."""
    try:
        with interrupting():
            question = parse(arguments, TuneSettings)
            return _tune(question, TuneSettings(**question.own))
    except KeyboardInterrupt as interrupt:
        print(
            f"cb-tune: {by(signal_of(interrupt))}; finished trials are kept, the same command goes on with them",
            file=sys.stderr,
        )
        return exit_code(interrupt)
    except NothingMeets as error:
        print(f"cb-tune: {error}", file=sys.stderr)
        return 1
    except (TuneError, QuestionError, ResultsError, ModelError, SetupError, ValueError, OSError) as error:
        print(f"cb-tune: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _tune(question: Question, settings: TuneSettings) -> int:
    config = configuration(question)
    slo = slo_of(config)
    if slo is None or not slo.run_limits:
        raise QuestionError("no SLO: give limits of a run, for example slo.ttft_p95_ms=500, or slo=chat")
    with Progress("cb-tune") as say:
        say("reading the measured runs")
        results = read_all(question.folders)
        say("building the workload")
        workload, origin = workload_asked(results, question, config)
    load, runs = Load.of(workload), measured_runs(results)
    if settings.confirm:
        check_machine(results, runs[0], gpu_names())
    setup, model = read_setup(results, runs[0]), fit_steps(results, runs)
    directory = Path(settings.out) if settings.out is not None else question.folders[0] / "tune"
    asked = {
        "slo": slo.as_json(),
        "workload": workload.content_hash,
        "runs": runs,
        "requests": settings.requests,
        "seed": settings.seed,
    }
    study = open_study(directory, asked, settings.seed)
    space, base = variables(setup), baseline(setup)
    tried = len(engines_tried(study, space, setup))
    print(f"tuning for {origin}; {tried} of {settings.trials} trials are there", flush=True)
    seeds = (settings.seed,)
    near: list[float | None] = [None]
    tell: list[Tell] = [tell_nothing]

    def capacity_of(other: EngineSetup) -> Capacity:
        found = find_capacity(
            load, other, model, slo, requests=settings.requests, seeds=seeds, start=near[0], tell=tell[0]
        )
        near[0] = found.by_seed[0]
        return found

    def report(number: int, tried: Mapping[str, Any], value: float) -> None:
        shown = ", ".join(f"{k}={v}" for k, v in changes(tried, base).items()) or "baseline"
        print(f"trial {number}: {value:.3g} requests/s ({shown})", flush=True)

    with Progress("cb-tune") as say:
        tell[0] = lambda text, *_: say(f"trial {len(engines_tried(study, space, setup))} of {settings.trials}: {text}")
        search_settings(study, space, base, setup, capacity_of, settings.trials, report, settings.seed)
    order = ranked(study, space)
    best = choose(order, base)
    if best.value <= 0:
        raise NothingMeets("no settings keep the SLO at any rate; relax it or measure a faster engine")
    base_value = next((v for s, v in order if s == base), best.value)
    print(f"simulated: {best.value:.3g} requests/s instead of {base_value:.3g} with the measured settings")
    if best.why is not None:
        print(best.why)
    with Progress("cb-tune") as say:
        validation = validate(results, lambda run_id: say(f"predicting measured run {run_id} from the others"))
    unseen = model.unseen_prompts([len(r.prompt_ids) for r in workload.requests])
    for sentence in [*validation.sentences(), *validation.notes, *filter(None, [unseen])]:
        print(f"! {sentence}")
    confirmed = None
    if settings.confirm:
        rate = settings.load * (base_value or best.value)
        measured = job_config(results, runs[0], slo, rate, settings.requests)
        measure = engine_measure(measured, slo, directory / "engine", print)
        confirmed = confirm(best.settings, base, [v.name for v in space], measure, settings.repeats)
        for back in confirmed.retreats:
            print(f"memory ran out: {back.variable}={back.given_up} went back to {base[back.variable]}")
        print(f"engine at {rate:.3g} requests/s: {confirmed.verdict}; {confirmed.reason}")
    chosen = best.settings if confirmed is None else confirmed.settings
    _write(directory, setup, results, runs[0], slo, chosen, base, best, order, confirmed)
    print(f"study:    {directory}")
    print(f"settings: {directory / RESULT}")
    return 0


def _write(
    directory: Path,
    setup: EngineSetup,
    results: Results,
    run_id: str,
    slo: Slo,
    chosen: Mapping[str, Any],
    base: Mapping[str, Any],
    best: Choice,
    order: Sequence[tuple[dict[str, Any], float]],
    confirmed: Confirmation | None,
) -> None:
    """The settings with the reason for each value, and everything that led to them."""
    lines = [f"# ContinuousBatchingConfig under {slo.as_json()}; behind each value why."]
    if best.why is not None:
        lines.append(f"# {best.why}.")
    base_value = next((v for s, v in order if s == base), None)
    for name, value in chosen.items():
        reason = _reason(name, value, base, best.settings, order, confirmed)
        text = yaml.safe_dump(value, default_flow_style=True).replace("\n...", "").strip()
        lines.append(f"{name}: {text}  # {reason}")
    for name, value in (("page_size", setup.layout.page_size), ("num_blocks", setup.num_blocks)):
        lines.append(f"{name}: {value}  # as in run {run_id}: not tuned")
    (directory / RESULT).write_text("\n".join(lines) + "\n", encoding="utf-8")
    summary = {
        "slo": json.loads(slo.as_json()),
        "baseline": dict(base),
        "baseline_request_s": base_value,
        "simulated_best": best.settings,
        "simulated_best_request_s": best.value,
        "simulated_highest": order[0][0],
        "simulated_highest_request_s": order[0][1],
        "chosen": dict(chosen),
        "confirmation": None if confirmed is None else dataclasses.asdict(confirmed),
    }
    (directory / SUMMARY).write_text(json.dumps(summary, indent=1, default=str), encoding="utf-8")


def _reason(
    name: str,
    value: Any,
    base: Mapping[str, Any],
    best: Mapping[str, Any],
    order: Sequence[tuple[dict[str, Any], float]],
    confirmed: Confirmation | None,
) -> str:
    """Why a setting has its value."""
    if confirmed is not None:
        for back in confirmed.retreats:
            if back.variable == name:
                return f"back to the measured value: {back.given_up} ran out of memory"
    reached = next(v for s, v in order if s == best)
    simulated = f"{reached:.3g} requests/s simulated, the best of {len(order)} settings is {order[0][1]:.3g}"
    others = [v for s, v in order if s[name] != best[name]]
    beside = f", {max(others):.3g} with another value" if others else ""
    if value == base[name]:
        if best[name] != value and confirmed is not None:
            return f"the measured value: {best[name]} was simulated as better, the engine says {confirmed.verdict}"
        return f"the measured value; {simulated}{beside}"
    said = "; not confirmed on the engine" if confirmed is None else f"; engine: {confirmed.reason}"
    return f"{simulated}{beside}{said}"
