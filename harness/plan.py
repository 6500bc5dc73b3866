"""What a command line comes to, before anything runs: its jobs, their configs and where their results go."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import OmegaConf

from harness.analysis.design import variable_of
from harness.arguments import asks_for_sweep, own_configs, refuse_mistaken, split_arguments
from harness.companions import check_prompts
from harness.compose import composing, first_value, load, parse
from harness.expand import PlannedJob, check_files, checked, expand
from harness.pinning import pins
from harness.resume import unfinished_sweep
from harness.sweep import arm


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command line comes to: run or sweep, where its results go, and its complete arguments for Hydra.

    Attributes:
        overrides: of ``arguments``, those that compose the config.
        configs: of every job that is known beforehand, the first one at least.
        jobs: of a sweep, in order; () for a single run, and where a sweeper decides as it goes.
        resumed: whether it goes on with what ``directory`` holds.
        labels: of a resumed sweep, by config hash the variable and the arm's value of this plan.
    """

    multirun: bool
    directory: Path
    reference_engine: str | None
    arguments: tuple[str, ...]
    overrides: tuple[str, ...]
    configs: tuple[Mapping[str, Any], ...]
    jobs: tuple[PlannedJob, ...] = ()
    resumed: bool = False
    labels: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)


def make_plan(arguments: Sequence[str]) -> Plan:
    """Compose all jobs of a command and find out what it will do.

    Raises:
        HydraException, OmegaConfBaseException, ValueError: something in it is wrong.
    """
    overrides, flags = split_arguments(arguments)
    refuse_mistaken(arguments)
    with composing() as loader:
        parsed = parse(loader, overrides)
        swept = [o for o in parsed if o.is_sweep_override()]
        config = load(loader, [*(first_value(o) for o in parsed), *own_configs(flags)])
    values = checked(config)
    experiment = values["experiment"]
    arm(values, config.hydra.runtime.choices, experiment["variable"])  # refuses a variable that does not exist
    multirun = config.hydra.mode == RunMode.MULTIRUN or asks_for_sweep(flags)
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
    if multirun and not asks_for_sweep(flags):
        flags = ["-m", *flags]
    complete = (*overrides, *added, *own_configs(flags))
    jobs = None
    if multirun:
        with composing() as loader:
            jobs = expand(loader, complete)
    configs = tuple({job.place.arm: job.config for job in jobs}.values()) if jobs else (values,)
    for note in check_files(configs):
        print(f"cb-bench: {note}", file=sys.stderr)
    check_prompts(jobs or ())
    # Sampled tokens differ between engines by right: nothing to compare then.
    reference = None if values["generation"]["do_sample"] else values["measure"]["reference_engine"]
    arguments = (*flags, *overrides, *added)
    if values["resume"] and not jobs:
        raise ValueError("resume=true needs a sweep whose jobs are known: this sweeper decides as it goes")
    return Plan(multirun, directory, reference, arguments, complete, configs, tuple(jobs or ()), values["resume"])


_NOT_IN_NAMES = "hydra.job.config.override_dirname.exclude_keys="


def _not_in_names(keys: Sequence[str]) -> str:
    return _NOT_IN_NAMES + "[" + ",".join(f"'{k}'" for k in keys) + "]"


def pinned(plan: Plan) -> Plan:
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
    found = pins(plan.jobs)
    texts = list(dict.fromkeys(text for arm in found.values() for text in arm))
    print(f"pinned to the baseline's resolved values: {' '.join(texts) or 'nothing was derived'}")
    fixed = [o.partition("=")[0] for o in plan.jobs[0].overrides if not o.startswith("hydra")]
    swept = {k.partition("=")[0] for k in _swept(plan.jobs)}
    names = [k for k in dict.fromkeys([*fixed, *(text.partition("=")[0] for text in texts)]) if k not in swept]
    overrides = (*(o for o in plan.overrides if not o.startswith(_NOT_IN_NAMES)), _not_in_names(names))
    with composing() as loader:
        jobs = expand(loader, overrides, found)
    assert jobs is not None  # it was one before
    configs = tuple({job.place.arm: job.config for job in jobs}.values())
    return replace(plan, overrides=overrides, jobs=tuple(jobs), configs=configs)


def _swept(jobs: Sequence[PlannedJob]) -> set[str]:
    """Overrides that not every job has."""
    return {o for job in jobs for o in job.overrides if any(o not in other.overrides for other in jobs)}
