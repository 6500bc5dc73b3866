"""What a sweep is before it runs (its variable and arms) and what remains of it afterwards (combined tables)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness import gate, manifest, store


def arm(config: Mapping[str, Any], choices: Mapping[str, str | None], variable: str | None) -> str | None:
    """Value of the experiment's variable in one job, as text; several variables are joined by a comma.

    Args:
        config: resolved config of the job.
        choices: chosen name of each config group.
        variable: a config group or a dotted key, or several of them with commas between; None = no experiment.
    """
    if variable is None:
        return None
    return ",".join(_value(config, choices, name) for name in variable.split(","))


def baseline(arms: Sequence[tuple[str, str | None]]) -> int:
    """Index of the arm that the others of its facet are compared with.

    Padded static batching where it is there, else the lowest value of a variable with numbers, else the first.

    Args:
        arms: engine and value of the variable of each.
    """
    for i, (engine, _) in enumerate(arms):
        if engine == "static":
            return i
    numbers = [(as_number(value), i) for i, (_, value) in enumerate(arms)]
    return min(((n, i) for n, i in numbers if n is not None), default=(0.0, 0))[1]


def as_number(value: str | None) -> float | None:
    """An arm's value as a number; None if it is none."""
    try:
        return float(value) if value is not None else None
    except ValueError:
        return None


def _value(config: Mapping[str, Any], choices: Mapping[str, str | None], name: str) -> str:
    if name in choices:
        return str(choices[name])
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"experiment.variable {name!r} is neither a config group nor a key of the config")
        value = value[part]
    return "null" if value is None else str(value)


def check_unused(directory: Path) -> None:
    """Refuse a folder that another command wrote to: its runs would be taken for repeats of the new ones.

    Raises:
        ValueError: ``directory`` holds a manifest with jobs; says which and what to do.
    """
    jobs = manifest.latest(directory)
    if jobs:
        first = " ".join(jobs[0].overrides) or "no overrides"
        n = f"{len(jobs)} job{'s' if len(jobs) > 1 else ''}"
        raise ValueError(
            f"{directory} already holds {n} of another command (the first with {first}, {jobs[0].time}): name a new "
            "folder, or move this one away"
        )


def kept_line(root: Path) -> str:
    """What an interrupted run or sweep left in ``root``, in words."""
    jobs = [s for s in manifest.latest(root) if s.job != "."]
    counted = f"{manifest.tally(jobs)}; " if jobs else ""
    return counted + _kept_requests(root)


def _kept_requests(root: Path) -> str:
    if not store.is_result(root):
        apart = measured_folders(root)
        return f"the tables are not joined, each is in its own folder below {root}" if apart else "nothing was measured"
    ended, total = store.ended_requests(root) or (0, 0)
    if not ended:
        return "no request had ended, so no measurement is left"
    runs = len(store.read_result(root, ("runs",))["runs"])
    which = f" of its {runs} runs" if runs > 1 else ""
    return f"the tables of {root} hold {ended} of {total} requests{which}"


def measured_folders(root: Path) -> list[Path]:
    """``root`` if it holds a result, else the folders of its jobs that do."""
    folders = [root] if store.is_result(root) else [root / state.job for state in manifest.latest(root)]
    return [folder for folder in folders if store.is_result(folder)]


def combine_jobs(
    root: Path, reference_engine: str | None, labels: Mapping[str, tuple[str | None, str | None]] | None = None
) -> dict[str, pd.DataFrame] | None:
    """Join the tables of all jobs in ``root``'s manifest, let the correctness gate judge and write them to ``root``.

    Args:
        labels: by config hash, variable and value that the runs of that config get instead of their own.

    Returns:
        the combined tables; None if no job left any.
    """
    directories = [root / state.job for state in manifest.latest(root) if state.job != "."]
    directories = [directory for directory in directories if store.is_result(directory)]
    if not directories:
        return None
    combined = store.combine(directories)
    tables = gate.judge(root, combined | {"runs": _labelled(combined, labels or {})}, reference_engine)
    store.write_result(root, tables)
    return tables


def _labelled(tables: Mapping[str, pd.DataFrame], labels: Mapping[str, tuple[str | None, str | None]]) -> pd.DataFrame:
    runs = tables["runs"].copy()
    config_of = config_hashes(tables["environment"])
    for at, run_id in zip(runs.index, runs["run_id"], strict=True):
        if (label := labels.get(config_of.get(run_id, ""))) is not None:
            runs.loc[at, ["variable", "arm"]] = [pd.NA if text is None else text for text in label]
    return runs


def config_hashes(environment: pd.DataFrame) -> dict[str, str]:
    """Config hash by run, of those that state one."""
    rows = environment[environment["key"] == "identity.config_hash"].dropna(subset="value")
    return {run_id: str(value).strip('"') for run_id, value in zip(rows["run_id"], rows["value"], strict=True)}


def failed_lines(root: Path) -> list[str]:
    """One line a job that did not end well, and one if some were not started."""
    known = manifest.latest(root)
    states: Sequence[manifest.JobState] = manifest.failures(known)
    found = {s.state for s in known}
    # An interrupted sweep says so in its last line.
    left = [manifest.tally(known)] if "planned" in found and "interrupted" not in found else []
    return left + [f"{s.state}: {'run' if s.job == '.' else s.job}: {s.error or 'did not end'}" for s in states]
