"""The benchmark's configuration once composed: what Hydra is told of it, what is wrong with it, what it is called.

The schemas are in :mod:`harness.config_schemas`, the values in the YAML files of package ``sweeps``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, OmegaConf

from harness.backends.generation import GenerationSettings
from harness.config_schemas import (
    BenchConfig,
    ContinuousEngineConfig,
    MeasureConfig,
    ModelConfig,
    NullEngineConfig,
    OpenAiHttpEngineConfig,
    OursEngineConfig,
    SloConfig,
    StaticEngineConfig,
    VllmEngineConfig,
)
from harness.slo import read_slo
from workloads.config import hydra_schemas

MODES = ("auto", "pinned")
"""Whether settings that follow from the variable may move with it, or are frozen to the baseline's resolved values."""

# How a sweep is laid out, which no single run can see. A pinned setting stands in the engine's group.
_UNMEASURED = frozenset(
    ("hydra", "results_dir", "experiment", "slo", "mode", "allow_factorial", "dry_run", "resume", "report")
)


def config_hash(config: Mapping[str, Any]) -> str:
    """Eight hex digits over everything in a resolved config that can change a measurement."""
    measured = {key: value for key, value in config.items() if key not in _UNMEASURED}
    return hashlib.sha256(json.dumps(measured, sort_keys=True, default=str).encode()).hexdigest()[:8]


def overrides_slug(overrides: list[str], fixed: Collection[str] = (), limit: int = 100) -> str:
    """Overrides as part of a directory name, for example ``engine=ours,workload=staged-``; "" if there are none.

    Args:
        fixed: keys that are the same in every job, which are left out.
    """
    shown = [o.lstrip("+~") for o in overrides]
    shown = [o for o in shown if not o.startswith(("experiment", "results_dir", "hydra"))]
    shown = [o for o in shown if o.split("=", 1)[0] not in fixed]
    slug = re.sub(r"[^\w.=,+-]+", "_", ",".join(shown))
    return f"{slug[:limit]}-" if slug else ""


def sweep_name(experiment: Mapping[str, Any]) -> str:
    """Directory of a sweep: the experiment's name, else what it varies."""
    return re.sub(r"[^\w.=,+-]+", "_", experiment.get("name") or experiment.get("variable") or "unnamed")


def group_options(loader: ConfigLoader) -> dict[str, list[str]]:
    """Config groups of ours and what each offers, schemas left out."""
    groups = [g for g in loader.get_group_options("", ObjectType.GROUP) if g != "hydra"]
    return {g: [o for o in loader.get_group_options(g) if not o.endswith("_schema")] for g in groups}


def unknown_keys(config: DictConfig) -> list[str]:
    """Dotted keys that no schema knows: Hydra's ``+key=value`` adds them without asking."""
    return _unknown_keys(config, "")


def _unknown_keys(config: DictConfig, prefix: str) -> list[str]:
    schema = OmegaConf.get_type(config)
    known = {f.name for f in fields(schema)} if is_dataclass(schema) else None
    found = []
    for key in config:
        name = f"{prefix}{key!s}"
        if name == "hydra":
            continue
        if known is not None and key not in known:
            found.append(name)
        elif isinstance(value := config._get_node(key), DictConfig) and not value._is_none():
            found += _unknown_keys(value, f"{name}.")
    return found


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError for what is wrong whatever the engine: of the measure group, the SLO or of generation."""
    GenerationSettings(**config["generation"])
    read_slo(config.get("slo") or {})
    measure = config["measure"]
    limits = {"warmup_requests": 0, "repeats": 1, "runs_per_process": 1}
    for key, least in limits.items():
        if measure[key] < least:
            raise ValueError(f"measure.{key} must be at least {least}, got {measure[key]}")
    for key in ("timeout_s", "start_timeout_s", "telemetry_interval_ms"):
        if not measure[key] > 0:
            raise ValueError(f"measure.{key} must be above 0, got {measure[key]}")
    if measure["torch_threads"] is not None and measure["torch_threads"] < 1:
        raise ValueError(f"measure.torch_threads must be at least 1 or null, got {measure['torch_threads']}")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", measure["device"]):
        raise ValueError(f"measure.device must be auto, cpu, cuda or cuda:N, got {measure['device']!r}")


def check_mode(mode: str) -> None:
    """Raise ValueError unless ``mode`` is one of :data:`MODES`."""
    if mode not in MODES:
        raise ValueError(f"mode must be auto (derived settings move with the variable) or pinned, got {mode!r}")


def register() -> None:
    """Register schemas and resolvers with Hydra; safe to call again (workers of a launcher import this module)."""
    store = ConfigStore.instance()
    store.store(name="bench_schema", node=BenchConfig)
    store.store(group="engine", name="ours_schema", node=OursEngineConfig)  # the order of the help text
    store.store(group="engine", name="continuous_schema", node=ContinuousEngineConfig)
    store.store(group="engine", name="static_schema", node=StaticEngineConfig)
    store.store(group="engine", name="openai_http_schema", node=OpenAiHttpEngineConfig)
    store.store(group="engine", name="null_schema", node=NullEngineConfig)
    store.store(group="engine", name="vllm_schema", node=VllmEngineConfig)
    store.store(group="model", name="model_schema", node=ModelConfig)
    store.store(group="measure", name="measure_schema", node=MeasureConfig)
    store.store(group="slo", name="slo_schema", node=SloConfig)
    for (group, name), schema in hydra_schemas().items():
        store.store(group=group, name=name, node=schema)
    OmegaConf.register_new_resolver("config_hash", _resolve_config_hash, replace=True)
    OmegaConf.register_new_resolver("overrides_slug", _resolve_overrides_slug, replace=True)
    OmegaConf.register_new_resolver("sweep_name", _resolve_sweep_name, replace=True)


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed config as plain dicts and lists, interpolations resolved, Hydra's own part left out."""
    out: dict[str, Any] = {}
    for key in config:
        if key != "hydra":
            value = config[key]
            out[str(key)] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return out


def _resolve_config_hash(*, _root_: DictConfig) -> str:
    return config_hash(plain(_root_))


def _resolve_overrides_slug(*, _root_: DictConfig) -> str:
    hydra = _root_.hydra
    return overrides_slug(list(hydra.overrides.task), tuple(hydra.job.config.override_dirname.exclude_keys))


def _resolve_sweep_name(*, _root_: DictConfig) -> str:
    return sweep_name(plain(_root_)["experiment"])


register()
