"""``cb-bench``: the command line. Hydra composes and fans out, this module explains errors and closes a run.

Everything that can be wrong with a command is found before anything runs: the configs of all jobs are composed here
once, errors in them become one line with the nearest right name, and only then Hydra's own entry point is called.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness import gate, manifest, store
from harness.analysis.design import variable_of
from harness.blocks import Place
from harness.check import check_engines
from harness.config import config_hash, group_options, plain
from harness.errors import explain_config_error, one_line
from harness.estimate import PlannedRun, history, listing
from harness.expand import PlannedJob, check_files, checked, dotted_keys, expand, shown_overrides
from harness.gpus import VISIBLE, gpu_count, host_locks, own_gpu, visible_gpus
from harness.job import Job, run_job
from harness.launch import launch
from harness.manifest import JobState
from harness.resume import remaining, unfinished_sweep
from harness.sweep import arm, check_unused, combine_jobs, failed_lines, kept_line

CONFIG_PATH = "pkg://sweeps"
CONFIG_NAME = "config"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

# Flags with which Hydra shows something instead of running, and those that take a value.
_SHOWING = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
# What other tools call these settings.
_SPELLINGS = {"--dry-run": "dry_run=true", "--resume": "resume=true"}
_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command line comes to: run or sweep, where its results go, and its complete arguments for Hydra.

    Attributes:
        overrides: of ``arguments``, those that compose the config.
        configs: of every job that is known beforehand, the first one at least.
        jobs: of a sweep, in order; () for a single run, and where a sweeper decides as it goes.
        resumed: whether it goes on with what ``directory`` holds.
    """

    multirun: bool
    directory: Path
    reference_engine: str | None
    arguments: tuple[str, ...]
    overrides: tuple[str, ...]
    configs: tuple[Mapping[str, Any], ...]
    jobs: tuple[PlannedJob, ...] = ()
    resumed: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cb-bench`` and return its exit code: 0 ok, 1 a run failed, 2 wrong command or config, 130 interrupted."""
    arguments = [_quote_null(_SPELLINGS.get(a, a)) for a in (sys.argv[1:] if argv is None else argv)]
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    plan: Plan | None = None
    try:
        with _hydra_raises(), _terminated_as_interrupted():
            if any(a.split("=", 1)[0] in _SHOWING for a in arguments):
                _hydra_main(arguments)
                return 0
            plan = make_plan(arguments)
            if not plan.resumed:
                check_unused(plan.directory)
            for line in check_engines(plan.configs):
                print(f"cb-bench: will fail: {line}", file=sys.stderr)
            plan = _pinned(plan)
            finished = len(plan.jobs)
            if plan.resumed:
                plan = replace(plan, jobs=remaining(plan.directory, plan.jobs))
            finished -= len(plan.jobs)
            if plan.configs[0]["dry_run"]:
                _list(plan, finished)
                return 0
            if finished:
                print(f"going on with {_shown(plan.directory)}: {finished} runs are measured, {len(plan.jobs)} to go")
            _prepare(plan)
            try:
                _run(plan)
            finally:
                code = _close(plan)
            return code
    except KeyboardInterrupt:
        kept = kept_line(plan.directory) if plan else "nothing had begun"
        print(f"cb-bench: interrupted; {kept}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if full_error:
            raise
        print(f"cb-bench: {_explain(error, arguments)}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:  # a full disk, a folder that was taken away: found while running
        if full_error:
            raise
        print(f"cb-bench: {one_line(error)}; results could not be written completely", file=sys.stderr)
        return EXIT_FAILED


def make_plan(arguments: Sequence[str]) -> Plan:
    """Compose all jobs of a command and find out what it will do.

    Raises:
        HydraException, OmegaConfBaseException, ValueError: something in it is wrong.
    """
    overrides, flags = split_arguments(arguments)
    _refuse_mistaken(arguments)
    with _initialised():
        loader = GlobalHydra.instance().config_loader()
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
        swept = [o for o in parsed if o.is_sweep_override()]
        first = [_first_value(o) for o in parsed]
        config = loader.load_configuration(CONFIG_NAME, [*first, *_own_configs(flags)], run_mode=RunMode.RUN)
    values = checked(config)
    experiment = values["experiment"]
    arm(values, config.hydra.runtime.choices, experiment["variable"])  # refuses a variable that does not exist
    multirun = config.hydra.mode == RunMode.MULTIRUN or any(f in ("-m", "--multirun") for f in flags)
    if swept and not multirun:
        raise ValueError(f"{swept[0].input_line!r} gives several values, which makes it a sweep: add -m")
    added = []
    if multirun and experiment["variable"] is None:
        variable = variable_of([o.key_or_group for o in swept])
        if variable:
            added.append(f"experiment.variable='{variable}'")
            OmegaConf.update(config, "experiment.variable", variable)
    if multirun and (fixed := [o.key_or_group for o in parsed if not o.is_sweep_override()]):
        # Names of job folders say what differs between them; Hydra's own setting carries the rest to its workers.
        added.append(_not_in_names(fixed))
    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    directory = Path(OmegaConf.select(config, key)).absolute()
    if values["resume"]:
        if not multirun:
            raise ValueError("resume=true goes on with a sweep; a single run is measured anew: leave resume away")
        directory = unfinished_sweep(directory, named=any(o.key_or_group == key for o in parsed))
    added.append(f"{key}='{directory}'")
    if multirun and not any(f in ("-m", "--multirun") for f in flags):
        flags = ["-m", *flags]
    complete = (*overrides, *added, *_own_configs(flags))
    jobs = None
    if multirun:
        with _initialised():
            loader = GlobalHydra.instance().config_loader()
            jobs = expand(loader, CONFIG_NAME, complete)
    configs = tuple({job.place.arm: job.config for job in jobs}.values()) if jobs else (values,)
    for note in check_files(configs):
        print(f"cb-bench: {note}", file=sys.stderr)
    # Sampled tokens differ between engines by right: nothing to compare then.
    reference = None if values["generation"]["do_sample"] else values["measure"]["reference_engine"]
    arguments = (*flags, *overrides, *added)
    if values["resume"] and not jobs:
        raise ValueError("resume=true needs a sweep whose jobs are known: this sweeper decides as it goes")
    return Plan(multirun, directory, reference, arguments, complete, configs, tuple(jobs or ()), values["resume"])


_NOT_IN_NAMES = "hydra.job.config.override_dirname.exclude_keys="


def _not_in_names(keys: Sequence[str]) -> str:
    return _NOT_IN_NAMES + "[" + ",".join(f"'{k}'" for k in keys) + "]"


def _pinned(plan: Plan) -> Plan:
    """``plan``; with ``mode=pinned``, its jobs with what their baseline derives as overrides.

    Raises:
        ValueError: there is no baseline to resolve, or its engine cannot be made.
    """
    if plan.configs[0]["mode"] != "pinned":
        return plan
    if not plan.jobs:
        raise ValueError(
            "mode=pinned fixes what the baseline of a sweep derives: it needs a sweep whose jobs are known"
        )
    from harness.pinning import pins

    found = pins(plan.jobs)
    texts = list(dict.fromkeys(text for arm in found.values() for text in arm))
    print(f"pinned to the baseline's resolved values: {' '.join(texts) or 'nothing was derived'}")
    fixed = [o.partition("=")[0] for o in plan.jobs[0].overrides if not o.startswith("hydra")]
    swept = {k.partition("=")[0] for k in _swept(plan.jobs)}
    names = [k for k in dict.fromkeys([*fixed, *(text.partition("=")[0] for text in texts)]) if k not in swept]
    overrides = (*(o for o in plan.overrides if not o.startswith(_NOT_IN_NAMES)), _not_in_names(names))
    with _initialised():
        jobs = expand(GlobalHydra.instance().config_loader(), CONFIG_NAME, overrides, found)
    assert jobs is not None  # it was one before
    configs = tuple({job.place.arm: job.config for job in jobs}.values())
    return replace(plan, overrides=overrides, jobs=tuple(jobs), configs=configs)


def _swept(jobs: Sequence[PlannedJob]) -> set[str]:
    """Overrides that not every job has."""
    return {o for job in jobs for o in job.overrides if any(o not in other.overrides for other in jobs)}


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments as (overrides, flags with their values)."""
    overrides, flags = [], []
    waiting = False
    for argument in arguments:
        if waiting or argument.startswith("-"):
            flags.append(argument)
            waiting = not waiting and argument in _WITH_VALUE
        else:
            overrides.append(argument)
    return overrides, flags


def _quote_null(argument: str) -> str:
    """``engine=null`` means the engine of that name; unquoted, Hydra's grammar takes it for "no engine"."""
    key, equals, value = argument.partition("=")
    if key != "engine":
        return argument
    return key + equals + ",".join("'null'" if v == "null" else v for v in value.split(","))


def _refuse_mistaken(arguments: Sequence[str]) -> None:
    """Answer what newcomers try and what Hydra would answer by its own rules.

    Raises:
        ValueError: says what to write instead.
    """
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "model" and ("/" in value or value.endswith(".gguf")):
            raise ValueError(
                f"model= chooses a shipped preset; for a folder, a .gguf file or a hub id write model.name={value}"
            )


def _first_value(override: Override) -> str:
    """The override itself, or with the first of its values if it has several."""
    if not override.is_sweep_override():
        return str(override.input_line)
    return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"


def _prepare(plan: Plan) -> None:
    """Make the folder of results and note the jobs of a sweep in its manifest, so that none is forgotten.

    Raises:
        ValueError: it cannot be made.
    """
    directory = plan.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for job in plan.jobs:
            digest, place = config_hash(job.config), (job.place.block, job.place.position)
            state = JobState(job.name, digest, job.overrides, "planned", manifest.now(), None, *place)
            manifest.append(directory, state)
    except OSError as error:
        raise ValueError(
            f"cannot make the folder of results {directory} ({error.strerror}): set results_dir to a folder that can "
            "be written"
        ) from error


@hydra.main(version_base="1.3", config_path=CONFIG_PATH, config_name=CONFIG_NAME)
def _task(config: DictConfig) -> str:
    """One Hydra job, also in a launcher's worker process. Returns its state and raises nothing but Ctrl-C."""
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
        arm=arm(values, choices, values["experiment"]["variable"]),
        stamp=datetime.now(UTC).strftime("%Y%m%dT%H%M%S"),
        place=_place(values["experiment"]),
    )
    with _gpu_of(h, values["measure"]["device"]):
        return run_job(job)


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
    with _initialised():
        running = GlobalHydra.instance().hydra
        assert running is not None  # _initialised made it
        # What hydra.main decorated: a launcher's worker calls it with a config that is composed already.
        launch(running, CONFIG_NAME, plan.overrides, [job.arguments for job in plan.jobs], _task.__wrapped__)


def _list(plan: Plan, finished: int) -> None:
    """Say what would run, how long it may take and where it would be written."""
    if plan.multirun and not plan.jobs and not plan.resumed:
        raise ValueError("dry_run=true cannot list a sweep whose sweeper decides as it goes")
    runs = [PlannedRun(job.name, job.config) for job in plan.jobs]
    if not plan.multirun:
        runs = [PlannedRun(plan.directory.name, plan.configs[0])] * plan.configs[0]["measure"]["repeats"]
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
    """Join, report and show what was measured; the paths come last. Returns the exit code."""
    jobs = manifest.latest(plan.directory)
    failed = failed_lines(plan.directory)
    if plan.multirun and jobs:
        try:
            combine_jobs(plan.directory, plan.reference_engine)
        except OSError as error:
            failed.append(f"the jobs' tables could not be joined ({one_line(error)}): each is in its own folder")
    code = EXIT_FAILED if failed or not jobs else 0
    if not store.is_result(plan.directory):
        for line in failed:
            print(f"cb-bench: {line}", file=sys.stderr)
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
        report = write_report(plan.directory)
    except Exception as error:  # the numbers are safe on disk; a broken picture must not hide them
        print(f"cb-bench: the report could not be written: {one_line(error)}", file=sys.stderr)
        code = EXIT_FAILED
    for line in failed:
        print(f"cb-bench: {line}", file=sys.stderr)
    sys.stderr.flush()
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


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM (a batch system's end of a job) like Ctrl-C; only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _initialised() -> Iterator[None]:
    """Hydra's global state for composing."""
    with hydra.initialize_config_module("sweeps", version_base="1.3", job_name="cb-bench"):
        yield


def _own_configs(flags: Sequence[str]) -> list[str]:
    """The user's ``--config-dir`` as an override, because composing knows no flags."""
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        name, _, value = flag.partition("=")
        if name in ("--config-name", "-cn", "--config-path", "-cp"):
            raise ValueError(f"{name} is not for cb-bench: put your files in a folder and name it with --config-dir")
        if name in ("--config-dir", "-cd"):
            folder = Path(value or following)
            if not folder.is_dir():
                raise ValueError(f"--config-dir {folder} is no folder")
            return [f"hydra.searchpath=['file://{folder.absolute()}']"]
    return []


def _explain(error: BaseException, arguments: Sequence[str]) -> str:
    if isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException):
        return one_line(error)
    with _initialised():
        loader = GlobalHydra.instance().config_loader()
        options = group_options(loader)
        line = explain_config_error(error, options, _chosen_keys(arguments, tuple(options)))
        return _name_owners(line, options)


def _name_owners(line: str, options: Mapping[str, Sequence[str]]) -> str:
    """``line``; if it is about a key that other choices of its group have, it names those choices."""
    found = re.fullmatch(r"unknown config key '(\w+)\.(\w+)'\..*", line)
    if found is None or found[1] not in options:
        return line
    group, name = found[1], found[2]
    loader = GlobalHydra.instance().config_loader()
    owners = []
    for option in options[group]:
        try:
            config = loader.load_configuration(CONFIG_NAME, [_quote_null(f"{group}={option}")], run_mode=RunMode.RUN)
        except (HydraException, OmegaConfBaseException):  # one that needs more than its name
            continue
        if OmegaConf.is_config(config[group]) and name in config[group]:
            owners.append(f"{group}={option}")
    if not owners:
        return line
    # A near name in the same group may be what was meant; one elsewhere is not.
    head = line if f"'{group}." in line.partition("Did you mean")[2] else f"unknown config key '{group}.{name}'."
    return f"{head} The chosen {group} has no {name}; add {' or '.join(owners[:4])}."


def _chosen_keys(arguments: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Keys of the config with the groups that ``arguments`` choose; of the default one if that is what is wrong."""
    overrides, flags = split_arguments(arguments)
    loader = GlobalHydra.instance().config_loader()
    try:
        chosen = [t for t in overrides if t.split("=", 1)[0].split("@")[0].lstrip("+~") in groups]
        first = [_first_value(o) for o in OverridesParser.create(config_loader=loader).parse_overrides(chosen)]
        config = loader.load_configuration(CONFIG_NAME, [*first, *_own_configs(flags)], run_mode=RunMode.RUN)
    except (HydraException, OmegaConfBaseException, ValueError):
        config = loader.load_configuration(CONFIG_NAME, [], run_mode=RunMode.RUN)
    return dotted_keys(OmegaConf.to_container(config, resolve=False))
