"""``mode=pinned``: what an engine would derive from its settings and the machine is fixed before a sweep runs.

The baseline's engine is made once, in a process of its own (``python -m harness.pinning``), on the model of its facet;
what it derived becomes a plain override of every arm. So a value that would have moved with the variable stays, and the
command that repeats a job states it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.design import facet_key
from harness.apart import NoAnswer, answer, ask
from harness.backends.settings import engine_settings
from harness.expand import PlannedJob

_NEVER = ("max_memory_percent",)
"""Sizes the cache as num_blocks does, which is pinned itself; both together would be refused."""


def pins(jobs: Sequence[PlannedJob]) -> dict[int, tuple[str, ...]]:
    """By arm, the overrides that fix what the baseline of its facet derives.

    Args:
        jobs: all of a sweep.

    Raises:
        ValueError: a baseline's engine could not be made here, in one line.
    """
    arms = {job.place.arm: job for job in jobs}
    declared = (jobs[0].config["experiment"]["variable"] or "").split(",")
    resolved = {facet_key(j.config, declared): resolve(j.config) for j in arms.values() if j.is_baseline}
    return {i: overrides(resolved[facet_key(j.config, declared)], j.config, declared) for i, j in arms.items()}


def overrides(
    resolved: Sequence[tuple[str, Any, str]], config: Mapping[str, Any], declared: Sequence[str]
) -> tuple[str, ...]:
    """Overrides for one arm: what is derived in ``resolved``, a setting of its engine, left open in it, no variable."""
    engine = config["engine"]
    return tuple(
        f"engine.{name}={json.dumps(value, separators=(',', ':'))}"
        for name, value, source in resolved
        if source.startswith("derived")
        and name in engine
        and engine[name] is None
        and value is not None
        and name not in _NEVER
        and f"engine.{name}" not in declared
    )


def resolve(config: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """(setting, value, source) of the engine that ``config`` describes, made in a process of its own.

    Raises:
        ValueError: it could not be made, or took longer than ``measure.start_timeout_s``.
    """
    asked = {group: config[group] for group in ("engine", "model", "generation", "measure")}
    limit_s = config["measure"]["start_timeout_s"]
    try:
        return [tuple(row) for row in ask("harness.pinning", asked, limit_s, config["engine"]["env"])]
    except NoAnswer as error:
        raise ValueError(
            f"mode=pinned: the settings of the baseline ({config['engine']['name']}, {config['model']['name']}) could "
            f"not be resolved (measure.start_timeout_s={limit_s:g}): {error}"
        ) from error


def respond(config: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """(setting, value, source) of the engine that ``config`` describes, made here. Loads torch."""
    from harness.backends import GenerationSettings, create
    from harness.device import resolve_device
    from harness.preparation import load_or_outline

    loaded = load_or_outline(config, resolve_device(config["measure"]["device"]))
    backend = create(
        config["engine"]["name"],
        loaded.model,
        engine_settings(config["engine"]),
        GenerationSettings(**config["generation"]),
    )
    try:
        backend.warm_up(())
        return [(c.field, c.value, c.source) for c in backend.config()]
    finally:
        backend.stop()


if __name__ == "__main__":
    raise SystemExit(answer(respond))
