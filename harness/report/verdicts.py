"""Verdicts of a set of results: every arm against the baseline of its facet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from harness.analysis.comparison import IDENTICAL, PAIR_BY, Candidate, Finding, compare, finding_of, objection
from harness.analysis.verdict import Verdict
from harness.report.arms import Arm, baseline_of, by_facet
from harness.report.config_diff import config_differences, confounders, is_identical, settings_by_run
from harness.report.quantity import UNKNOWN, times
from harness.report.read import Results


def compare_arms(results: Results, arms: Sequence[Arm]) -> list[Finding]:
    """Findings of all facets that have a baseline; each facet is one family of tests."""
    settings = settings_by_run(results)
    found: list[Finding] = []
    for facet, members in by_facet(arms).items():
        baseline = baseline_of(members)
        if baseline is None:
            continue
        candidates = []
        for arm in members:
            if arm is baseline or arm.is_replica:
                continue
            differences = config_differences(results, [baseline, arm], settings)
            identical = is_identical(differences, baseline, arm, settings)
            candidates.append(Candidate(arm.series, arm.runs, confounders(differences), identical, objection(arm.runs)))
        found += compare(
            Candidate(baseline.series, baseline.runs),
            candidates,
            _again(members),
            facet=facet,
            pair_by=PAIR_BY[1:] if baseline.varies_requests else PAIR_BY,
        )
    return found


def _again(members: Sequence[Arm]) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Runs of the arm that stands twice in each block: its first and its second ones."""
    for replica in members:
        if replica.is_replica:
            for arm in members:
                if not arm.is_replica and (arm.engine, arm.value) == (replica.engine, replica.value):
                    return arm.runs, replica.runs
    return None


def in_words(finding: Finding) -> str:
    """A finding's ratio with its range, and what follows, for a sentence or a table cell."""
    if finding.ratio is None:
        return finding.reason
    text = f"{times(finding.ratio)}"
    if finding.verdict is None or finding.ratio_low is None or finding.ratio_high is None:
        if finding.ratio_smallest is not None and finding.ratio_largest is not None and finding.pairs > 1:
            text += f" ({times(finding.ratio_smallest)}–{times(finding.ratio_largest)} in {finding.pairs} pairs)"
        return f"{text}, no verdict: {finding.reason}"
    text += f" ({times(finding.ratio_low)}–{times(finding.ratio_high)} over {finding.pairs} pairs)"
    return f"{text}, {finding.verdict}: {finding.reason}"


def interval_in_words(finding: Finding) -> str:
    """A finding's interval for a table cell; of too few pairs for one their range, named as such."""
    if finding.ratio_low is not None and finding.ratio_high is not None:
        return f"{times(finding.ratio_low)}–{times(finding.ratio_high)}"
    if finding.ratio_smallest is not None and finding.ratio_largest is not None and finding.pairs > 1:
        return f"range {times(finding.ratio_smallest)}–{times(finding.ratio_largest)}"
    return UNKNOWN


def verdict_sentences(arms: Sequence[Arm], findings: Sequence[Finding], names: Mapping[str, str]) -> list[str]:
    """One sentence an arm with verdicts: what is better and worse than the baseline, and what shows no difference.

    Args:
        names: metrics that are told, by column of runs, and what they are called.
    """
    sentences = []
    for members in by_facet(arms).values():
        for arm in members:
            told = {m: finding_of(findings, arm.facet, arm.series, m) for m in names}
            parts = []
            for verdict in (Verdict.BETTER, Verdict.WORSE):
                found = [_in_brief(names[m], f) for m, f in told.items() if f is not None and f.verdict == verdict]
                parts += [f"{verdict}: {', '.join(found)}"] if found else []
            same = [names[m] for m, f in told.items() if f is not None and f.verdict == Verdict.INDISTINGUISHABLE]
            parts += [f"no difference shown: {', '.join(same)}"] if same else []
            baseline = baseline_of(members)
            if parts and baseline is not None:
                sentences.append(f"{arm.label} against {baseline.series}: {'; '.join(parts)}.")
    return sentences


def no_verdict_sentences(findings: Sequence[Finding]) -> list[str]:
    """Why arms have no verdict on generated tokens/s, each reason once; arms are named unless it holds for all."""
    judged = [f for f in findings if f.metric == "gen_tok_s"]
    without: dict[str, list[str]] = {}
    for f in judged:
        if f.verdict is None and f.reason != IDENTICAL:
            without.setdefault(f.reason, []).append(f"{f.facet} · {f.arm}" if f.facet else f.arm)
    return [
        f"No verdict: {reason}." if len(arms) == len(judged) else f"No verdict on {', '.join(arms)}: {reason}."
        for reason, arms in without.items()
    ]


def _in_brief(name: str, finding: Finding) -> str:
    if finding.ratio is None or finding.ratio_low is None or finding.ratio_high is None:
        return name
    return f"{name} {times(finding.ratio)} ({times(finding.ratio_low)}–{times(finding.ratio_high)})"
