"""Going on with a sweep that was not finished: which folder, and which of its runs are still to be made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import manifest, store
from harness.config import config_hash
from harness.expand import PlannedJob
from harness.manifest import JobState
from harness.provenance import REVISION_KEYS, code_names
from harness.sweep import config_hashes


def unfinished_sweep(directory: Path, named: bool) -> Path:
    """The folder of the sweep that ``resume=true`` means.

    Args:
        directory: where the command would write without it.
        named: whether the user named that folder; else the newest sweep beside it is meant.

    Raises:
        ValueError: there is none; says how to name one.
    """
    if named:
        if not manifest.latest(directory):
            raise ValueError(f"resume=true: {directory} holds no sweep to go on with (it has no {manifest.FILE})")
        return directory
    earlier = sorted(path.parent for path in directory.parent.glob(f"*/{manifest.FILE}"))
    if not earlier:
        raise ValueError(
            f"resume=true: no earlier sweep in {directory.parent}; name its folder with hydra.sweep.dir=…, or leave "
            "resume away to start"
        )
    return earlier[-1]


def left_open(directory: Path, jobs: Sequence[PlannedJob]) -> tuple[tuple[JobState, ...], tuple[str, ...]]:
    """Runs of ``jobs`` that the manifest does not call measured although all of their requests had ended.

    Returns:
        the states of those that are whole: the command had no time to note that they were written.
        the names of those that are not: an interrupt came before the measurement was closed, so that step log, counters
        and memory are missing, and beside whole runs they would be compared without them.
    """
    runs_of = {config_hash(job.config): int(job.config["measure"]["runs_per_process"]) for job in jobs}
    whole, unclosed = [], []
    for state in manifest.latest(directory):
        folder, expected = directory / state.job, runs_of.get(state.config_hash)
        if state.state not in ("running", "interrupted") or expected is None or not store.is_result(folder):
            continue
        tables = store.read_result(folder, ("runs", "environment"))
        if set(config_hashes(tables["environment"]).values()) != {state.config_hash}:
            continue
        counts = store.ended_requests(folder)
        if len(tables["runs"]) == expected and (tables["runs"]["status"] == "ok").all():
            written = datetime.fromtimestamp((folder / store.MARKER).stat().st_mtime, UTC).isoformat(timespec="seconds")
            whole.append(replace(state, state="ok", time=written, error=None))
        elif counts is not None and counts[0] == counts[1]:
            unclosed.append(state.job)
    return tuple(whole), tuple(unclosed)


def remaining(directory: Path, jobs: Sequence[PlannedJob], whole: Sequence[JobState] = ()) -> tuple[PlannedJob, ...]:
    """Those of ``jobs`` whose config has not yet been measured in their block, failed ones among them.

    Args:
        whole: measured ones that the manifest does not call so, see :func:`left_open`.

    Raises:
        ValueError: a job would write into the folder of another one that is finished.
    """
    measured = [*(s for s in manifest.latest(directory) if s.state == "ok"), *whole]
    finished = Counter((s.config_hash, s.block) for s in measured)
    left = []
    for job in jobs:
        key = (config_hash(job.config), job.place.block)
        if finished[key] > 0:
            finished[key] -= 1
        else:
            left.append(job)
    taken = {s.job for s in measured}
    if clash := [job.name for job in left if job.name in taken]:
        raise ValueError(
            f"resume=true: {directory} was planned otherwise (its {clash[0]} was measured in another block): start a "
            "new sweep"
        )
    return tuple(left)


def labels(jobs: Sequence[PlannedJob]) -> dict[str, tuple[str | None, str | None]]:
    """By config hash, the variable and the arm's value: a sweep that is widened may name what it measured otherwise."""
    return {config_hash(job.config): (job.config["experiment"]["variable"], job.value) for job in jobs}


def notices(
    directory: Path, jobs: Sequence[PlannedJob], source: Mapping[str, Any], unclosed: Sequence[str] = ()
) -> list[str]:
    """What a user must know before measured runs get others beside them, a sentence each.

    Args:
        jobs: all of the plan, measured ones too.
        source: the source that would measure what is left (``provenance.own_revision``).
        unclosed: runs that are made again, see :func:`left_open`.
    """
    lines = []
    if unclosed:
        lines.append(
            f"resume=true: measured again although all of its requests had ended: {', '.join(unclosed)}: interrupted "
            "before step log, counters and memory were written"
        )
    begun, planned = manifest.begun_with(directory), {config_hash(job.config) for job in jobs}
    if begun and begun != planned:
        variable = jobs[0].config["experiment"]["variable"] if jobs else None
        lines.append(
            f"resume=true: this plan is not the one that {directory.name} was begun with ({len(planned - begun)} "
            f"configs more, {len(begun - planned)} left out): what both hold is named by this plan's variable "
            f"({variable or 'none'}), and ratios stay those to the arm that the first plan compares with"
        )
    current, *measured = code_names([source, *_measured_by(directory)])
    if current is not None and (other := sorted({name for name in measured if name not in (None, current)})):
        lines.append(
            f"resume=true: runs in {directory.name} were measured with different code ({', '.join(other)}; now "
            f"{current}): a difference between their arms and those to come may be that. Start a new sweep to compare"
        )
    return lines


def _measured_by(directory: Path) -> list[dict[str, Any]]:
    """The source revisions of all measured runs."""
    found: list[dict[str, Any]] = []
    for state in manifest.latest(directory):
        if state.state != "ok" or not store.is_result(directory / state.job):
            continue
        environment = store.read_result(directory / state.job, ("environment",))["environment"]
        rows = environment[environment["key"].isin(REVISION_KEYS)].dropna(subset="value")
        for _, own in rows.groupby("run_id"):
            found.append({key: json.loads(value) for key, value in zip(own["key"], own["value"], strict=True)})
    return found
