"""Resolved settings that differ between the arms of a facet: the variable, what follows from it, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.arms import Arm, by_facet
from harness.report.read import Results

DECLARED = "the variable"
DERIVED = "derived"
ENGINE_ONLY = "not a setting of every engine"
OTHER = "differs, not declared"
_ORDER = (DECLARED, OTHER, DERIVED, ENGINE_ONLY)


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that is not the same in all arms of a facet.

    Attributes:
        kind: one of DECLARED, DERIVED, ENGINE_ONLY, OTHER.
        values: by series; None where the engine has no such setting, several values joined if repeats differ.
        sources: where the values came from, each once.
    """

    facet: str
    field: str
    kind: str
    values: dict[str, str | None]
    sources: tuple[str, ...]


def config_differences(results: Results, arms: Sequence[Arm]) -> list[Difference]:
    """Settings that differ, the variable first, then undeclared ones, derived ones, and those of single engines."""
    found: list[Difference] = []
    settings = _settings_by_run(results)
    for facet, members in by_facet(arms).items():
        fields = list(dict.fromkeys(f for a in members for r in a.runs["run_id"] for f in settings.get(r, {})))
        known = [a for a in members if any(r in settings for r in a.runs["run_id"])]
        for field in fields:
            entries = {a.series: [settings[r].get(field) for r in a.runs["run_id"] if r in settings] for a in known}
            values = {series: _joined(entry) for series, entry in entries.items()}
            if len(set(values.values())) < 2:
                continue
            sources = tuple(dict.fromkeys(e[1] for entry in entries.values() for e in entry if e))
            found.append(Difference(facet, field, _kind(field, values, sources, members[0].variable), values, sources))
    return sorted(found, key=lambda d: _ORDER.index(d.kind))


def _settings_by_run(results: Results) -> dict[str, dict[str, tuple[str, str]]]:
    settings: dict[str, dict[str, tuple[str, str]]] = {}
    for row in results.tables["config"].fillna("").to_dict("records"):
        settings.setdefault(row["run_id"], {})[row["field"]] = (row["value"], row["source"])
    return settings


def _joined(entries: Sequence[tuple[str, str] | None]) -> str | None:
    values = dict.fromkeys(e[0] for e in entries if e is not None)
    return " | ".join(values) if values else None


def _kind(field: str, values: dict[str, str | None], sources: Sequence[str], variable: str | None) -> str:
    if variable and field in (variable, variable.rpartition(".")[2]):
        return DECLARED
    if None in values.values():
        return ENGINE_ONLY
    return DERIVED if any(source.startswith("derived") for source in sources) else OTHER
