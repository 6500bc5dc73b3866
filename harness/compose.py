"""Hydra's configuration of the benchmark, composed without running anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig

CONFIG_MODULE = "sweeps"
CONFIG_NAME = "config"


@contextmanager
def composing(command: str = "cb-bench") -> Iterator[ConfigLoader]:
    """Hydra's global state while ``command`` composes; its loader of configs."""
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3", job_name=command):
        yield GlobalHydra.instance().config_loader()


def parse(loader: ConfigLoader, overrides: Sequence[str]) -> list[Override]:
    """Overrides by Hydra's grammar.

    Raises:
        HydraException: one that it cannot read.
    """
    return OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))


def load(loader: ConfigLoader, overrides: Sequence[str]) -> DictConfig:
    """The config of a single run.

    Raises:
        HydraException, OmegaConfBaseException: something in ``overrides`` is wrong.
    """
    return loader.load_configuration(CONFIG_NAME, list(overrides), run_mode=RunMode.RUN)


def first_value(override: Override) -> str:
    """The override itself, or with the first of its values if it has several."""
    if not override.is_sweep_override():
        return str(override.input_line)
    return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
