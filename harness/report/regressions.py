"""What got worse where throughput got better (M-s2-02): a gain is never told alone."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.comparison import Finding, finding_of
from harness.analysis.verdict import Verdict
from harness.report.arms import Arm, baseline_of, by_facet, memory_metric
from harness.report.quantity import times

_GAINS = ("gen_tok_s", "prompt_tok_s")
_BESIDE = {"ttft_p95_ms": "TTFT p95", "itl_p99_ms": "ITL p99"}


def regression_sentences(arms: Sequence[Arm], findings: Sequence[Finding]) -> list[str]:
    """One sentence for each arm whose throughput is better by its verdict: which of TTFT p95, ITL p99 and peak memory
    is worse by its own, and of which nothing can be said."""
    sentences = []
    for members in by_facet(arms).values():
        baseline = baseline_of(members)
        for arm in members:
            if arm is baseline or baseline is None or not _gained(arm, findings):
                continue
            peak = memory_metric(arm.runs)
            worse, open_ = [], []
            for metric, name in {**_BESIDE, peak: "peak memory"}.items():
                finding = finding_of(findings, arm.facet, arm.series, metric)
                if finding is None or finding.verdict is None:
                    open_.append(name)
                elif finding.verdict == Verdict.WORSE and finding.ratio is not None:
                    worse.append(f"{name} {times(finding.ratio)}")
            if worse:
                sentences.append(
                    f"The throughput of {arm.label} is paid for against {baseline.series}: {', '.join(worse)}."
                )
            if open_:
                sentences.append(
                    f"No verdict says whether {arm.label} pays for its throughput with {', '.join(open_)}."
                )
    return sentences


def _gained(arm: Arm, findings: Sequence[Finding]) -> bool:
    found = [finding_of(findings, arm.facet, arm.series, metric) for metric in _GAINS]
    return any(f is not None and f.verdict == Verdict.BETTER for f in found)
