"""What a set of results should hold and does not: arms that only some comparisons have, jobs whose rows are gone."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.arms import Arm, by_facet
from harness.report.read import Results, decoded

_MOST_NAMED = 4


def missing_notes(results: Results, arms: Sequence[Arm]) -> list[str]:
    """One line a kind of gap; [] if everything is there."""
    return [*_missing_arms(arms), *_missing_rows(results)]


def _missing_arms(arms: Sequence[Arm]) -> list[str]:
    facets = by_facet(arms)
    every = list(dict.fromkeys(a.series for a in arms))
    gaps = [
        f"{name or 'here'} without {', '.join(lacking)}"
        for name, members in facets.items()
        if (lacking := [series for series in every if series not in {a.series for a in members}])
    ]
    if not gaps:
        return []
    return [f"Arms are missing, the others are compared without them: {_named(gaps)}."]


def _missing_rows(results: Results) -> list[str]:
    """Jobs that ended well by the manifest, of whose config no run is in the tables."""
    environment = results.tables["environment"]
    known = {decoded(v) for v in environment.loc[environment["key"] == "identity.config_hash", "value"].dropna()}
    if not known:  # tables of before hashes were recorded
        return []
    gone = [job.job for job in results.jobs if job.state == "ok" and job.config_hash not in known]
    return [f"Measured by the manifest, but not in the tables: {_named(gone)}."] if gone else []


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return "; ".join(names[:_MOST_NAMED]) + more
