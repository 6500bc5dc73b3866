"""From an engine's settings to its config object, with the checks all backends share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from harness.backends.generation import GenerationSettings
from workloads.names import unknown_name

_OF_THE_PROCESS = ("name", "env")
"""Keys of the group ``engine`` that say which engine and in which process, not what it is to do."""


def engine_settings(engine: Mapping[str, Any]) -> dict[str, Any]:
    """What the user set of an engine, for its backend: its settings without nulls."""
    return {key: value for key, value in engine.items() if key not in _OF_THE_PROCESS and value is not None}


def environment_named(env: Mapping[str, str]) -> str:
    """Variables of ``engine.env`` as they are set: a process that does not start may be their doing."""
    return ", ".join(f"engine.env.{name}={value}" for name, value in env.items())


def check_settings(engine: str, settings: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """ValueError naming the nearest right name if ``settings`` has one the engine does not know."""
    names = list(allowed)
    for name in settings:
        if name not in names:
            raise unknown_name(f"setting of engine {engine}", name, names)


def continuous_config(
    engine: str, config_class: Any, settings: Mapping[str, Any], generation: GenerationSettings
) -> Any:
    """A ContinuousBatchingConfig (``config_class``: ours or transformers') from plain settings.

    Lists become pairs, mappings compile configs, and the generation's seed goes into it.

    Raises:
        ValueError: an unknown setting; a seed that contradicts the generation's; a value the class refuses.
    """
    from transformers.generation import CompileConfig

    check_settings(engine, settings, [f.name for f in dataclasses.fields(config_class)])
    values = dict(settings)
    if isinstance(values.get("use_cuda_graph"), list):
        values["use_cuda_graph"] = tuple(values["use_cuda_graph"])
    for name in ("varlen_compile_config", "decode_compile_config"):
        if isinstance(values.get(name), Mapping):
            values[name] = CompileConfig(**values[name])
    if generation.seed is not None and values.setdefault("seed", generation.seed) != generation.seed:
        raise ValueError(f"engine.seed is {values['seed']}, generation.seed {generation.seed}: set one of them")
    return config_class(**values)
