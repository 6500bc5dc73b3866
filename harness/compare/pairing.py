"""Which arm of one result set is compared with which of the other, and what the two differ in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from harness.analysis.comparison import PAIR_BY, Candidate, Finding, compare, objection
from harness.analysis.design import SEEDS
from harness.compare.variable import declared_keys
from harness.report.arms import Arm, names_engine
from harness.report.config_diff import OTHER, PART, Difference, config_differences, confounders, key_of
from harness.report.model_names import model_labels
from harness.report.read import Results

_ANY = "unnamed"
# How a set was laid out or watched, which no single run can see; and seeds, which are compared as such.
_IRRELEVANT = (
    *SEEDS,
    *(f"measure.{n}" for n in ("repeats", "share_process", "aa", "order_seed", "timeout_s", "start_timeout_s")),
    "measure.reference_engine",
)


@dataclass(frozen=True)
class Pair:
    """An arm of A and the one of B it is compared with.

    Attributes:
        facet: the requests and model both had.
        variable: config keys of what is compared: named, or the one setting that differs; None if none or several do.
        differences: of their resolved settings.
        confounded: config keys of the settings that differ besides the variable.
    """

    facet: str
    a: Arm
    b: Arm
    variable: str | None
    differences: tuple[Difference, ...]
    confounded: tuple[str, ...]


@dataclass(frozen=True)
class Pairing:
    """All pairs of two sets; ``unmatched``: arms without a counterpart; ``pair_by``: what two runs have in common."""

    pairs: tuple[Pair, ...]
    unmatched: tuple[str, ...]
    pair_by: tuple[str, ...]


def pair_arms(
    a: Results,
    b: Results,
    variable: str | None = None,
    arm_a: str | None = None,
    arm_b: str | None = None,
    apart: frozenset[str] = frozenset(),
) -> Pairing:
    """Pair the arms of two sets.

    Inside the same requests, model and kind of device: the two arms if each set has one, else those of the same engine
    and value.

    Args:
        variable: what is compared, see :func:`declared_keys`; None = the one setting that differs.
        arm_a, arm_b: engine or value of the arm to take of each set; None = all.
        apart: columns of the runs table in which the sets differ and all the same are compared.

    Raises:
        ValueError: a variable that is no setting, an arm that is not there, no arm of one has a counterpart in the
            other, or a pair has the same runs on both sides.
    """
    sides = [_arms(results, wanted, name, apart) for results, wanted, name in ((a, arm_a, "A"), (b, arm_b, "B"))]
    joined = Results(
        a.directory,
        {name: pd.concat([a.tables[name], b.tables[name]], ignore_index=True) for name in ("runs", "config")},
        (),
        (),
    )
    if variable is not None:
        variable = declared_keys(variable, map(key_of, joined.tables["config"]["field"].dropna().unique()))
    pairs, unmatched = [], []
    for facet in dict.fromkeys([*sides[0], *sides[1]]):
        own, other = sides[0].get(facet, {}), sides[1].get(facet, {})
        if len(own) == len(other) == 1:
            matched = [(next(iter(own.values())), next(iter(other.values())))]
        else:
            matched = [(own[key], other[key]) for key in own if key in other]
            unmatched += [f"only in A: {arm.label}" for key, arm in own.items() if key not in other]
            unmatched += [f"only in B: {arm.label}" for key, arm in other.items() if key not in own]
        pairs += [_pair(joined, x, y, variable) for x, y in matched]
    if not pairs:
        raise ValueError(
            "no arm of A has a counterpart in B: they need the same requests, model and kind of device, and the same "
            f"engine and value unless each is one arm ({'; '.join(unmatched) or 'nothing was measured'})"
        )
    for pair in pairs:
        if shared := _measured(pair.a) & _measured(pair.b):
            raise ValueError(
                f"{pair.a.series} and {pair.b.series} are the same runs ({len(shared)} of them), which say nothing of "
                "each other: name two different folders, or two arms of one with --arm-a and --arm-b"
            )
    return Pairing(tuple(pairs), tuple(unmatched), tuple(k for k in PAIR_BY if k not in apart))


def findings_of(pairing: Pairing) -> list[Finding]:
    """Verdicts on B against A, a Holm family a pair."""
    found: list[Finding] = []
    for pair in pairing.pairs:
        arm = Candidate(pair.b.series, pair.b.runs, pair.confounded, objection=objection(pair.b.runs))
        found += compare(Candidate(pair.a.series, pair.a.runs), [arm], facet=pair.facet, pair_by=pairing.pair_by)
    return found


def _arms(
    results: Results, wanted: str | None, side: str, apart: frozenset[str]
) -> dict[str, dict[tuple[str, str], Arm]]:
    """Arms by facet and by (engine, value); second runs of A/A left out."""
    runs = results.runs[(results.runs["replica"].fillna(0) == 0) & (results.runs["status"] == "ok")]
    names = [n for n in ("model", "workload", "workload_hash", "device") if n not in apart]
    labels = model_labels(runs["model"].dropna())
    parts = [
        (runs[name].map(labels) if name == "model" else runs[name])
        .astype("string")
        .fillna(_ANY)
        .str.split(":")
        .str[0]
        .str.slice(0, 12 if name == "workload_hash" else 40)
        for name in names
    ]
    facet = pd.Series("", index=runs.index, dtype="string").str.cat(parts, sep=" · ").str.removeprefix(" · ")
    found: dict[str, dict[tuple[str, str], Arm]] = {}
    values = runs["arm"].fillna(_ANY)
    for (name, engine, value), rows in runs.groupby([facet, "engine", values], sort=False):
        if wanted is None or wanted in (engine, value):
            variable = rows["variable"].iloc[0]
            typed = names_engine(None if pd.isna(variable) else str(variable))
            label = engine if value == _ANY else value if typed else f"{engine} {value}"
            arm = Arm(name, f"{side}: {label}", engine, None if value == _ANY else value, None, rows)
            found.setdefault(name, {})[(engine, value)] = arm
    if not found:
        there = ", ".join(dict.fromkeys([*runs["engine"], *values])) or "none that ended well"
        raise ValueError(f"set {side} has no measured arm {wanted or ''} (there are: {there})")
    return found


def _measured(arm: Arm) -> set[str]:
    """Ids of its runs; simulated ones have none of their own."""
    return set(arm.runs.loc[arm.runs["source"] == "measured", "run_id"])


def _pair(joined: Results, a: Arm, b: Arm, variable: str | None) -> Pair:
    arms = [a, b]
    found = _relevant(config_differences(joined, arms))
    others = [d.field for d in found if d.kind in (OTHER, PART)]
    if variable is None:
        variable = "engine" if a.engine != b.engine else key_of(others[0]) if len(others) == 1 else None
    if variable is not None:
        arms = [_with_variable(arm, variable) for arm in arms]
        found = _relevant(config_differences(joined, arms))
    return Pair(a.facet, arms[0], arms[1], variable, tuple(found), confounders(found))


def _with_variable(arm: Arm, variable: str) -> Arm:
    return Arm(arm.facet, arm.series, arm.engine, arm.value, variable, arm.runs)


def _relevant(found: Sequence[Difference]) -> list[Difference]:
    return [d for d in found if d.field not in _IRRELEVANT and not d.field.startswith("slo.")]
