"""From a command to all its jobs, before any of them runs: what Hydra's own sweeper will make of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from harness.config import check, plain, unknown_keys
from harness.errors import unknown_key
from harness.models import ModelSpec, check_source
from workloads.build import check_sources


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job of a sweep that has not been started.

    Attributes:
        name: its folder, below the sweep's.
        overrides: command-line overrides that make its config.
        config: its resolved config as plain values.
    """

    name: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any]


def expand(loader: ConfigLoader, config_name: str, overrides: Sequence[str]) -> list[PlannedJob] | None:
    """Compose every job of a sweep, in the order in which Hydra will start them.

    Args:
        overrides: those of the command line, with what the command adds to them.

    Returns:
        None if the config chooses another sweeper than Hydra's own: which jobs that will start cannot be known.

    Raises:
        HydraException, OmegaConfBaseException, ValueError: something is wrong in one of them.
    """
    master = loader.load_configuration(config_name, list(overrides), run_mode=RunMode.MULTIRUN)
    sweeper = master.hydra.sweeper
    if not str(sweeper._target_).endswith(f".{BasicSweeper.__name__}"):
        return None
    given = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    given += list(master.hydra.overrides.task)
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(given)
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    return [_job(loader, master, number, chosen) for number, chosen in enumerate(batch)]


def _job(loader: ConfigLoader, master: DictConfig, number: int, overrides: Sequence[str]) -> PlannedJob:
    config = loader.load_sweep_config(master, list(overrides))
    with open_dict(config):
        config.hydra.job.num = number
        config.hydra.job.id = str(number)
    values = checked(config)
    shown = tuple(o for o in config.hydra.overrides.task if not o.startswith("experiment.variable="))
    return PlannedJob(str(Path(OmegaConf.select(config, "hydra.sweep.subdir"))), shown, values)


def checked(config: DictConfig) -> dict[str, Any]:
    """The plain values of a composed config.

    Raises:
        ValueError: a key that no schema knows, or a value that is wrong whatever the engine.
    """
    values = plain(config)
    if unknown := unknown_keys(config):
        raise ValueError(unknown_key(unknown[0], [k for k in dotted_keys(values) if k not in unknown]))
    check(values)
    return values


def check_files(configs: Sequence[Mapping[str, Any]]) -> None:
    """Look at the traces, prompts files and models that jobs name, each once.

    Raises:
        ValueError: one is not there or cannot be used, with what to do.
    """
    for groups in _different(configs, "workload", "arrival"):
        check_sources(groups["workload"], groups["arrival"])
    for groups in _different(configs, "model"):
        check_source(ModelSpec(**groups["model"]))


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
