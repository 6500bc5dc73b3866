"""Arms against their baseline, metric by metric, from rows of the runs table: the one place where verdicts are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import pandas as pd

from harness.analysis.paired import PairedRatio, paired_ratio
from harness.analysis.verdict import Judgement, Thresholds, Verdict, judge, noise_floor
from harness.metrics.metric import HIGHER
from harness.metrics.registry import RUN_METRICS
from harness.tables import BESIDE

JUDGED = tuple(name for name, metric in RUN_METRICS.items() if metric.better is not None)
"""Metrics with a direction, in the order of the registry."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the comparison table; the columns of :data:`harness.tables.BESIDE` are its definitions."""

    facet: str
    baseline: str
    arm: str
    metric: str
    better: str
    pairs: int
    baseline_median: float | None
    arm_median: float | None
    ratio: float | None
    ratio_smallest: float | None
    ratio_largest: float | None
    ratio_low: float | None
    ratio_high: float | None
    p: float | None
    p_holm: float | None
    noise_floor: float | None
    verdict: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arm to be compared with the baseline.

    Attributes:
        name: for people.
        runs: its rows of the runs table.
        confounded: settings that differ besides the variable; any makes every verdict ``confounded``.
        identical: whether it resolves to the baseline's own settings, so that there is nothing to compare.
    """

    name: str
    runs: pd.DataFrame
    confounded: tuple[str, ...] = ()
    identical: bool = False


def compare(
    baseline: Candidate,
    arms: Sequence[Candidate],
    again: tuple[pd.DataFrame, pd.DataFrame] | None = None,
    *,
    facet: str = "",
    same_requests: bool = True,
    thresholds: Thresholds | None = None,
) -> list[Finding]:
    """Compare every arm of one facet with its baseline in every judged metric; together they are one Holm family.

    Args:
        again: (runs of an arm, runs of the same arm beside it in each block); gives the noise floor by metric.
        same_requests: pair only runs with the same workload hash; False where the requests are what is varied.
        thresholds: default :class:`Thresholds`.

    Returns:
        A finding an arm and metric, metrics that are unknown in both left out.
    """
    limits = thresholds or Thresholds()
    floors = _floors(again, same_requests, limits)
    drafts: list[tuple[Candidate, str, PairedRatio | str]] = []
    for arm in arms:
        for metric in JUDGED:
            if _known(arm.runs, metric).any() or _known(baseline.runs, metric).any():
                drafts.append((arm, metric, _ratio(arm.runs, baseline.runs, metric, same_requests, limits)))
    tested = [
        i
        for i, (arm, _, r) in enumerate(drafts)
        if isinstance(r, PairedRatio) and not arm.identical and not arm.confounded
    ]
    judged = judge(
        [r for i in tested if isinstance(r := drafts[i][2], PairedRatio)],
        [_direction(drafts[i][1]) for i in tested],
        [floors.get(drafts[i][1]) for i in tested],
        limits,
    )
    by_draft = dict(zip(tested, judged, strict=True))
    return [
        _finding(facet, baseline, arm, metric, ratio, floors.get(metric), by_draft.get(i) or _without_test(arm, ratio))
        for i, (arm, metric, ratio) in enumerate(drafts)
    ]


def tests_in(findings: Sequence[Finding]) -> int:
    """How many comparisons share one Holm correction."""
    return sum(f.p_holm is not None for f in findings)


def finding_of(findings: Sequence[Finding], facet: str, arm: str, metric: str) -> Finding | None:
    """The finding about ``metric`` of ``arm``; None if there is none."""
    return next((f for f in findings if (f.facet, f.arm, f.metric) == (facet, arm, metric)), None)


def to_frame(findings: Sequence[Finding]) -> pd.DataFrame:
    """The comparison table, with the dtypes of :data:`harness.tables.BESIDE`."""
    columns = {f.name: [asdict(row)[f.name] for row in findings] for f in fields(Finding)}
    dtypes = {c.name: c.dtype for c in BESIDE["comparison"]}
    return pd.DataFrame({name: pd.Series(columns[name], dtype=dtype) for name, dtype in dtypes.items()})


def _direction(metric: str) -> str:
    return RUN_METRICS[metric].better or HIGHER


def _known(runs: pd.DataFrame, metric: str) -> pd.Series:
    return (runs["status"] == "ok") & runs[metric].notna()


def _floors(
    again: tuple[pd.DataFrame, pd.DataFrame] | None, same_requests: bool, limits: Thresholds
) -> dict[str, float | None]:
    if again is None:
        return {}
    ratios = {metric: _ratio(again[1], again[0], metric, same_requests, limits) for metric in JUDGED}
    return {m: noise_floor(r, limits) for m, r in ratios.items() if isinstance(r, PairedRatio)}


def _ratio(
    arm: pd.DataFrame, baseline: pd.DataFrame, metric: str, same_requests: bool, limits: Thresholds
) -> PairedRatio | str:
    """The paired ratio, or why there is none."""
    keys = (["workload_hash"] if same_requests else []) + ["seed", "repeat"]
    own, other = _by_key(arm, metric, keys), _by_key(baseline, metric, keys)
    if own is None or other is None:
        return "the same repeat is there more than once, so runs cannot be paired"
    common = [key for key in own if key in other]
    if not common:
        return "no two runs of the same requests, seed and repeat in which both know it"
    values, to = [own[key] for key in common], [other[key] for key in common]
    if min(*values, *to) <= 0:
        return "a value of 0 has no ratio"
    return paired_ratio(values, to, limits.confidence)


def _by_key(runs: pd.DataFrame, metric: str, keys: Sequence[str]) -> dict[tuple[object, ...], float] | None:
    """Values by what must be equal in a pair, in the order of the runs; None if a key is there twice."""
    rows = runs[_known(runs, metric)]
    found: dict[tuple[object, ...], float] = {}
    for *key, value in rows[[*keys, metric]].itertuples(index=False):
        named = tuple(None if pd.isna(part) else part for part in key)
        if named in found:
            return None
        found[named] = float(value)
    return found


def _without_test(arm: Candidate, ratio: PairedRatio | str) -> Judgement:
    if arm.confounded:
        return Judgement(Verdict.CONFOUNDED, "also differs: " + ", ".join(arm.confounded), None)
    if arm.identical:
        return Judgement(None, "identical after resolution: not compared", None)
    return Judgement(None, ratio if isinstance(ratio, str) else "not tested", None)


def _finding(
    facet: str,
    baseline: Candidate,
    arm: Candidate,
    metric: str,
    ratio: PairedRatio | str,
    floor: float | None,
    judgement: Judgement,
) -> Finding:
    paired = ratio if isinstance(ratio, PairedRatio) and not arm.identical else None
    return Finding(
        facet=facet,
        baseline=baseline.name,
        arm=arm.name,
        metric=metric,
        better=_direction(metric),
        pairs=paired.n if paired else 0,
        baseline_median=_median(baseline.runs, metric),
        arm_median=_median(arm.runs, metric),
        ratio=paired.ratio if paired else None,
        ratio_smallest=paired.smallest if paired else None,
        ratio_largest=paired.largest if paired else None,
        ratio_low=paired.low if paired else None,
        ratio_high=paired.high if paired else None,
        p=paired.p if paired else None,
        p_holm=judgement.p_holm,
        noise_floor=floor,
        verdict=None if judgement.verdict is None else str(judgement.verdict),
        reason=judgement.reason,
    )


def _median(runs: pd.DataFrame, metric: str) -> float | None:
    known = runs.loc[_known(runs, metric), metric]
    return float(known.median()) if len(known) else None


def confounded_arms(findings: Sequence[Finding]) -> Mapping[str, str]:
    """Arms whose verdicts are confounded, with what else differs."""
    return {f"{f.facet} · {f.arm}" if f.facet else f.arm: f.reason for f in findings if f.verdict == Verdict.CONFOUNDED}
