"""From a command to all its jobs, before any of them runs: what Hydra's own sweeper will make of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from harness.analysis.design import check_design, facet_key
from harness.blocks import Place, arrange, together
from harness.compose import CONFIG_NAME, parse
from harness.config import check, check_mode, plain, unknown_keys
from harness.config_errors import unknown_key
from harness.models import ModelSpec, check_source, may_have_tokenizer
from harness.sweep import arm, baseline
from workloads.build import check_sources


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job of a sweep that has not been started.

    Attributes:
        name: its folder, below the sweep's.
        overrides: command-line overrides that make its config.
        config: its resolved config as plain values.
        place: where it stands in the order of the sweep.
        value: of the variable, as text.
        is_baseline: whether its arm is the one that the others of its facet are compared with.
        arguments: ``overrides`` with its place, for Hydra.
    """

    name: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    place: Place
    is_baseline: bool
    value: str | None
    arguments: tuple[str, ...]


def process_key(config: Mapping[str, Any]) -> str:
    """What is the same in runs that one process may measure: everything but the requests and what is asked of them."""
    return json.dumps([config[g] for g in ("engine", "model", "generation", "measure")], sort_keys=True, default=str)


_PLACE = tuple(f.name for f in fields(Place))


@dataclass(frozen=True, slots=True)
class _Arm:
    """One value of the variable in one facet: the config that all its runs share."""

    overrides: tuple[str, ...]
    composed: DictConfig
    values: dict[str, Any]
    value: str | None


def expand(
    loader: ConfigLoader,
    overrides: Sequence[str],
    pins: Mapping[int, Sequence[str]] | None = None,
) -> list[PlannedJob] | None:
    """Compose every job of a sweep, in the order in which they will run.

    Args:
        overrides: those of the command line, with what the command adds to them.
        pins: by arm, overrides that freeze what its engine would derive.

    Returns:
        None if the config chooses another sweeper than Hydra's own: which jobs that will start cannot be known.

    Raises:
        HydraException, OmegaConfBaseException, ValueError: something is wrong in one of them.
        ConfoundedSweep: its arms differ in more than the variable.
    """
    master = loader.load_configuration(CONFIG_NAME, list(overrides), run_mode=RunMode.MULTIRUN)
    sweeper = master.hydra.sweeper
    if not str(sweeper._target_).endswith(f".{BasicSweeper.__name__}"):
        return None
    given = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    given += list(master.hydra.overrides.task)
    parsed = parse(loader, given)
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    chosen = list(dict.fromkeys(tuple(c) for c in batch))
    arms = [_compose(loader, master, (*c, *(pins or {}).get(i, ()))) for i, c in enumerate(chosen)]
    first = arms[0].values
    declared = first["experiment"]["variable"]
    swept = [o.key_or_group for o in parsed if o.is_sweep_override()]
    check_design([a.values for a in arms], declared, swept, first["allow_factorial"])
    facets = _facets([chosen.index(tuple(c)) for c in batch], arms, (declared or "").split(","))
    baselines = {
        members[baseline([(arms[i].values["engine"]["name"], arms[i].value) for i in members])] for members in facets
    }
    if first["measure"]["aa"]:
        facets = [[*members, next(i for i in members if i in baselines)] for members in facets]
    order = arrange(facets, first["measure"]["repeats"], first["measure"]["order_seed"])
    if first["measure"]["share_process"]:
        order = together(order, lambda arm: process_key(arms[arm].values))
    return [_job(arms[p.arm], p.arm in baselines, number, p) for number, p in enumerate(order)]


def _compose(loader: ConfigLoader, master: DictConfig, overrides: Sequence[str]) -> _Arm:
    config = loader.load_sweep_config(master, list(overrides))
    values = checked(config)
    value = arm(values, config.hydra.runtime.choices, values["experiment"]["variable"])
    return _Arm(tuple(overrides), config, values, value)


def _facets(batch: Sequence[int], arms: Sequence[_Arm], declared: Sequence[str]) -> list[list[int]]:
    """Arms that are compared with each other, in order of appearance."""
    facets: dict[str, list[int]] = {}
    for i in batch:
        facets.setdefault(facet_key(arms[i].values, declared), []).append(i)
    return list(facets.values())


def _job(arm: _Arm, is_baseline: bool, number: int, place: Place) -> PlannedJob:
    config = arm.composed
    with open_dict(config):
        config.hydra.job.num = number
        config.hydra.job.id = str(number)
    name = str(Path(OmegaConf.select(config, "hydra.sweep.subdir")))
    placed = tuple(f"experiment.{key}={getattr(place, key)}" for key in _PLACE)
    # Stated, because a launcher numbers what it is given: of a resumed sweep only what is left.
    stated = (f"experiment.number={number}", f"hydra.sweep.subdir='{name}'")
    return PlannedJob(
        name=name,
        overrides=shown_overrides(config.hydra.overrides.task),
        config=arm.values,
        place=place,
        is_baseline=is_baseline,
        value=arm.value,
        arguments=(*arm.overrides, *placed, *stated),
    )


def shown_overrides(task: Sequence[str]) -> tuple[str, ...]:
    """Overrides of a job without those that the command wrote itself, or that only say how it is started."""
    own = tuple(f"experiment.{name}=" for name in ("variable", "number", "companions", *_PLACE))
    return tuple(o for o in task if not o.startswith((*own, "resume=", "dry_run=")))


def checked(config: DictConfig) -> dict[str, Any]:
    """The plain values of a composed config.

    Raises:
        ValueError: a key that no schema knows, or a value that is wrong whatever the engine.
    """
    values = plain(config)
    if unknown := unknown_keys(config):
        raise ValueError(unknown_key(unknown[0], [k for k in dotted_keys(values) if k not in unknown]))
    check(values)
    check_mode(values["mode"])
    return values


def check_files(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Look at the traces, prompts files and models that jobs name, each once.

    Returns:
        What of the files is left out or put right, one sentence each.

    Raises:
        ValueError: one is not there or cannot be used, with what to do.
    """
    notes: list[str] = []
    for groups in _different(configs, "model"):
        check_source(ModelSpec(**groups["model"]))
    takes_text = all(may_have_tokenizer(ModelSpec(**groups["model"])) for groups in _different(configs, "model"))
    for groups in _different(configs, "workload", "arrival"):
        notes += check_sources(groups["workload"], groups["arrival"], takes_text=takes_text)
    return list(dict.fromkeys(notes))


def _different(configs: Sequence[Mapping[str, Any]], *groups: str) -> Iterator[Mapping[str, Any]]:
    seen = {json.dumps([c[g] for g in groups], sort_keys=True, default=str): c for c in reversed(configs)}
    return reversed(seen.values())


def dotted_keys(values: object, prefix: str = "") -> list[str]:
    """Every key of nested plain values, Hydra's own left out."""
    if not isinstance(values, dict):
        return [prefix]
    found = [prefix] if prefix else []
    for key, value in values.items():
        if prefix or key != "hydra":
            found += dotted_keys(value, f"{prefix}.{key}" if prefix else str(key))
    return found
