"""``dry_run=true``: what a command would run and how long that may take, without running it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import manifest, store
from harness.config import config_hash
from harness.course import duration
from workloads.config import make_arrival

_FOLDERS = 50  # the newest results that are looked at
_LIKE = ("engine", "model", "workload")


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One line of the listing: what the run is called and its resolved config."""

    name: str
    config: Mapping[str, Any]


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
class History:
    """Durations in s of runs that ended well, process start to end: by config hash, and by engine, model, workload;
    ``where``: the folder below which they were found."""

    same: Mapping[str, Sequence[float]]
    alike: Mapping[tuple[str, ...], Sequence[float]]
    where: Path


def history(results: Path) -> History:
    """What the results below ``results`` say; anything unreadable there is passed over."""
    same: dict[str, list[float]] = {}
    kinds: dict[str, tuple[str, ...]] = {}
    folders = [p.parent for depth in ("*/*", "*/*/*") for p in results.glob(f"{depth}/{manifest.FILE}")]
    for folder in sorted(folders, key=lambda f: f.name)[-_FOLDERS:]:
        for state, seconds in manifest.durations(folder):
            same.setdefault(state.config_hash, []).append(seconds)
        kinds |= _kinds(folder)
    alike: dict[tuple[str, ...], list[float]] = {}
    for digest, durations in same.items():
        if digest in kinds:
            alike.setdefault(kinds[digest], []).extend(durations)
    return History(same, alike, results)


def _kinds(folder: Path) -> dict[str, tuple[str, ...]]:
    """Engine, model and workload by config hash."""
    try:
        tables = store.read_result(folder, ("runs", "environment"))
    except (OSError, ValueError):  # none, or of another version
        return {}
    environment = tables["environment"]
    rows = environment[environment["key"] == "identity.config_hash"].merge(tables["runs"], on="run_id")
    rows = rows[["value", *_LIKE]].dropna()
    return {str(digest).strip('"'): tuple(str(v) for v in kind) for digest, *kind in rows.itertuples(index=False)}


def estimate(config: Mapping[str, Any], known: History) -> Estimate:
    """Median of earlier runs of the same config, else of the same engine, model and workload, else the arrivals."""
    for durations, what in (
        (known.same.get(config_hash(config)), "same config"),
        (known.alike.get(tuple(str(config[group]["name"]) for group in _LIKE)), "same engine, model, workload"),
    ):
        if durations:
            n = len(durations)
            basis = f"{what}: median of {n} earlier run{'s' if n > 1 else ''} below {known.where}"
            return Estimate(statistics.median(durations), basis)
    last_due_s = _last_due_s(config)
    if not last_due_s:  # all at once, or told by the workload alone: nothing follows from that
        return Estimate(None, "never measured here")
    return Estimate(last_due_s, "arrivals alone, never measured here", is_floor=True)


def _last_due_s(config: Mapping[str, Any]) -> float | None:
    """When the last request is due, if arrival and number of requests tell."""
    requests = config["workload"].get("requests")
    if requests is None:
        return None
    try:
        due = make_arrival(config["arrival"]).due_times(requests, random.Random(0), None)
    except (ValueError, TypeError):  # times of the workload's own, which only building it tells
        return None
    return max(due, default=0.0)


def listing(runs: Sequence[PlannedRun], known: History, finished: int = 0) -> list[str]:
    """Lines for people: one a run, then the sum.

    Args:
        finished: runs that are there already and will not be repeated.
    """
    estimates = [estimate(run.config, known) for run in runs]
    width = max((len(run.name) for run in runs), default=0)
    lines = [f"{run.name:<{width}}  {_length(e):>10}  {e.basis}" for run, e in zip(runs, estimates, strict=True)]
    arms = len({config_hash(run.config) for run in runs})
    done = f" ({finished} more are measured already)" if finished else ""
    n = f"{len(runs)} run{'' if len(runs) == 1 else 's'} of {arms} config{'' if arms == 1 else 's'}{done}"
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
