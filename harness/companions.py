"""Jobs of a sweep that run in another job's process (``measure.share_process``).

A launcher starts the first one; what it needs to know of the others is in a file of the sweep's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.blocks import Place
from harness.expand import PlannedJob, process_key
from harness.job import Job, workload_of_iteration
from harness.shared_prompts import refuse_shared_prompts
from workloads.build import build_workload

_FOLDER = ".companions"
_VOCABULARY = 1 << 17
"""Stands for a model's before one is loaded: prompts of different seeds are as good as never equal in it."""


def processes(jobs: Sequence[PlannedJob]) -> list[list[PlannedJob]]:
    """Planned jobs in order, those of one process together."""

    def own(job: PlannedJob) -> Any:
        alone = None if job.config["measure"]["share_process"] else job.name
        return (job.place.block, job.place.replica, process_key(job.config), alone)

    return [list(members) for _, members in groupby(jobs, own)]


def check_prompts(jobs: Sequence[PlannedJob]) -> None:
    """Refuse a sweep in which a process would measure prompts that it has seen, before anything has started.

    Which prompts are equal is a matter of seeds and hardly of the model, so none is loaded. What reads a file is left
    to the process, which looks again: a recording takes long to read, and texts need the model's tokenizer.

    Raises:
        ValueError: as `harness.shared_prompts.refuse_shared_prompts`, or a workload that cannot be built.
    """
    checked: list[list[Mapping[str, Any]]] = []
    for members in processes(jobs):
        specs = [spec for job in members for spec in _specs(job.config)]
        if len(specs) < 2 or specs in checked:
            continue
        checked.append(specs)
        refuse_shared_prompts(
            [
                build_workload(spec["workload"], spec["arrival"], vocab_size=_VOCABULARY, seed=spec["seed"])
                for spec in specs
            ]
        )


def _specs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the workloads of a job are made of, one a run; [] if that is in a file."""
    if config["workload"].get("path") is not None:
        return []
    return [
        {
            "workload": workload_of_iteration(config, i),
            "arrival": config["arrival"],
            "seed": config["measure"]["seed"],
        }
        for i in range(config["measure"]["runs_per_process"])
    ]


def write(root: Path, members: Sequence[PlannedJob]) -> tuple[str, ...]:
    """Leave the companions of the first of ``members`` for :func:`read`; arguments for it that say so."""
    if len(members) == 1:
        return ()
    folder = root / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    known = [
        {
            "config": {**job.config, "experiment": {**job.config["experiment"], **asdict(job.place)}},
            "name": job.name,
            "overrides": list(job.overrides),
            "number": number_of(job),
            "arm": job.value,
            "place": asdict(job.place),
        }
        for job in members[1:]
    ]
    _file(root, number_of(members[0])).write_text(json.dumps(known, default=str))
    return (f"experiment.companions={len(known)}",)


def read(root: Path, number: int, stamp: str) -> list[Job]:
    """The companions of job ``number``."""
    return [
        Job(
            config=known["config"],
            directory=root / known["name"],
            root=root,
            overrides=tuple(known["overrides"]),
            number=known["number"],
            arm=known["arm"],
            stamp=stamp,
            place=Place(**known["place"]),
        )
        for known in json.loads(_file(root, number).read_text())
    ]


def number_of(job: PlannedJob) -> int:
    """The planned number of a job."""
    (stated,) = (a for a in job.arguments if a.startswith("experiment.number="))
    return int(stated.partition("=")[2])


def _file(root: Path, number: int) -> Path:
    return root / _FOLDER / f"{number}.json"
