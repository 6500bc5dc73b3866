"""Sweeps whose variable never acted: by what the runs counted, its arms are the same settings in effect.

Said only where it is certain. Every run of every arm ended well and counted what it takes, and everything else that
differs between the arms (a limit fitted to the variable, say) never acted either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from harness.report.arms import Arm, by_facet
from harness.report.config_diff import DECLARED, Difference, config_differences
from harness.report.read import Results, decoded
from harness.sweep import as_number


@dataclass(frozen=True, slots=True)
class _Rule:
    """How it is known that a setting never acted, and what to say then."""

    holds: Callable[[Results, pd.DataFrame, Difference], bool]
    why: str


def never_acted(results: Results, arms: Sequence[Arm]) -> dict[str, str]:
    """By facet whose variable cannot have acted in any arm, a clause that says so and why."""
    found: dict[str, str] = {}
    for facet, members in by_facet(arms).items():
        runs = pd.concat([a.runs for a in members])
        own = [a for a in members if not a.is_replica]
        if len(own) < 2 or len({a.engine for a in own}) > 1 or (runs["status"] != "ok").any():
            continue
        differing = config_differences(results, own)
        declared = [d.field for d in differing if d.kind == DECLARED]
        rules = [(_RULES.get(d.field), d) for d in differing]
        if declared and all(rule is not None and rule.holds(results, runs, d) for rule, d in rules):
            why = dict.fromkeys(_RULES[name].why for name in declared)
            found[facet] = f"{' and '.join(declared)} never acted: {', '.join(why)} in any arm"
    return found


def never_acted_notes(results: Results, arms: Sequence[Arm]) -> list[str]:
    """The clauses as sentences, each once with the facets it holds for; [] if every variable may have acted."""
    facets_of: dict[str, list[str]] = {}
    for facet, clause in never_acted(results, arms).items():
        facets_of.setdefault(clause, []).append(facet)
    everywhere = len(by_facet(arms))
    return [
        f"{'' if len(facets) == everywhere else ', '.join(facets) + ': '}{clause}. What differs between the arms is "
        "chance, not an effect of it."
        for clause, facets in facets_of.items()
    ]


def _all_zero(*counts: str) -> Callable[[Results, pd.DataFrame, Difference], bool]:
    def holds(results: Results, runs: pd.DataFrame, difference: Difference) -> bool:
        return all(_largest(runs, name) == 0 for name in counts)

    return holds


def _largest(runs: pd.DataFrame, name: str) -> float | None:
    """None unless every run knows it."""
    return None if runs.empty or runs[name].isna().any() else float(runs[name].max())


_no_pressure = _all_zero("preemptions", "offloads", "held_steps")


def _always_room(results: Results, runs: pd.DataFrame, difference: Difference) -> bool:
    """A request that finds no room waits uncounted: the blocks left must always have held the largest of them."""
    if runs[["kv_blocks_free_min", "kv_blocks_max"]].isna().any(axis=None):
        return False
    room = runs["kv_blocks_free_min"] >= runs["kv_blocks_max"]
    return _no_pressure(results, runs, difference) and bool(room.all())


def _nothing_shared(results: Results, runs: pd.DataFrame, difference: Difference) -> bool:
    """Runs that do not share have nothing to count."""
    config = results.tables["config"]
    sharing = config[(config["field"] == difference.field) & (config["value"] == "true")]["run_id"]
    return _largest(runs[runs["run_id"].isin(sharing)], "cached_tokens") == 0


def _never_full(results: Results, runs: pd.DataFrame, difference: Difference) -> bool:
    limit, most = _smallest(difference), _largest(runs, "running_max")
    return limit is not None and most is not None and most < limit


def _no_full_step(results: Results, runs: pd.DataFrame, difference: Difference) -> bool:
    limit = _smallest(difference)
    if limit is None or _largest(runs, "chunked_requests") != 0:
        return False
    for run_id in runs["run_id"]:
        steps = results.of_run("steps", str(run_id))[["decode_rows", "prefill_tokens"]]
        if steps.empty or steps.isna().any(axis=None) or steps.sum(axis=1).max() >= limit:
            return False
    return True


def _smallest(difference: Difference) -> float | None:
    """The smallest value of a limit; None if an arm has none, or its repeats have several."""
    values = [None if v is None else as_number(str(decoded(v))) for v in difference.values.values()]
    known = [v for v in values if v is not None]
    return min(known) if known and len(known) == len(values) else None


_SPARE = "no request was held back or preempted"
_RULES: Mapping[str, _Rule] = {
    "safety_margin": _Rule(_no_pressure, _SPARE),
    "num_blocks": _Rule(_always_room, f"{_SPARE}, and blocks for one more were always free"),
    "cpu_offload_space": _Rule(_no_pressure, "no request was preempted or offloaded"),
    "num_host_blocks": _Rule(_no_pressure, "no request was preempted or offloaded"),
    "allow_block_sharing": _Rule(_nothing_shared, "no prompt token came from the prefix cache"),
    "max_requests_per_batch": _Rule(_never_full, "no batch was full"),
    "max_batch_tokens": _Rule(_no_full_step, "no prompt was split and no step was full"),
}
"""By setting. One that is not here may act in ways that no run counts."""
