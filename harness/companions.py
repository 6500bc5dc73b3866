"""Jobs of a sweep that run in another job's process (``measure.share_process``).

A launcher starts the first one; what it needs to know of the others is in a file of the sweep's folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.blocks import Place
from harness.expand import PlannedJob, process_key
from harness.job import Job

_FOLDER = ".companions"


def processes(jobs: Sequence[PlannedJob]) -> list[list[PlannedJob]]:
    """Planned jobs in order, those of one process together."""

    def own(job: PlannedJob) -> Any:
        alone = None if job.config["measure"]["share_process"] else job.name
        return (job.place.block, job.place.replica, process_key(job.config), alone)

    return [list(members) for _, members in groupby(jobs, own)]


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
