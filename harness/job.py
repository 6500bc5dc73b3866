"""What to run: a composed config as a job, and each measured run of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.blocks import Place
from harness.config import config_hash


@dataclass(frozen=True, slots=True)
class Job:
    """What to run and where.

    Attributes:
        config: the resolved config of the job as plain values.
        directory: where its results go.
        root: where its manifest is; ``directory`` itself for a single run, the sweep's directory otherwise.
        overrides: command-line overrides that made this config.
        number: index within the sweep; None for a single run.
        arm: value of the experiment's variable in this job, of a single run its choice of engine; None if the sweep
            names no variable.
        stamp: when this job was started (UTC, ``YYYYmmddTHHMMSS``), part of its run ids.
        place: where it stands in the order of a sweep, where it is one run; None: it does all its repeats by itself.
    """

    config: Mapping[str, Any]
    directory: Path
    root: Path
    overrides: tuple[str, ...]
    number: int | None
    arm: str | None
    stamp: str
    place: Place | None = None

    @property
    def title(self) -> str:
        """For people: number and what distinguishes the job."""
        model_and_workload = f"{self.config['model']['name']}, {self.config['workload']['name']}"
        if self.number is None:
            return f"{self.arm or self.config['engine']['name']}, {model_and_workload}"
        what = f"{self.config['engine']['name']}, {model_and_workload}"
        again = " again" if self.place is not None and self.place.replica else ""
        block = f" block {self.place.block}" if self.place and self.config["measure"]["repeats"] > 1 else ""
        return f"#{self.number} {self.config['experiment']['variable'] or 'run'}={self.arm}{again}{block} ({what})"

    @property
    def repeats(self) -> Sequence[int]:
        """Indices of the processes this job starts itself: all of them, or the one of its block."""
        return range(self.config["measure"]["repeats"]) if self.place is None else (self.place.block,)

    def identity(self, repeat: int, iteration: int = 0, process: str | None = None) -> dict[str, Any]:
        """What the run is called in the tables.

        Args:
            iteration: which of the runs that one process makes of this job.
            process: name of that process, the same for all its runs.
        """
        experiment = self.config["experiment"]
        digest = config_hash(self.config)
        number = "" if self.number is None else f"{self.number:03d}-"
        again = f".{iteration}" if self.config["measure"]["runs_per_process"] > 1 else ""
        return {
            "run_id": f"{self.stamp}-{number}{digest}-r{repeat}{again}",
            "experiment": experiment["name"],
            "question": experiment["question"],
            "variable": experiment["variable"],
            "arm": self.arm,
            "arm_index": None if self.place is None else self.place.arm,
            "repeat": repeat,
            "iteration": iteration,
            "process": process,
            "block": None if self.place is None else self.place.block,
            "position": None if self.place is None else self.place.position,
            "replica": None if self.place is None else self.place.replica,
            "engine": self.config["engine"]["name"],
            "model": self.config["model"]["name"],
            "workload": self.config["workload"]["name"],
            "seed": _workload_seed(self.config) + iteration,
            "config_hash": digest,
            "overrides": list(self.overrides),
        }

    @property
    def name(self) -> str:
        """What the manifest calls it: its directory relative to the sweep's, "." for a single run."""
        return "." if self.directory == self.root else str(self.directory.relative_to(self.root))


def workload_of_iteration(config: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """The group ``workload`` of an iteration of a job: the seed of the first plus the index: prompts of its own."""
    given = dict(config["workload"])
    return given if iteration == 0 else given | {"seed": _workload_seed(config) + iteration}


def _workload_seed(config: Mapping[str, Any]) -> int:
    seed = config["workload"].get("seed")
    return int(config["measure"]["seed"] if seed is None else seed)


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run of a job.

    Attributes:
        owner: index of its job among those that share the process.
        repeat, iteration: see :meth:`Job.identity`.
    """

    owner: int
    job: Job
    repeat: int
    iteration: int

    @property
    def directory(self) -> Path:
        """Where its tables go: the job's folder, or one in it where the job is several runs."""
        folder = self.job.directory
        if len(self.job.repeats) > 1:
            folder = folder / f"repeat-{self.repeat}"
        return folder / f"run-{self.iteration}" if self.job.config["measure"]["runs_per_process"] > 1 else folder

    @property
    def title(self) -> str:
        """For people."""
        repeat = f" repeat {self.repeat}" if len(self.job.repeats) > 1 else ""
        iteration = f" run {self.iteration}" if self.job.config["measure"]["runs_per_process"] > 1 else ""
        return f"{self.job.title}{repeat}{iteration}"
