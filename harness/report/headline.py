"""The finding in words. Every number in a sentence stands in the table of the same page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.comparison import Finding, finding_of
from harness.analysis.verdict import Thresholds
from harness.gate import EXPLAINED
from harness.report.arms import Arm, Ratio, baseline_of, by_facet, ratio
from harness.report.quantity import number, times
from harness.report.verdicts import in_words

FEWEST_PAIRED_REPEATS = Thresholds().fewest_pairs
ONE_RUN_EACH = f"One run each: no verdict yet (measure.repeats={FEWEST_PAIRED_REPEATS} gives one)."


def headlines(
    arms: Sequence[Arm], findings: Sequence[Finding] = (), never_acted: Mapping[str, str] | None = None
) -> list[str]:
    """One sentence a facet or a sweep, and one about the tokens.

    Args:
        findings: of the same arms; without them no verdict is stated.
        never_acted: by facet whose variable never acted, the clause that says so: no arm of it is called the fastest.
    """
    sentences = []
    one_run_each = False
    for facet, members in by_facet(arms).items():
        measured = [a for a in members if a.spread("gen_tok_s") and not a.is_replica]
        where = f"{facet}: " if facet else ""
        if not measured:
            ran = any(len(a.measured) for a in members)
            why = "no rate is known of the runs that ended well" if ran else "no run ended well"
            said = [f"{why}, so there is nothing to report."]
        elif never_acted and facet in never_acted:
            said = [f"{never_acted[facet]}; the arms are the same settings in effect."]
        elif len({a.number for a in measured} - {None}) > 1 and len({a.engine for a in measured}) == 1:
            said = _sweep(measured, findings)
        elif len(measured) > 1:
            said = _comparison(measured, baseline_of(members), findings)
        else:
            said = [_single(measured[0])]
        one_run_each |= ONE_RUN_EACH in said
        sentences += [where + s for s in said if s != ONE_RUN_EACH]
    return [*sentences, *([ONE_RUN_EACH] if one_run_each else []), *_tokens(arms)]


def _rate(arm: Arm) -> float:
    spread = arm.spread("gen_tok_s")
    assert spread is not None  # only measured arms come here
    return spread.median


def _single(arm: Arm) -> str:
    text = f"{arm.series} generated {number(_rate(arm))} tokens/s"
    ttft, itl = arm.spread("ttft_p50_ms"), arm.spread("itl_p50_ms")
    if ttft:
        text += f"; half of the requests had their first token within {number(ttft.median)} ms"
    if itl:
        text += f", and half of the gaps between tokens were at most {number(itl.median)} ms"
    if len(arm.measured) == 1:
        text += "; one run says nothing about the spread from run to run"
    return text + "."


def _comparison(measured: Sequence[Arm], baseline: Arm | None, findings: Sequence[Finding]) -> list[str]:
    if baseline is None or baseline not in measured:
        ordered = sorted(measured, key=_rate, reverse=True)
        return [", ".join(f"{a.series} {number(_rate(a))}" for a in ordered) + " tokens/s (no baseline ended well)."]
    sentences = []
    one_run_each = False
    for arm in measured:
        against = ratio(arm, baseline, "gen_tok_s")
        if arm is baseline or against is None:
            continue
        text = f"{arm.series} generated {number(_rate(arm))} tokens/s, {baseline.series} {number(_rate(baseline))}: "
        finding = finding_of(findings, arm.facet, arm.series, "gen_tok_s")
        known = finding is not None and (finding.verdict is not None or finding.pairs == 0 or finding.is_withheld)
        once = not known and len(arm.measured) == len(baseline.measured) == 1
        one_run_each |= once
        shown = in_words(finding) if finding and known else times(against.mean) if once else _ratio(against)
        sentences.append(text + shown + _first_token(arm, baseline))
    return [*sentences, ONE_RUN_EACH] if one_run_each else sentences


def _ratio(against: Ratio) -> str:
    """The ratio with its range where no verdict can be given: no direction is claimed."""
    if against.n == 1:
        return f"{times(against.mean)} between the medians, which were not paired: no difference is shown"
    text = f"{times(against.mean)} in the geometric mean of {against.n} paired repeats"
    text += f", from {times(against.low)} to {times(against.high)}"
    if against.low <= 1 <= against.high:
        return f"{text}, so no difference is shown"
    if against.n >= FEWEST_PAIRED_REPEATS:
        return text
    return f"{text}; with fewer than {FEWEST_PAIRED_REPEATS} no difference is shown to be more than chance"


def _first_token(arm: Arm, baseline: Arm) -> str:
    own, base = arm.spread("ttft_p50_ms"), baseline.spread("ttft_p50_ms")
    if own is None or base is None:
        return "."
    return f". Median time to first token: {number(own.median)} ms against {number(base.median)} ms."


def _sweep(measured: Sequence[Arm], findings: Sequence[Finding]) -> list[str]:
    sentences = []
    fastest = max(measured, key=_rate)
    slowest = min(measured, key=_rate)
    sentences.append(
        f"Highest throughput at {fastest.series}: {number(_rate(fastest))} tokens/s; "
        f"lowest at {slowest.series}: {number(_rate(slowest))}."
    )
    timed = [(spread.median, a) for a in measured if (spread := a.spread("ttft_p95_ms"))]
    if timed:
        best = min(timed, key=lambda pair: pair[0])
        sentences.append(f"Shortest TTFT p95 at {best[1].series}: {number(best[0])} ms.")
    facet = [f for f in findings if f.facet == fastest.facet and f.metric == "gen_tok_s"]
    if any(f.verdict or f.is_withheld for f in facet):
        return [*sentences, _verdicts(facet)]
    first, second = fastest.spread("gen_tok_s"), slowest.spread("gen_tok_s")
    if first and second and fastest is not slowest:
        fewest = min(first.n, second.n)
        if fewest == 1:
            sentences.append(ONE_RUN_EACH)
        elif first.low <= second.high:
            sentences.append("The ranges of the fastest and the slowest arm overlap, so no difference is shown.")
        elif fewest < FEWEST_PAIRED_REPEATS:
            sentences.append(
                f"With fewer than {FEWEST_PAIRED_REPEATS} repeats no difference is shown to be more than chance, "
                "although the ranges of the fastest and the slowest arm do not overlap."
            )
    return sentences


def _verdicts(findings: Sequence[Finding]) -> str:
    """One metric's verdicts of all arms, the arms of each verdict together."""
    groups: dict[str, list[str]] = {}
    for f in findings:
        shown = f.arm if f.ratio is None else f"{f.arm} ({times(f.ratio)})"
        groups.setdefault(f.verdict or f.reason, []).append(shown)
    parts = [f"{verdict}: {', '.join(arms)}" for verdict, arms in groups.items()]
    return f"Generated tokens/s against {findings[0].baseline}: {'; '.join(parts)}."


def _tokens(arms: Sequence[Arm]) -> list[str]:
    compared = [a for a in arms if a.tokens_match is not None]
    if not compared:
        return []
    wrong = [a.label for a in compared if not a.tokens_match and a.gate != EXPLAINED]
    if wrong:
        return [f"Other tokens than the reference: {', '.join(wrong)}."]
    ties = [a.label for a in compared if a.gate == EXPLAINED]
    equal = [a.label for a in compared if a.label not in ties]
    sentences = [f"The tokens of {', '.join(equal)} equal the reference's in every request."] if equal else []
    if ties:
        sentences.append(
            f"The tokens of {', '.join(ties)} are the reference's but where the model itself is undecided."
        )
    return sentences
