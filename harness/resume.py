"""Going on with a sweep that was not finished: which folder, and which of its runs are still to be made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness import manifest
from harness.config import config_hash
from harness.expand import PlannedJob


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


def remaining(directory: Path, jobs: Sequence[PlannedJob]) -> tuple[PlannedJob, ...]:
    """Those of ``jobs`` whose config has not yet been measured in their block, failed ones among them.

    Raises:
        ValueError: a job would write into the folder of another one that is finished.
    """
    states = manifest.latest(directory)
    finished = Counter((s.config_hash, s.block) for s in states if s.state == "ok")
    left = []
    for job in jobs:
        key = (config_hash(job.config), job.place.block)
        if finished[key] > 0:
            finished[key] -= 1
        else:
            left.append(job)
    taken = {s.job for s in states if s.state == "ok"}
    if clash := [job.name for job in left if job.name in taken]:
        raise ValueError(
            f"resume=true: {directory} was planned otherwise (its {clash[0]} was measured in another block): start a "
            "new sweep"
        )
    return tuple(left)
