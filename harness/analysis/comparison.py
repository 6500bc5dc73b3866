"""Arms against their baseline, metric by metric, from rows of the runs table: the one place where verdicts are made."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd

from harness.analysis.paired import PairedRatio, paired_ratio
from harness.analysis.verdict import NEVER_BETTER, Judgement, Thresholds, Verdict, judge, noise_floor, withhold
from harness.gate import FAILED
from harness.metrics.metric import HIGHER
from harness.metrics.registry import RUN_METRICS
from harness.tables.comparison import COMPARISON

PAIR_BY = ("workload_hash", "seed", "repeat")
"""What two runs of a pair have in common."""

IDENTICAL = "identical after resolution: not compared"

JUDGED = tuple(name for name, metric in RUN_METRICS.items() if metric.better is not None)
"""Metrics with a direction, in the order of the registry."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the comparison table; the columns of :mod:`harness.tables.comparison` are its definitions."""

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

    @property
    def is_withheld(self) -> bool:
        """Whether it would be better if nothing spoke against the arm (:func:`objection`)."""
        return self.verdict is None and self.reason.startswith(NEVER_BETTER)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arm to be compared with the baseline.

    Attributes:
        name: for people.
        runs: its rows of the runs table.
        confounded: settings that differ besides the variable; any makes every verdict ``confounded``.
        identical: whether it resolves to the baseline's own settings, so that there is nothing to compare.
        objection: why nothing about it may be called better (see :func:`objection`).
    """

    name: str
    runs: pd.DataFrame
    confounded: tuple[str, ...] = ()
    identical: bool = False
    objection: str | None = None


def compare(
    baseline: Candidate,
    arms: Sequence[Candidate],
    again: tuple[pd.DataFrame, pd.DataFrame] | None = None,
    *,
    facet: str = "",
    pair_by: Sequence[str] = PAIR_BY,
) -> list[Finding]:
    """Compare every arm of one facet with its baseline in every judged metric; together they are one Holm family.

    Args:
        again: (runs of an arm, runs of the same arm beside it in each block); gives the noise floor by metric.
        pair_by: columns of the runs table that are equal in a pair; without workload_hash where requests are varied.

    Returns:
        A finding an arm and metric, metrics that are unknown in both left out.
    """
    limits = Thresholds()
    floors = _floors(again, pair_by, limits)
    drafts: list[tuple[Candidate, str, PairedRatio | str]] = []
    for arm in arms:
        for metric in JUDGED:
            if _known(arm.runs, metric) or _known(baseline.runs, metric):
                drafts.append((arm, metric, _ratio(arm.runs, baseline.runs, metric, pair_by, limits)))
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
    by_draft = {i: withhold(j, drafts[i][0].objection) for i, j in zip(tested, judged, strict=True)}
    return [
        _finding(facet, baseline, arm, metric, ratio, floors.get(metric), by_draft.get(i) or _without_test(arm, ratio))
        for i, (arm, metric, ratio) in enumerate(drafts)
    ]


def objection(runs: pd.DataFrame) -> str | None:
    """Why nothing about an arm may be called better; None if nothing speaks against it: the correctness gate failed in
    one of its runs, or a run that ended well broke its SLO."""
    if (runs["gate"] == FAILED).any():
        return "its answers are not the reference's"
    broken = runs.loc[(runs["status"] == "ok") & (runs["slo_met"] == False), "slo_broken"]  # noqa: E712 - null is neither
    if len(broken):
        return f"it breaks the SLO ({next((str(b) for b in broken.dropna()), 'see slo_broken')})"
    return None


def tests_in(findings: Sequence[Finding]) -> int:
    """How many comparisons share one Holm correction."""
    return sum(f.p_holm is not None for f in findings)


def finding_of(findings: Sequence[Finding], facet: str, arm: str, metric: str) -> Finding | None:
    """The finding about ``metric`` of ``arm``; None if there is none."""
    return next((f for f in findings if (f.facet, f.arm, f.metric) == (facet, arm, metric)), None)


def to_frame(findings: Sequence[Finding]) -> pd.DataFrame:
    """The comparison table, with the dtypes of :mod:`harness.tables.comparison`."""
    columns = {f.name: [asdict(row)[f.name] for row in findings] for f in fields(Finding)}
    return pd.DataFrame({name: pd.Series(columns[name], dtype=dtype) for name, dtype in COMPARISON.dtypes.items()})


def write_comparison(directory: Path, findings: Sequence[Finding]) -> None:
    """Write ``comparison.parquet`` and ``comparison.csv``, each whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    frame = to_frame(findings)
    for name, write in (("comparison.parquet", frame.to_parquet), ("comparison.csv", frame.to_csv)):
        aside = directory / f".{name}.{os.getpid()}"
        write(aside, index=False)
        os.replace(aside, directory / name)


def _direction(metric: str) -> str:
    return RUN_METRICS[metric].better or HIGHER


def _known(runs: pd.DataFrame, metric: str) -> list[float]:
    pairs = zip(runs["status"].tolist(), runs[metric].tolist(), strict=True)
    return [float(value) for status, value in pairs if status == "ok" and not pd.isna(value)]


def _floors(
    again: tuple[pd.DataFrame, pd.DataFrame] | None, pair_by: Sequence[str], limits: Thresholds
) -> dict[str, float | None]:
    if again is None:
        return {}
    ratios = {metric: _ratio(again[1], again[0], metric, pair_by, limits) for metric in JUDGED}
    return {m: noise_floor(r, limits) for m, r in ratios.items() if isinstance(r, PairedRatio)}


def _ratio(
    arm: pd.DataFrame, baseline: pd.DataFrame, metric: str, pair_by: Sequence[str], limits: Thresholds
) -> PairedRatio | str:
    """The paired ratio, or why there is none."""
    own, other = _by_key(arm, metric, pair_by), _by_key(baseline, metric, pair_by)
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
    """Values by what must be equal in a pair, in the order of the runs; None if a key is there twice.

    The runs that one process made of an arm share a start, a cache and a moment: they are one value, their median, and
    pair with runs of all the same requests.
    """
    apart: dict[object, list[tuple[tuple[object, ...], float]]] = {}
    columns = (runs[name].tolist() for name in keys)
    made = (runs[name].tolist() for name in ("process", "repeat"))
    rows = zip(runs["status"].tolist(), runs[metric].tolist(), zip(*made, strict=True), *columns, strict=True)
    for n, (status, value, process, *key) in enumerate(rows):
        if status != "ok" or pd.isna(value):
            continue
        named = tuple(None if pd.isna(part) else part for part in key)
        apart.setdefault(n if pd.isna(process[0]) else process, []).append((named, float(value)))
    found: dict[tuple[object, ...], float] = {}
    for members in apart.values():
        one, *others = (named for named, _ in members)
        together = tuple(zip(one, *others, strict=True)) if others else one
        if together in found:
            return None
        found[together] = statistics.median(value for _, value in members)
    return found


def _without_test(arm: Candidate, ratio: PairedRatio | str) -> Judgement:
    if arm.confounded:
        return Judgement(Verdict.CONFOUNDED, "also differs: " + ", ".join(arm.confounded), None)
    if arm.identical:
        return Judgement(None, IDENTICAL, None)
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
    known = _known(runs, metric)
    return statistics.median(known) if known else None


def confounded_arms(findings: Sequence[Finding]) -> Mapping[str, str]:
    """Arms whose verdicts are confounded, with what else differs."""
    return {f"{f.facet} · {f.arm}" if f.facet else f.arm: f.reason for f in findings if f.verdict == Verdict.CONFOUNDED}
