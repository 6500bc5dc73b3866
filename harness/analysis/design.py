"""One variable at a time, judged before anything runs: what the arms of a planned sweep differ in.

After the runs the resolved settings are judged too (:mod:`harness.report.config_diff`): an engine may derive what
nobody set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MEASURED_GROUPS = ("engine", "model", "arrival", "workload", "generation", "measure")
FACET_GROUPS = ("model", "workload", "arrival")
"""What makes comparisons of their own: arms are compared inside one model and workload, never across them."""

SEEDS = ("measure.seed", "workload.seed")
"""Keys whose values make repeats, not arms."""

_EXCLUSIVE = ("num_blocks", "max_memory_percent")
_NEVER_JOINTLY = ("max_requests_per_batch", "max_batch_tokens")


class ConfoundedSweep(ValueError):
    """A sweep that could not tell what caused a difference."""


def variable_of(swept: Sequence[str]) -> str | None:
    """The variable of a sweep that names none, from the keys it gives several values; several are joined by a comma.

    Settings of the engine come first; models and workloads beside them are facets, seeds are repeats.
    """
    arms = [key for key in swept if key not in SEEDS]
    own = [key for key in arms if key.split(".")[0] not in FACET_GROUPS]
    return ",".join(own or arms or swept) or None


def check_design(
    configs: Sequence[Mapping[str, Any]], variable: str | None, swept: Sequence[str], allow_factorial: bool
) -> None:
    """Refuse a sweep that is confounded as written.

    Args:
        configs: resolved configs of all arms as plain values.
        variable: the declared variable, several joined by a comma; None if none is.
        swept: keys that are given several values.
        allow_factorial: whether several variables may be declared together.

    Raises:
        ConfoundedSweep: says what varies besides the variable and the two ways out.
    """
    declared = variable.split(",") if variable else []
    for config in configs:
        _refuse_both(config["engine"])
    if len(declared) > 1 and not allow_factorial:
        raise ConfoundedSweep(
            f"this sweep varies {len(declared)} variables at once ({', '.join(declared)}): which of them caused a "
            f"difference could not be told. Pin all but one to a single value, or declare that all combinations are "
            f"meant: experiment.variable='{variable}' allow_factorial=true"
        )
    for arms in by_facet(configs, declared):
        _refuse_jointly(arms)
        varying = _varying(arms)
        other = [key for key in varying if not _covered(key, declared) and key not in SEEDS]
        # A key below a declared group is another variable if it is swept by itself: engine=a,b engine.num_blocks=1,2
        other += [key for key in swept if key in varying and key not in declared and _covered(key, declared)]
        if other:
            joined = ",".join([*declared, *other])
            raise ConfoundedSweep(
                f"{', '.join(other)} {'varies' if len(other) == 1 else 'vary'} besides the variable "
                f"{variable or '(none is declared)'}: which of them caused a difference could not be told. Pin "
                f"{'it' if len(other) == 1 else 'them'} to one value for all arms, or declare it: "
                f"experiment.variable='{joined}' allow_factorial=true"
            )


def by_facet(configs: Sequence[Mapping[str, Any]], declared: Sequence[str]) -> list[list[Mapping[str, Any]]]:
    """Configs whose arms are compared with each other, in order of appearance."""
    facets: dict[str, list[Mapping[str, Any]]] = {}
    for config in configs:
        facets.setdefault(facet_key(config, declared), []).append(config)
    return list(facets.values())


def facet_key(config: Mapping[str, Any], declared: Sequence[str]) -> str:
    """Model, workload and arrival of a config without the variables and the seeds in them."""
    flat = {
        key: value
        for group in FACET_GROUPS
        for key, value in _flat(config[group], group).items()
        if not _covered(key, declared) and key not in SEEDS
    }
    return json.dumps(flat, sort_keys=True, default=str)


def _varying(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted keys whose value is not the same in all configs."""
    flat = [{k: v for g in MEASURED_GROUPS for k, v in _flat(config[g], g).items()} for config in configs]
    keys = dict.fromkeys(key for values in flat for key in values)
    return [key for key in keys if len({json.dumps(values.get(key), default=str) for values in flat}) > 1]


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {key: v for name, inner in value.items() for key, v in _flat(inner, f"{prefix}.{name}").items()}


def _covered(key: str, declared: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in declared)


def _refuse_both(engine: Mapping[str, Any]) -> None:
    if all(engine.get(name) is not None for name in _EXCLUSIVE):
        blocks, percent = (f"engine.{name}={engine[name]}" for name in _EXCLUSIVE)
        raise ConfoundedSweep(
            f"{blocks} and {percent} both size the KV cache, so the one could hide the other: set one of them and the "
            "other to null"
        )


def _refuse_jointly(arms: Sequence[Mapping[str, Any]]) -> None:
    by_engine: dict[str, list[Mapping[str, Any]]] = {}
    for config in arms:
        by_engine.setdefault(str(config["engine"]["name"]), []).append(config["engine"])
    for engines in by_engine.values():
        if all(len({json.dumps(e.get(name)) for e in engines}) > 1 for name in _NEVER_JOINTLY):
            raise ConfoundedSweep(
                "engine.max_requests_per_batch and engine.max_batch_tokens both vary: each moves the memory of a step "
                "(the first by the logits of every row), so each has a sweep of its own. Pin one of them to one value "
                "for all arms"
            )
