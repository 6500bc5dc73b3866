"""Resolved settings that differ between the arms of a facet: the variable, what follows from it, and the rest.

A setting that nobody declared, that no engine derived and that every arm has makes the comparison confounded. What the
arms of a *planned* sweep differ in is judged before it runs (:mod:`harness.analysis.design`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.report.arms import Arm, by_facet
from harness.report.read import Results

DECLARED = "the variable"
DERIVED = "derived"
PART = "part of the variable"
ENGINE_ONLY = "not a setting of every engine"
OTHER = "differs, not declared"
REPEATS_DIFFER = " | "  # between the values of an arm whose repeats do not agree
_ORDER = (DECLARED, OTHER, DERIVED, PART, ENGINE_ONLY)
_OWN_PREFIX = ("model.", "arrival.", "workload.", "generation.", "measure.", "slo.")  # fields without are the engine's


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that is not the same in all arms of a facet.

    Attributes:
        kind: one of DECLARED, DERIVED, PART (of a group that is the variable), ENGINE_ONLY, OTHER (confounds).
        values: by series; None where the engine has no such setting, several values joined if repeats differ.
        sources: where the values came from, each once.
    """

    facet: str
    field: str
    kind: str
    values: dict[str, str | None]
    sources: tuple[str, ...]


Settings = Mapping[str, Mapping[str, tuple[str, str]]]
"""By run and field: value and source."""


def config_differences(results: Results, arms: Sequence[Arm], settings: Settings | None = None) -> list[Difference]:
    """Settings that differ, the variable first, then undeclared ones, derived ones, and those of single engines.

    Args:
        settings: of :func:`settings_by_run`, if they are at hand.
    """
    found: list[Difference] = []
    settings = settings_by_run(results) if settings is None else settings
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


def settings_by_run(results: Results) -> Settings:
    """The config table by run and field."""
    settings: dict[str, dict[str, tuple[str, str]]] = {}
    for row in results.tables["config"].fillna("").to_dict("records"):
        settings.setdefault(row["run_id"], {})[row["field"]] = (row["value"], row["source"])
    return settings


def _joined(entries: Sequence[tuple[str, str] | None]) -> str | None:
    values = dict.fromkeys(e[0] for e in entries if e is not None)
    return REPEATS_DIFFER.join(values) if values else None


def confounders(differences: Sequence[Difference]) -> tuple[str, ...]:
    """Config keys of the settings that make a comparison confounded."""
    return tuple(dict.fromkeys(key_of(d.field) for d in differences if d.kind == OTHER))


def key_of(field: str) -> str:
    """The config key of a field of the config table, as it is typed on a command line: ``engine.page_size``."""
    return field if field.startswith(_OWN_PREFIX) else f"engine.{field}"


def is_identical(differences: Sequence[Difference], baseline: Arm, arm: Arm, settings: Settings) -> bool:
    """Whether the two arms resolve alike, so that there is nothing to compare.

    Said only where it is known: each variable must be a setting that was recorded for both.
    """
    if differences or not arm.variable or baseline.engine != arm.engine:
        return False
    known = [settings.get(str(r), {}) for a in (baseline, arm) for r in a.runs["run_id"]]
    declared = arm.variable.split(",")
    return all(fields and all(name in ("engine", *map(key_of, fields)) for name in declared) for fields in known)


def _kind(field: str, values: dict[str, str | None], sources: Sequence[str], variable: str | None) -> str:
    declared = variable.split(",") if variable else []
    name = key_of(field)
    # A setting that is itself a mapping is recorded whole: workload.prefix for workload.prefix.fraction.
    if name in declared or any(d.startswith(f"{name}.") for d in declared):
        return DECLARED
    if None in values.values():
        return ENGINE_ONLY
    # What a user or the command set in one arm is not derived, whatever the other arm did about it.
    set_by_hand = any(source in ("user", "config") for source in sources)
    if not set_by_hand and any(source.startswith("derived") for source in sources):
        return DERIVED
    return PART if name.partition(".")[0] in declared else OTHER
