"""What makes the requests of two result sets differ, setting by setting: their hashes only say that they do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.report.read import Results, decoded

_LONGEST = 40
_ABSENT = "absent"


def different_workloads(a: Results, b: Results) -> str | None:
    """The settings in which the workloads that only A has and those that only B has differ, with both values.

    Where a set has several of its own they are named. None if a set did not record how its workload was built.
    """
    own, other = _specs(a), _specs(b)
    only_a = [spec for digest, spec in own.items() if digest not in other]
    only_b = [spec for digest, spec in other.items() if digest not in own]
    if not all((*only_a, *only_b)) or not (only_a or only_b):
        return None
    if len(only_a) != 1 or len(only_b) != 1:
        return "; ".join(
            f"only in {side}: {', '.join(sorted(map(_name, specs)))}"
            for side, specs in (("A", only_a), ("B", only_b))
            if specs
        )
    left, right = _flat(only_a[0]), _flat(only_b[0])
    different = [key for key in dict.fromkeys([*left, *right]) if left.get(key) != right.get(key)]
    if not different:
        return "built by the same settings: by another version, or with other answers"
    return "; ".join(f"{key}: {_shown(left, key)} in A, {_shown(right, key)} in B" for key in different)


def _specs(results: Results) -> dict[str, Mapping[str, Any]]:
    """How the requests of each workload hash were built; empty where that is not known."""
    runs = results.runs[results.runs["status"] == "ok"].dropna(subset=["workload_hash"])
    environment = results.tables["environment"]
    rows = environment[environment["key"] == "workload.spec"].dropna(subset=["value"])
    told = dict(zip(rows["run_id"], rows["value"], strict=True))
    found: dict[str, Mapping[str, Any]] = {}
    for run_id, digest in zip(runs["run_id"], runs["workload_hash"], strict=True):
        spec = decoded(told[run_id]) if run_id in told else None
        found.setdefault(str(digest), spec if isinstance(spec, Mapping) else {})
    return found


def _name(spec: Mapping[str, Any]) -> str:
    return str(spec.get("workload", {}).get("name", "unnamed"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        found |= _flat(value, name) if isinstance(value, Mapping) else {name: value}
    return found


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return _ABSENT
    text = json.dumps(values[key], ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
