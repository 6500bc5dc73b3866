"""Jobs carried out: each becomes one or more isolated runs, each ending in tables with a row of its own.

Nothing raised in a run leaves this module, except an interrupt: a failed run is a row with its error, so that a
launcher goes on to the next job. On a full disk the row may not be possible; then a line on stderr says so.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from harness import course, journal, manifest, provenance, store
from harness.config import check, config_hash
from harness.course import Course
from harness.errors import RunFailed, one_line
from harness.interruption import by, signal_of
from harness.isolate import Limits, run_isolated
from harness.job import Job, Run, workload_of_iteration
from harness.manifest import JobState
from harness.metrics import compute_tables
from harness.progress import JobDisplay
from harness.record import Outcome, RunRecord
from harness.slo import read_slo

SPEC_FILE = "job.json"
LOG_FILE = "run.log"


def run_job(job: Job) -> str:
    """Measure every run of ``job`` and return its state: ok, failed or timeout.

    Raises:
        KeyboardInterrupt: after the interrupted run's row was written.
    """
    return run_jobs([job])[0]


def run_jobs(jobs: Sequence[Job]) -> list[str]:
    """The same for jobs that share each of their processes: they differ in workload, arrival and SLO alone."""
    states: list[tuple[str, str | None]]
    shared = _Shared(jobs)
    try:
        for job in jobs:
            job.directory.mkdir(parents=True, exist_ok=True)
        shared.begin(0)
        for job in jobs:
            check(job.config)
        states = _run_repeats(shared)
    except KeyboardInterrupt as interrupt:
        for k, job in enumerate(jobs):
            if k in shared.begun - shared.ended:
                _keep(job, "what its repeats measured", partial(_combine_runs, job, shared.directories[k]))
                how = ("ok", None) if shared.is_complete(k) else ("interrupted", by(signal_of(interrupt)))
                shared.close(k, *how)
        raise
    except Exception as error:  # a launcher must see a state, not an exception
        cause, detail = one_line(error), traceback.format_exc()
        states = [("failed", cause)] * len(jobs)
        for k, job in enumerate(jobs):
            _write_failed_row(Run(k, job, job.repeats[0], 0), job.directory, RunFailed(cause, detail))
    return [shared.close(k, *state) for k, state in enumerate(states)]


class _Shared:
    """Jobs of one process as they begin and end.

    Attributes:
        begun, ended: their indices.
        directories: by job, the folders of its runs so far.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.begun: set[int] = set()
        self.ended: set[int] = set()
        self.directories: list[list[Path]] = [[] for _ in jobs]
        self._left = [len(job.repeats) * job.config["measure"]["runs_per_process"] for job in jobs]

    def begin(self, k: int) -> None:
        if k not in self.begun:
            self.begun.add(k)
            _keep(self.jobs[k], "its state", partial(_note, self.jobs[k], "running"))

    def written(self, k: int) -> None:
        """A run of it has ended well. A job among others ends with its last one, not with the process."""
        self._left[k] -= 1
        if len(self.jobs) == 1 or not self.is_complete(k):
            return
        if _keep(self.jobs[k], "its joined tables", partial(_combine_runs, self.jobs[k], self.directories[k])):
            self.close(k, "ok", None)

    def is_complete(self, k: int) -> bool:
        """Whether every run of it has ended well and is written."""
        return not self._left[k]

    def close(self, k: int, state: str, cause: str | None) -> str:
        """Note how it ended; the state that counts."""
        if k in self.ended:
            return "ok"
        kept = _keep(self.jobs[k], "its state", partial(_note, self.jobs[k], state, cause))
        if kept and state == "ok":
            self.ended.add(k)
        return state if kept else "failed"


def _run_repeats(shared: _Shared) -> list[tuple[str, str | None]]:
    """Measure one process after the other; by job, the first bad state."""
    jobs = shared.jobs
    states: list[list[tuple[str, str | None]]] = [[] for _ in jobs]
    lasted: list[float] = []
    for repeat in jobs[0].repeats:
        iterations = range(jobs[0].config["measure"]["runs_per_process"])
        runs = [Run(k, job, repeat, iteration) for k, job in enumerate(jobs) for iteration in iterations]
        for run in runs:
            shared.directories[run.owner].append(run.directory)
        began = time.monotonic()
        for run, state in zip(runs, _run_process(runs, shared, tuple(lasted)), strict=True):
            states[run.owner].append(state)
        lasted.append(time.monotonic() - began)
    for k, job in enumerate(jobs):
        if k not in shared.ended:
            _combine_runs(job, shared.directories[k])
    return [next((s for s in own if s[0] != "ok"), ("ok", None)) for own in states]


def _combine_runs(job: Job, directories: Sequence[Path]) -> None:
    """Join the tables of the runs that left any; nothing to do for a job that is one run."""
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


class _Follower:
    """What the messages of a process say about its runs."""

    def __init__(self, runs: Sequence[Run], shared: _Shared, lasted: Sequence[float]) -> None:
        self._runs, self._shared, self._lasted = runs, shared, lasted
        self._began = time.monotonic()
        self.display = JobDisplay(runs[0].title, self.course)
        self.written: set[int] = set()
        self.current = 0
        self._failed: int | None = None

    def take(self, message: Mapping[str, Any]) -> None:
        run = int(message.get("run", self.current))
        if run != self.current:
            self.current, self._began = run, time.monotonic()
            self._shared.begin(self._runs[run].owner)
            self.display.begin(self._runs[run].title)
        self.display.update(message)
        if "error" in message:
            self._failed = run
        if message.get("written"):
            self.written.add(run)
            if "error" not in message:
                later = self._runs[run + 1 :]
                last = all(r.owner != self._runs[run].owner for r in later)
                self.display.note(_headline(self._runs[run].directory), last=last)
                self._shared.written(self._runs[run].owner)

    def course(self) -> Course:
        """How far the command is; jobs that a sweeper chooses count their own repeats."""
        job, elapsed_s = self._runs[self.current].job, time.monotonic() - self._began
        if job.place is None:
            return course.of_repeats(self._lasted, len(job.repeats), elapsed_s)
        return course.of_sweep(job.root, job.name, elapsed_s)

    @property
    def failed(self) -> int:
        """The run in which the process failed: the one that said so, else the first that is not in its tables."""
        if self._failed is not None:
            return self._failed
        return min(self.current + (self.current in self.written), len(self._runs) - 1)


def _run_process(runs: Sequence[Run], shared: _Shared, lasted: Sequence[float]) -> list[tuple[str, str | None]]:
    """Measure ``runs`` in one process; how each ended, with the cause where it did not end well.

    Args:
        lasted: seconds that the processes before took.
    """
    first = runs[0]
    measure = first.job.config["measure"]
    specs = [_specify(run, process=_process_name(first)) for run in runs]
    log = first.directory / LOG_FILE
    follower = _Follower(runs, shared, lasted)
    with follower.display as display:
        limits = Limits(measure["start_timeout_s"], measure["timeout_s"])
        try:
            run_isolated(specs, log, limits, follower.take, first.job.config["engine"].get("env") or {})
        except RunFailed as failure:
            bad = follower.failed
            if bad not in follower.written:  # it may have ended in order, with all it measured in its tables
                _write_failed_row(runs[bad], runs[bad].directory, failure)
            display.finish(f"{failure.status}: {failure.cause} (log: {log})", well=False)
            missed = f"not measured: its process ended in an earlier run: {failure.cause}"
            for run in runs[bad + 1 :]:
                _write_failed_row(run, run.directory, RunFailed(missed))
            after = [("failed", missed)] * (len(runs) - bad - 1)
            return [("ok", None)] * bad + [(failure.status, failure.cause), *after]
        except KeyboardInterrupt as interrupt:
            at = runs[follower.current]
            if follower.current not in follower.written:
                _write_failed_row(at, at.directory, RunFailed(by(signal_of(interrupt)), status="interrupted"))
            ended = store.ended_requests(at.directory)
            point = f"after {ended[0]} of {ended[1]} requests" if ended else "before the first request"
            display.finish(f"interrupted {point}", goes_on=False)
            raise
    return [("ok", None)] * len(runs)


def _process_name(first: Run) -> str:
    return f"{first.job.stamp}-{first.job.number or 0:03d}-r{first.repeat}"


def _specify(run: Run, process: str) -> Path:
    """Write the specification of a run into its folder, which is made; the file."""
    directory, job = run.directory, run.job
    directory.mkdir(parents=True, exist_ok=True)
    journal.discard(directory)  # of an earlier attempt
    groups = ("engine", "model", "arrival", "generation", "measure", "slo")
    specification = {
        "identity": job.identity(run.repeat, run.iteration, process),
        **{group: job.config[group] for group in groups},
        "workload": workload_of_iteration(job.config, run.iteration),
        "command_line": _command_line(job.overrides),
        "out": str(directory.resolve()),
    }
    path = directory / SPEC_FILE
    path.write_text(json.dumps(specification, indent=1))
    return path


def _command_line(overrides: Sequence[str]) -> list[str]:
    """The command that repeats one job by itself: the job's own overrides, without the sweep around them."""
    return ["cb-bench", *overrides]


def _write_failed_row(run: Run, directory: Path, failure: RunFailed) -> None:
    """The tables of a run that left none, with its cause; said on stderr if even they cannot be written."""
    what = f"the row of its failure ({failure.cause})"
    _keep(run.job, what, lambda: _try_failed_row(run, directory, failure))


def _try_failed_row(run: Run, directory: Path, failure: RunFailed) -> None:
    if failure.detail:
        with suppress(OSError):  # the row says what matters most
            _log(directory, failure.detail)
    for unfinished in directory.glob(".partial-*"):  # of a child that was ended while writing
        shutil.rmtree(unfinished, ignore_errors=True)
    job = run.job
    bare = RunRecord(
        identity=job.identity(run.repeat, run.iteration),
        environment={"command_line": _command_line(job.overrides), **provenance.collect()},
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
    record.status = failure.status
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
