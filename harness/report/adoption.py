"""Five checks before a setting or an engine is adopted, each with what it rests on; none is about a single request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.analysis.comparison import Finding, finding_of
from harness.report.arms import Arm, baseline_of, by_facet, ratio
from harness.report.page import section, text_table
from harness.report.quantity import memory, times
from harness.report.read import Results, facts
from harness.report.slo import slo_met
from harness.report.verdicts import in_words

_SHORTAGES = ("oom_load", "oom_prefill", "oom_decode", "cache_exhausted")


@dataclass(frozen=True)
class Check:
    """Whether a condition of adoption holds; None = nothing that was measured tells."""

    name: str
    holds: bool | None
    evidence: str


def adoption_checks(results: Results, arm: Arm, baseline: Arm, findings: Sequence[Finding]) -> list[Check]:
    """The five checks of ``arm`` against ``baseline``, on the requests that were measured."""
    return [
        _correct(arm),
        _less_idle(results, arm, baseline),
        _faster(arm, baseline, findings),
        _within_slo(arm),
        _within_memory(results, arm),
    ]


def adopt(checks: Sequence[Check]) -> str:
    """The verdict: adopt, do not, or what is still to be measured."""
    if broken := [c.name for c in checks if c.holds is False]:
        return "do not adopt: " + ", ".join(broken)
    if open_ := [c.name for c in checks if c.holds is None]:
        return "not decided: " + ", ".join(open_)
    return "adopt"


def adoption_section(results: Results, arms: Sequence[Arm], findings: Sequence[Finding]) -> str:
    """A table of the checks of every arm; "" if nothing has a baseline."""
    rows = []
    for members in by_facet(arms).values():
        baseline = baseline_of(members)
        if baseline is None or not len(baseline.measured):
            continue
        for arm in members:
            if arm is baseline or arm.is_replica or not len(arm.measured):
                continue
            checks = adoption_checks(results, arm, baseline, findings)
            words = {True: "yes", False: "NO", None: "unknown"}
            rows.append([arm.label, adopt(checks), *(f"{words[c.holds]}: {c.evidence}" for c in checks)])
    if not rows:
        return ""
    header = ["arm", "verdict", "same answers", "less idle", "more throughput", "SLO kept", "memory kept"]
    text = (
        "Against the baseline, on these requests: they should have the lengths and arrivals of what will be served. A "
        "faster single request is no reason to adopt."
    )
    return section("Before adopting", f"<p>{text}</p>", text_table(header, rows))


def _correct(arm: Arm) -> Check:
    gates = set(arm.runs["gate"].dropna())
    if not gates:
        return Check("correctness", None, "not compared with a reference")
    return Check("correctness", "failed" not in gates, "compared with the reference: " + ", ".join(sorted(gates)))


def _less_idle(results: Results, arm: Arm, baseline: Arm) -> Check:
    shares = [idle_share(results, a) for a in (arm, baseline)]
    if shares[0] is None or shares[1] is None:
        return Check("GPU idle", None, "no device times or utilisation of both arms")
    return Check("GPU idle", shares[0] < shares[1], f"idle {shares[0]:.0%} of the time, baseline {shares[1]:.0%}")


def idle_share(results: Results, arm: Arm) -> float | None:
    """Share of the measured time in which the device had nothing to do: by the steps' device times where every run has
    them, else by sampled utilisation; None without either."""
    shares = []
    for row in arm.measured.to_dict("records"):
        run_id, wall = str(row["run_id"]), row["wall_s"]
        device = results.of_run("steps", run_id)["gpu_ms"].dropna()
        if len(device) and not pd.isna(wall) and wall > 0:
            shares.append(1 - min(1.0, float(device.sum()) / 1000 / float(wall)))
            continue
        used = results.of_run("telemetry", run_id)["gpu_util_percent"].dropna()
        if not len(used):
            return None
        shares.append(1 - float(used.mean()) / 100)
    return float(np.median(shares)) if shares else None


def _faster(arm: Arm, baseline: Arm, findings: Sequence[Finding]) -> Check:
    finding = finding_of(findings, arm.facet, arm.series, "gen_tok_s")
    if finding is not None and finding.verdict is not None:
        return Check("throughput", str(finding.verdict) == "better", in_words(finding))
    if finding is not None and finding.is_withheld:
        return Check("throughput", None, in_words(finding))
    against = ratio(arm, baseline, "gen_tok_s")
    if against is None:
        return Check("throughput", None, "not known of both arms")
    return Check("throughput", None, f"{times(against.mean)} without enough repeats for a verdict")


def _within_slo(arm: Arm) -> Check:
    met = slo_met(arm)
    if met is None:
        return Check("SLO", None, "none was decided before the runs")
    broken = sorted(set(arm.measured["slo_broken"].dropna()))
    return Check("SLO", met, "every limit was kept" if met else "; ".join(broken))


def _within_memory(results: Results, arm: Arm) -> Check:
    ids = set(arm.runs["run_id"])
    requests = results.tables["requests"]
    short = set(requests.loc[requests["run_id"].isin(ids), "outcome"]) & set(_SHORTAGES)
    errors = " ".join(str(e) for e in arm.runs["error"].dropna()).lower()
    if short or "out of memory" in errors:
        return Check("memory", False, ", ".join(sorted(short)) or "a run ran out of memory")
    peaks, totals = arm.measured["peak_gpu_used_bytes"].dropna(), facts(results, "gpu.memory_bytes")
    known = [int(t) for t in totals if isinstance(t, int | float)]
    if not len(peaks) or not known:
        return Check("memory", None, "no device memory was sampled; no request ran out of it")
    peak, total = int(peaks.max()), min(known)
    return Check("memory", peak < total, f"{memory(peak)} of {memory(total)} at the most, nothing ran out")
