"""One job: a composed config becomes one or more isolated runs, each ending in tables with a row of its own.

Nothing raised in a run leaves this module (except Ctrl-C): a failed run is a row with its error, so that a launcher
goes on to the next job. On a full disk the row may not be possible; then a line on stderr says so.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import course, journal, manifest, provenance, store
from harness.blocks import Place
from harness.config import check, config_hash
from harness.course import Course
from harness.errors import RunFailed, one_line
from harness.isolate import Limits, run_isolated
from harness.manifest import JobState
from harness.metrics import compute_tables
from harness.progress import JobDisplay
from harness.record import Outcome, RunRecord
from harness.slo import read_slo

SPEC_FILE = "job.json"
LOG_FILE = "run.log"


@dataclass(frozen=True, slots=True)
class Job:
    """What to run and where.

    Attributes:
        config: the resolved config of the job as plain values.
        directory: where its results go.
        root: where its manifest is; ``directory`` itself for a single run, the sweep's directory otherwise.
        overrides: command-line overrides that made this config.
        number: index within the sweep; None for a single run.
        arm: value of the experiment's variable in this job; None for a single run.
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
        what = f"{self.config['engine']['name']}, {self.config['model']['name']}, {self.config['workload']['name']}"
        if self.number is None:
            return what
        again = " again" if self.place is not None and self.place.replica else ""
        block = f" block {self.place.block}" if self.place and self.config["measure"]["repeats"] > 1 else ""
        return f"#{self.number} {self.config['experiment']['variable'] or 'run'}={self.arm}{again}{block} ({what})"

    @property
    def repeats(self) -> Sequence[int]:
        """Indices of the runs this job does itself: all of them, or the one of its block."""
        return range(self.config["measure"]["repeats"]) if self.place is None else (self.place.block,)

    def identity(self, repeat: int) -> dict[str, Any]:
        """What the run is called in the tables."""
        experiment = self.config["experiment"]
        digest = config_hash(self.config)
        number = "" if self.number is None else f"{self.number:03d}-"
        return {
            "run_id": f"{self.stamp}-{number}{digest}-r{repeat}",
            "experiment": experiment["name"],
            "question": experiment["question"],
            "variable": experiment["variable"],
            "arm": self.arm,
            "arm_index": None if self.place is None else self.place.arm,
            "repeat": repeat,
            "block": None if self.place is None else self.place.block,
            "position": None if self.place is None else self.place.position,
            "replica": None if self.place is None else self.place.replica,
            "engine": self.config["engine"]["name"],
            "model": self.config["model"]["name"],
            "workload": self.config["workload"]["name"],
            "seed": self._workload_seed(),
            "config_hash": digest,
            "overrides": list(self.overrides),
        }

    @property
    def name(self) -> str:
        """What the manifest calls it: its directory relative to the sweep's, "." for a single run."""
        return "." if self.directory == self.root else str(self.directory.relative_to(self.root))

    def _workload_seed(self) -> int:
        seed = self.config["workload"].get("seed")
        return int(self.config["measure"]["seed"] if seed is None else seed)


def run_job(job: Job) -> str:
    """Measure every repeat of ``job`` and return its state: ok, failed or timeout.

    Raises:
        KeyboardInterrupt: after the interrupted run's row was written.
    """
    directories: list[Path] = []
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        _note(job, "running")
        state, cause = _run_repeats(job, directories)
    except KeyboardInterrupt:
        _keep(job, "what its repeats measured", lambda: _combine_repeats(job, directories))
        _keep(job, "its state", lambda: _note(job, "interrupted", "interrupted by Ctrl-C"))
        raise
    except Exception as error:  # a launcher must see a state, not an exception
        state, cause = "failed", one_line(error)
        _write_failed_row(job, job.repeats[0], job.directory, RunFailed(cause, traceback.format_exc()))
    if not _keep(job, "its state", lambda: _note(job, state, cause)):
        return "failed"
    return state


def _run_repeats(job: Job, directories: list[Path]) -> tuple[str, str | None]:
    """Measure one repeat after the other, each in a folder that is added to ``directories``; the first bad state."""
    check(job.config)
    states = []
    lasted: list[float] = []
    for repeat in job.repeats:
        directory = job.directory if len(job.repeats) == 1 else job.directory / f"repeat-{repeat}"
        directories.append(directory)
        began = time.monotonic()
        states.append(_run_once(job, repeat, directory, _course(job, tuple(lasted), began)))
        lasted.append(time.monotonic() - began)
    _combine_repeats(job, directories)
    return next((s for s in states if s[0] != "ok"), ("ok", None))


def _course(job: Job, lasted: Sequence[float], began: float) -> Callable[[], Course]:
    """How far the command is, seen from a run that began then; jobs that a sweeper chooses count their own repeats."""
    if job.place is None:
        return lambda: course.of_repeats(lasted, len(job.repeats), time.monotonic() - began)
    return lambda: course.of_sweep(job.root, job.name, time.monotonic() - began)


def _combine_repeats(job: Job, directories: Sequence[Path]) -> None:
    """Join the tables of the repeats that left any; nothing to do for a job that is one run."""
    complete = [d for d in directories if d != job.directory and store.is_result(d)]
    if complete:
        store.write_result(job.directory, store.combine(complete))


def _keep(job: Job, what: str, write: Callable[[], None]) -> bool:
    """Call ``write``; if the disk refuses (full, read-only), say on stderr what was lost. Whether it was written."""
    try:
        write()
    except OSError as error:
        with suppress(OSError):
            print(f"cb-bench: {job.title}: {what} could not be written: {one_line(error)}", file=sys.stderr)
        return False
    return True


def _run_once(job: Job, repeat: int, directory: Path, where: Callable[[], Course]) -> tuple[str, str | None]:
    measure = job.config["measure"]
    title = job.title if len(job.repeats) == 1 else f"{job.title} repeat {repeat}"
    directory.mkdir(parents=True, exist_ok=True)
    journal.discard(directory)  # of an earlier attempt
    spec = directory / SPEC_FILE
    spec.write_text(json.dumps(_specification(job, repeat, directory), indent=1))
    written, ended = False, 0

    def on_message(message: Mapping[str, Any]) -> None:
        nonlocal written, ended
        written = written or bool(message.get("written")) or message.get("phase") == "done"
        ended = message.get("ended", ended)
        display.update(message)

    with JobDisplay(title, where) as display:
        try:
            run_isolated(
                spec, directory / LOG_FILE, Limits(measure["start_timeout_s"], measure["timeout_s"]), on_message
            )
        except RunFailed as failure:
            if not written:  # the child may have ended in order, with all it measured in its tables
                _write_failed_row(job, repeat, directory, failure)
            display.finish(f"{failure.status}: {failure.cause} (log: {directory / LOG_FILE})")
            return failure.status, failure.cause
        except KeyboardInterrupt:
            if not written:
                _write_failed_row(job, repeat, directory, RunFailed("interrupted by Ctrl-C"))
            display.finish(f"interrupted after {ended} requests", goes_on=False)
            raise
        display.finish(_headline(directory))
    return "ok", None


def _specification(job: Job, repeat: int, directory: Path) -> dict[str, Any]:
    groups = ("engine", "model", "arrival", "workload", "generation", "measure", "slo")
    return {
        "identity": job.identity(repeat),
        **{group: job.config[group] for group in groups},
        "command_line": _command_line(job.overrides),
        "out": str(directory.resolve()),
    }


def _command_line(overrides: Sequence[str]) -> list[str]:
    """The command that repeats one job by itself: the job's own overrides, without the sweep around them."""
    return ["cb-bench", *overrides]


def _write_failed_row(job: Job, repeat: int, directory: Path, failure: RunFailed) -> None:
    """The tables of a run that left none, with its cause; said on stderr if even they cannot be written."""
    _keep(job, f"the row of its failure ({failure.cause})", lambda: _try_failed_row(job, repeat, directory, failure))


def _try_failed_row(job: Job, repeat: int, directory: Path, failure: RunFailed) -> None:
    if failure.detail:
        with suppress(OSError):  # the row says what matters most
            _log(directory, failure.detail)
    for partial in directory.glob(".partial-*"):  # of a child that was ended while writing
        shutil.rmtree(partial, ignore_errors=True)
    bare = RunRecord(
        identity=job.identity(repeat), environment=provenance.collect(_command_line(job.overrides), device=None)
    )
    record = journal.recover(directory) or bare  # bare: it had not begun to measure
    record.error = failure.cause + _kept(record)
    try:
        tables = _failed_tables(job, record, failure)
    except Exception as error:  # what was measured broke the run, and its tables too
        bare.error = f"{record.error}; its measurements cannot be computed, see {journal.FILE}: {one_line(error)}"
        store.write_result(directory, _failed_tables(job, bare, failure))
        return
    store.write_result(directory, tables)
    journal.discard(directory)


def _failed_tables(job: Job, record: RunRecord, failure: RunFailed) -> dict[str, Any]:
    record.status = "timeout" if failure.status == "timeout" else "failed"
    record.slo = read_slo(job.config["slo"])
    return compute_tables(record)


def _kept(record: RunRecord) -> str:
    if not record.requests:
        return ""
    ended = sum(r.outcome is not Outcome.UNFINISHED for r in record.requests)
    return f"; {ended} of {len(record.requests)} requests had ended"


def _log(directory: Path, text: str) -> None:
    """Add ``text`` to the run's log unless it is there already."""
    path = directory / LOG_FILE
    known = path.read_text(errors="replace") if path.is_file() else ""
    if text.strip() not in known:
        with path.open("a") as log:
            log.write(text.rstrip() + "\n")


def _headline(directory: Path) -> str:
    row = store.read_result(directory, ("runs",))["runs"].iloc[0]
    failed = f", {row.n_failed} failed ({row.outcomes})" if row.n_failed else ""
    rate = "unknown tok/s (see n_uncounted)" if row.isna()["gen_tok_s"] else f"{row.gen_tok_s:,.1f} tok/s"
    return (
        f"{row.n_ok}/{row.n_requests} requests ok{failed}, {rate}, "
        f"TTFT p50 {row.ttft_p50_ms:,.0f} ms, {row.wall_s:.1f} s"
    )


def _note(job: Job, state: str, error: str | None = None) -> None:
    job.root.mkdir(parents=True, exist_ok=True)
    place = (None, None) if job.place is None else (job.place.block, job.place.position)
    digest = config_hash(job.config)
    manifest.append(job.root, JobState(job.name, digest, job.overrides, state, manifest.now(), error, *place))
