"""``cb-bench``: the command line. Hydra composes and fans out, this module runs what was planned and closes it.

Everything that can be wrong with a command is found before anything runs: the configs of all jobs are composed once
(:mod:`harness.plan`), errors in them become one line with the nearest right name (:mod:`harness.explain`), and only
then Hydra's own entry point is called.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from harness import companions, gate, manifest, store
from harness.arguments import as_hydra_reads, asked_about, only_shows
from harness.blocks import Place
from harness.check import check_engines
from harness.compose import CONFIG_MODULE, CONFIG_NAME, composing
from harness.config import config_hash, plain
from harness.errors import one_line
from harness.estimate import PlannedRun, history, listing
from harness.execution import run_jobs
from harness.expand import shown_overrides
from harness.explain import explain
from harness.gpus import VISIBLE, gpu_count, host_locks, own_gpu, visible_gpus
from harness.interruption import by, exit_code, interrupting, signal_of
from harness.job import Job
from harness.launch import launch
from harness.manifest import JobState
from harness.plan import Plan, make_plan, pinned
from harness.progress import waiting_for
from harness.provenance import own_revision
from harness.resume import labels, left_open, notices, remaining
from harness.sweep import arm, check_unused, combine_jobs, failed_lines, kept_line, measured_folders
from harness.used_device import used_kinds

EXIT_FAILED, EXIT_USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cb-bench`` and return its exit code: 0 ok, 1 a run failed, 2 wrong command or config, 128
    and the number of the signal that interrupted it."""
    arguments = as_hydra_reads(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:  # Hydra would give its own
        print(f"cb-bench {_version()}")
        return 0
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    plan: Plan | None = None
    try:
        with _hydra_raises(), interrupting(), _said():
            if only_shows(arguments):
                from harness.config_reference import about, register_overview

                if names := asked_about(arguments):
                    print(about(names))
                    return 0
                register_overview()
                _hydra_main(arguments)
                return 0
            plan = make_plan(arguments)
            if not plan.resumed:
                check_unused(plan.directory)
            with waiting_for("importing libraries, checking settings"):
                unfit = check_engines(plan.configs)
            for line in unfit:
                print(f"cb-bench: will fail: {line}", file=sys.stderr)
            plan = pinned(plan)
            finished = len(plan.jobs)
            whole: Sequence[JobState] = ()
            if plan.resumed:
                whole, unclosed = left_open(plan.directory, plan.jobs)
                for line in notices(plan.directory, plan.jobs, own_revision(), unclosed):
                    print(f"cb-bench: {line}", file=sys.stderr)
                plan = replace(plan, jobs=remaining(plan.directory, plan.jobs, whole), labels=labels(plan.jobs))
            finished -= len(plan.jobs)
            if plan.configs[0]["dry_run"]:
                _list(plan, finished)
                return 0
            if finished:
                going_on = (
                    f"going on with {_shown(plan.directory)}: {finished} runs are measured, {len(plan.jobs)} to go"
                )
                print(going_on, flush=True)  # before what runs say, also in a file
            _prepare(plan, whole)
            try:
                _run(plan)
            finally:
                code = _close(plan)
            return code
    except KeyboardInterrupt as interrupt:
        kept = kept_line(plan.directory) if plan else "nothing had begun"
        if plan and plan.multirun and _more_to_do(plan.directory):
            kept += "; the same command with resume=true goes on"
        _complain(f"{by(signal_of(interrupt))}; {kept}")
        return exit_code(interrupt)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if full_error:
            raise
        print(f"cb-bench: {explain(error, arguments)}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:  # a full disk, a folder that was taken away: found while running
        if full_error:
            raise
        print(f"cb-bench: {_what_failed(error, plan)}", file=sys.stderr)
        return EXIT_FAILED


def _what_failed(error: OSError, plan: Plan | None) -> str:
    """Which of the command's places could not be used, and what that means for its results."""
    begun = plan is not None and not plan.configs[0]["dry_run"]
    if not _can_say():
        what = f"what it says could not be written to its standard output ({error.strerror})"
        _say_nothing_more()
    elif not _current_folder_is_there():
        what = "the current folder has been removed: change to one that exists"
    elif begun:
        return f"{one_line(error)}; results could not be written completely"
    else:
        return one_line(error)
    return f"{what}; {kept_line(plan.directory)}" if plan is not None and begun else what


def _more_to_do(directory: Path) -> bool:
    """Whether a sweep that was interrupted has runs to measure or tables to join."""
    jobs = manifest.latest(directory)
    return bool(jobs) and not (store.is_result(directory) and all(job.state == "ok" for job in jobs))


def _complain(line: str) -> None:
    """Say it on standard error, behind all that was said on standard output."""
    with suppress(OSError):  # a full disk is told where the command ends
        sys.stdout.flush()
    print(f"cb-bench: {line}", file=sys.stderr)
    sys.stderr.flush()


def _can_say() -> bool:
    """Whether standard output takes an empty line: an error of writing does not say to what."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _say_nothing_more() -> None:
    """Let the rest of the output go nowhere, or the interpreter would fail on it once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _current_folder_is_there() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _said() -> Iterator[None]:
    """What was printed is out, or it is an OSError while it can still be told."""
    yield
    sys.stdout.flush()


def _version() -> str:
    try:
        return importlib.metadata.version("cb-bench")
    except importlib.metadata.PackageNotFoundError:
        return "from a source tree that is not installed"


def _prepare(plan: Plan, whole: Sequence[JobState]) -> None:
    """Make the folder of results and note the jobs of a sweep in its manifest, so that none is forgotten.

    Args:
        whole: jobs of a resumed sweep that were measured but not noted.

    Raises:
        ValueError: it cannot be made.
    """
    directory = plan.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for state in whole:
            manifest.append(directory, state)
        for job in plan.jobs:
            digest, place = config_hash(job.config), (job.place.block, job.place.position)
            state = JobState(job.name, digest, job.overrides, "planned", manifest.now(), None, *place)
            manifest.append(directory, state)
    except OSError as error:
        raise ValueError(
            f"cannot make the folder of results {directory} ({error.strerror}): set results_dir to a folder that can "
            "be written"
        ) from error


@hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME)
def _task(config: DictConfig) -> str:
    """One Hydra job, also in a launcher's worker process. Returns its state and raises nothing but an interrupt."""
    h = HydraConfig.get()
    multirun = h.mode == RunMode.MULTIRUN
    values = plain(config)
    directory = Path(h.runtime.output_dir)
    root = Path(h.sweep.dir).absolute() if multirun else directory
    choices = {k: v for k, v in h.runtime.choices.items() if not k.startswith("hydra/")}
    job = Job(
        config=values,
        directory=directory,
        root=root,
        overrides=shown_overrides(h.overrides.task),
        number=_number(h, values["experiment"]) if multirun else None,
        # Of a single run, which of the engine's settings it had: ours_small beside ours.
        arm=arm(values, choices, values["experiment"]["variable"] if multirun else "engine"),
        stamp=datetime.now(UTC).strftime("%Y%m%dT%H%M%S"),
        place=_place(values["experiment"]),
    )
    jobs = [job]
    if values["experiment"]["companions"]:
        jobs += companions.read(root, int(job.number or 0), job.stamp)
    with _gpu_of(h, values["measure"]["device"]):
        states = run_jobs(jobs)
    return next((state for state in states if state != "ok"), "ok")


def _number(h: Any, experiment: Mapping[str, Any]) -> int:
    """The planned number; a launcher counts only what it was given, and a sweeper of its own plans nothing."""
    return int(h.job.num if experiment["number"] is None else experiment["number"])


def _gpu_of(h: Any, device: str) -> AbstractContextManager[str | None]:
    """A GPU of its own for a job beside which others may run; nothing where jobs run one by one or name a device."""
    alone = h.mode != RunMode.MULTIRUN or str(h.launcher._target_).endswith(f".{BasicLauncher.__name__}")
    if alone or device not in ("auto", "cuda"):
        return nullcontext()
    return own_gpu(int(h.job.num), visible_gpus(os.environ.get(VISIBLE), gpu_count), host_locks())


def _place(experiment: Mapping[str, Any]) -> Place | None:
    if experiment["block"] is None:
        return None
    return Place(**{f.name: experiment[f.name] for f in fields(Place)})


def _run(plan: Plan) -> None:
    """Planned jobs in the planned order; a single run, or jobs that a sweeper chooses as it goes, by Hydra's own."""
    if not plan.jobs:
        if not plan.resumed:  # where all runs are measured already there is nothing to launch
            _hydra_main(plan.arguments)
        return
    with composing():
        running = GlobalHydra.instance().hydra
        assert running is not None  # composing made it
        # What hydra.main decorated: a launcher's worker calls it with a config that is composed already.
        together = companions.processes(plan.jobs)
        arguments = [(*jobs[0].arguments, *companions.write(plan.directory, jobs)) for jobs in together]
        launch(running, CONFIG_NAME, plan.overrides, arguments, _task.__wrapped__)


def _list(plan: Plan, finished: int) -> None:
    """Say what would run, how long it may take and where it would be written."""
    if plan.multirun and not plan.jobs and not plan.resumed:
        raise ValueError("dry_run=true cannot list a sweep whose sweeper decides as it goes")
    together = companions.processes(plan.jobs)
    places = [(job, k > 0) for jobs in together for k, job in enumerate(jobs)]
    devices = used_kinds([job.config for job, _ in places] if plan.multirun else plan.configs)
    if plan.multirun:
        runs = [PlannedRun(job.name, job.config, d, joins) for (job, joins), d in zip(places, devices, strict=True)]
    else:
        runs = [PlannedRun(plan.directory.name, plan.configs[0], devices[0])] * plan.configs[0]["measure"]["repeats"]
    for line in listing(runs, history(Path(plan.configs[0]["results_dir"])), finished):
        print(line)
    print(f"nothing was run; results would go to {_shown(plan.directory)}")


def _hydra_main(arguments: Sequence[str]) -> None:
    """Call Hydra's entry point, which reads ``sys.argv``."""
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        _task()
    finally:
        sys.argv = before


def _close(plan: Plan) -> int:
    """Join, report and show what was measured; the paths come last, also where an interrupt ends that. Returns the exit
    code."""
    try:
        return _join_and_show(plan)
    except KeyboardInterrupt:
        if measured_folders(plan.directory):
            print(f"\nresults: {_shown(plan.directory)}")
            if plan.configs[0]["report"]:
                print(f"report not written: cb-report {shlex.quote(_shown(plan.directory))}")
        raise


def _join_and_show(plan: Plan) -> int:
    jobs = manifest.latest(plan.directory)
    failed = failed_lines(plan.directory)
    if plan.multirun and jobs:
        try:
            combine_jobs(plan.directory, plan.reference_engine, plan.labels)
        except OSError as error:
            failed.append(f"the jobs' tables could not be joined ({one_line(error)}): each is in its own folder")
    code = EXIT_FAILED if failed or not jobs else 0
    if not store.is_result(plan.directory):
        for line in failed:
            _complain(line)
        return code
    from harness.report.console import print_summary
    from harness.report.html import write_report

    report: Path | None = None
    try:
        print_summary(plan.directory)
        judged = store.read_result(plan.directory, ("runs", "divergences"))
        if plan.multirun:
            failed += _confounded(plan)
            code = EXIT_FAILED if failed else code
        for line in gate.summary(judged["runs"], judged["divergences"], plan.reference_engine):
            print(line)
        if wrong := gate.failures(judged["runs"], judged["divergences"]):
            failed += wrong
            code = EXIT_FAILED
        if plan.configs[0]["report"]:
            report = write_report(plan.directory)
    except Exception as error:  # the numbers are safe on disk; a broken picture must not hide them
        _complain(f"the report could not be written: {one_line(error)}")
        code = EXIT_FAILED
    for line in failed:
        _complain(line)
    print(f"\nresults: {_shown(plan.directory)}")
    if report is not None:
        print(f"report:  {_shown(report)}")
    return code


def _confounded(plan: Plan) -> list[str]:
    """Write the comparison of a sweep's arms; one line an arm whose difference has more than one possible cause."""
    from harness.analysis.comparison import confounded_arms, write_comparison
    from harness.report.arms import group_arms
    from harness.report.read import read_results
    from harness.report.verdicts import compare_arms

    results = read_results(plan.directory)
    findings = compare_arms(results, group_arms(results))
    write_comparison(plan.directory, findings)
    return [
        f"confounded: {arm}: {reason}. Pin it to one value for all arms (mode=pinned for what engines derive), or "
        "declare it: add it to experiment.variable, with allow_factorial=true"
        for arm, reason in confounded_arms(findings).items()
    ]


def _shown(path: Path) -> str:
    """Relative to where the user is, if it is below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Make Hydra raise instead of printing its own several lines and exiting."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
