"""``dry_run=true``: what a command would run and how long that may take, without running it."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import manifest, store
from harness.config import config_hash
from harness.course import duration
from harness.used_device import kind_of
from workloads import build_workload
from workloads.workload import Workload

_FOLDERS = 50  # the newest results that are looked at
_LIKE = ("engine", "model")
_VOCABULARY = 32_000  # lengths and times of a workload do not depend on it, but prompts must be drawn from some ids


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One line of the listing: a repeat of a config, with as many measured runs as its ``measure.runs_per_process``.

    Attributes:
        name: what it is called.
        config: resolved.
        device: kind of the device it would use here, "cpu" or "cuda".
        joins: whether it is measured in the process of the line before (``measure.share_process``), which has loaded,
            started and warmed up.
    """

    name: str
    config: Mapping[str, Any]
    device: str
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a run may take.

    Attributes:
        seconds: None if nothing is known.
        basis: where that comes from, in words.
        is_floor: whether it can only be longer.
    """

    seconds: float | None
    basis: str
    is_floor: bool = False


@dataclass(frozen=True, slots=True)
class Lasted:
    """How long a repeat took: from its start to its end, and its measured parts alone (None = not recorded), s."""

    seconds: float
    measured_s: float | None

    def again(self, joins: bool) -> float:
        """The same in a process that has started already, or in one of its own."""
        return self.measured_s if joins and self.measured_s is not None else self.seconds


@dataclass(frozen=True, slots=True)
class Pace:
    """What runs of an engine on a model took: ``outside_s`` beside the measured part (start, warm-up, calibration), and
    generated tokens a second inside it."""

    outside_s: float
    gen_tok_s: float


@dataclass(frozen=True, slots=True)
class History:
    """What runs that ended well took. Keys begin with the kind of their device: what a GPU takes says nothing of a CPU.

    Attributes:
        same: durations of a repeat in s, process start to end, by kind of device and config hash.
        alike: the same by kind of device, engine, model, :func:`_built_by` and measured runs of a process.
        paces: by kind of device, engine and model, one a config.
        where: the folder below which they were found.
    """

    same: Mapping[tuple[str, str], Sequence[float]]
    alike: Mapping[tuple[str, ...], Sequence[Lasted]]
    paces: Mapping[tuple[str, ...], Sequence[Pace]]
    where: Path


def history(results: Path) -> History:
    """What the results below ``results`` say; anything unreadable there is passed over, and runs that do not say on
    which device they ran."""
    same: dict[tuple[str, str], list[float]] = {}
    known: dict[tuple[str, str], _Measured] = {}
    depths = ("*/*", "*/*/*", "*/*/*/*")  # runs/RUN, sweeps/NAME/SWEEP, and what is committed, by machine
    folders = [p.parent for depth in depths for p in results.glob(f"{depth}/{manifest.FILE}")]
    for folder in sorted(folders, key=lambda f: f.name)[-_FOLDERS:]:
        found = _measured(folder)
        alone = len(manifest.latest(folder)) == 1  # a job that is no part of a sweep has all its repeats
        for state, seconds in manifest.durations(folder):
            if state.config_hash not in found:  # tables that were never joined
                found |= _measured(folder / state.job)
            run = found.get(state.config_hash)
            if run is not None:
                config = (run.kind[0], state.config_hash)
                same.setdefault(config, []).append(seconds / (run.processes if alone else 1))
                known[config] = run
    alike: dict[tuple[str, ...], list[Lasted]] = {}
    paces: dict[tuple[str, ...], list[Pace]] = {}
    for config, durations in same.items():
        run = known[config]
        measured_s = None if run.wall_s is None else run.iterations * run.wall_s
        if run.built_by is not None:
            key = (*run.kind, run.built_by, str(run.iterations))
            alike.setdefault(key, []).extend(Lasted(seconds, measured_s) for seconds in durations)
        if measured_s is not None and run.gen_tok_s:
            outside_s = max(0.0, statistics.median(durations) - measured_s)
            paces.setdefault(run.kind, []).append(Pace(outside_s, run.gen_tok_s))
    return History(same, alike, paces, results)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Runs of one config: kind of device, engine and model, what built their requests (None = not recorded), their
    processes, the runs of each, and medians of what the tables have of them."""

    kind: tuple[str, ...]
    built_by: str | None
    processes: int
    iterations: int
    wall_s: float | None
    gen_tok_s: float | None


def _measured(folder: Path) -> dict[str, _Measured]:
    """By config hash."""
    try:
        tables = store.read_result(folder, ("runs", "environment"))
    except (OSError, ValueError):  # none, or of another version
        return {}
    environment = tables["environment"]
    specs = environment[environment["key"] == "workload.spec"].dropna(subset=["value"])
    spec_of = dict(zip(specs["run_id"], specs["value"], strict=True))
    rows = environment[environment["key"] == "identity.config_hash"].merge(tables["runs"], on="run_id")
    rows = rows.dropna(subset=["value", "device", *_LIKE])
    found = {}
    for digest, runs in rows.groupby("value"):
        devices = {kind_of(name) for name in runs["device"]}
        if len(devices) > 1:  # resumed on another machine: the manifest does not say which took how long
            continue
        wall_s, gen_tok_s = (runs[name].dropna() for name in ("wall_s", "gen_tok_s"))
        spec = json.loads(spec_of.get(runs["run_id"].iloc[0], "null"))
        found[str(digest).strip('"')] = _Measured(
            (*devices, *(str(runs[name].iloc[0]) for name in _LIKE)),
            _built_by(spec) if isinstance(spec, Mapping) and {"workload", "arrival"} <= spec.keys() else None,
            max(1, runs["process"].nunique()),
            max(1, runs["iteration"].nunique()),
            float(wall_s.median()) if len(wall_s) else None,
            float(gen_tok_s.median()) if len(gen_tok_s) else None,
        )
    return found


def _built_by(settings: Mapping[str, Any]) -> str:
    """The workload's and the arrivals' settings as text, of a config or as a run recorded them.

    Seeds are left out, other draws last as long; so is what is null, which versions may add and record otherwise.
    """
    return json.dumps({k: _stated(settings[k]) for k in ("workload", "arrival")}, sort_keys=True, default=str)


def _stated(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: _stated(v) if isinstance(v, Mapping) else v for k, v in settings.items() if v is not None and k != "seed"
    }


def estimate(
    config: Mapping[str, Any], known: History, device: str, workload: Workload | None = None, joins: bool = False
) -> Estimate:
    """How long a repeat may take, with all measured runs of its process, by earlier ones on the same kind of device:
    median of those of the same config, else of the same engine and model with the same settings of workload and
    arrivals; else the workload's tokens at the best rate of the same engine and model on another workload; else the
    arrivals. Never less than the arrivals. What another kind of device took is told and no measure.

    Args:
        device: see :class:`PlannedRun`.
        workload: of the run, as :func:`planned_workload` builds it; None = unknown.
        joins: see :class:`PlannedRun`.
    """
    if found := _by_earlier(config, known, device, workload, joins):
        return found
    others = sorted({key[0] for keys in (known.same, known.alike, known.paces) for key in keys} - {device})
    elsewhere = [(e, other) for other in others if (e := _by_earlier(config, known, other, workload, joins))]
    never = "never measured here"
    if elsewhere:
        never = f"never measured on {device} here ({', '.join(f'{_length(e)} on {other}' for e, other in elsewhere)})"
    last_due_s = _last_due_s(workload)
    if not last_due_s:  # all at once: nothing follows from that
        return Estimate(None, never)
    arrivals_s = int(config["measure"]["runs_per_process"]) * last_due_s
    return Estimate(arrivals_s, f"arrivals alone, {never}", is_floor=True)


def _last_due_s(workload: Workload | None) -> float:
    return max((r.due_s for r in workload.requests), default=0.0) if workload else 0.0


def _by_earlier(
    config: Mapping[str, Any], known: History, device: str, workload: Workload | None, joins: bool
) -> Estimate | None:
    """By earlier runs on that kind of device; None if there is none to go by."""
    kind = (device, *(str(config[group]["name"]) for group in _LIKE))
    iterations = int(config["measure"]["runs_per_process"])
    arrivals_s = iterations * _last_due_s(workload)
    alike = known.alike.get((*kind, _built_by(config), str(iterations)), ())
    for durations, what in (
        (known.same.get((device, config_hash(config))), "same config"),
        ([one.again(joins) for one in alike], "same engine, model, workload and arrivals"),
    ):
        if durations:
            n = len(durations)
            basis = f"{what}: median of {n} earlier run{'s' if n > 1 else ''} below {known.where}"
            return Estimate(max(statistics.median(durations), arrivals_s), basis)
    if workload is None or not (paces := known.paces.get(kind)):
        return None
    # A run under arrivals slower than the engine says less of what it can do: the fastest says most.
    pace = max(paces, key=lambda p: p.gen_tok_s)
    tokens = iterations * sum(r.max_new_tokens for r in workload.requests)
    seconds = (0.0 if joins else pace.outside_s) + max(arrivals_s, tokens / pace.gen_tok_s)
    return Estimate(
        seconds, f"roughly: {tokens:,} tokens, same engine and model on another workload below {known.where}"
    )


def planned_workload(config: Mapping[str, Any]) -> Workload | None:
    """The workload's lengths and times, its prompts from a made-up vocabulary; None where they need the model's
    tokenizer, or the config has no such workload."""
    log = logging.getLogger("workloads")
    before = log.level
    log.setLevel(logging.ERROR)  # what is left out of a file has been said when the command was read
    try:
        return build_workload(
            config["workload"], config["arrival"], vocab_size=_VOCABULARY, seed=config["measure"]["seed"]
        )
    except (ValueError, TypeError):
        return None
    finally:
        log.setLevel(before)


def listing(runs: Sequence[PlannedRun], known: History, finished: int = 0) -> list[str]:
    """Lines for people: one a run, then the sum.

    Args:
        finished: runs that are there already and will not be repeated.
    """
    workloads: dict[str, Workload | None] = {}
    estimates = []
    for run in runs:
        groups = json.dumps([run.config[g] for g in ("workload", "arrival", "measure")], sort_keys=True, default=str)
        if groups not in workloads:
            workloads[groups] = planned_workload(run.config)
        estimates.append(estimate(run.config, known, run.device, workloads[groups], run.joins))
    width = max((len(run.name) for run in runs), default=0)
    lines = [f"{run.name:<{width}}  {_length(e):>10}  {e.basis}" for run, e in zip(runs, estimates, strict=True)]
    arms = len({config_hash(run.config) for run in runs})
    done = f" ({finished} more are measured already)" if finished else ""
    measured = sum(run.config["measure"]["runs_per_process"] for run in runs)
    times = f", measured {measured} times in all" if measured > len(runs) else ""
    n = f"{len(runs)} run{'' if len(runs) == 1 else 's'} of {arms} config{'' if arms == 1 else 's'}{times}{done}"
    return [*lines, f"{n}: {_in_all(estimates)}"]


def _in_all(estimates: Sequence[Estimate]) -> str:
    """How long all runs may take, and how much of that is not known."""
    known = [e.seconds for e in estimates if e.seconds is not None]
    if not known:
        return "how long is unknown, nothing like it was measured here"
    unknown = len(estimates) - len(known)
    about = "at least" if unknown or any(e.is_floor for e in estimates) else "about"
    rest = f", and {unknown} of unknown length" if unknown else ""
    return f"{about} {duration(sum(known))} one after the other{rest}"


def _length(e: Estimate) -> str:
    if e.seconds is None:
        return "unknown"
    return f"{'>= ' if e.is_floor else ''}{duration(e.seconds)}"
