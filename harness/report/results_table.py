"""The table of results in the page, with units and definitions from :mod:`harness.tables`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from harness.analysis.comparison import IDENTICAL, Finding, finding_of, tests_in
from harness.analysis.verdict import Thresholds, Verdict
from harness.gate import EXPLAINED
from harness.report.arms import Arm, Spread, baseline_of, by_facet, memory_metric, ratio
from harness.report.page import details, text_table
from harness.report.quantity import UNKNOWN, in_unit, number, times
from harness.report.read import Results
from harness.report.verdicts import interval_in_words
from harness.tables import Column, column

# Heading and column; one that is unknown in every arm is left out.
METRIC_HEADINGS = {
    "gen_tok_s": "generated",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p95_ms": "TTFT p95",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p95_ms": "ITL p95",
    "itl_p99_ms": "ITL p99",
    "tpot_p50_ms": "TPOT p50",
    "e2e_p50_ms": "e2e p50",
    "e2e_p95_ms": "e2e p95",
    "queue_p50_ms": "queue p50",
    "prompt_tok_s": "prompt",
    "request_s": "requests",
    "preemptions": "preemptions",
    "kv_blocks_free_min": "free blocks, least",
    "warmup_s": "warm-up",
}
MEMORY_HEADINGS = {
    "peak_gpu_reserved_bytes": "peak GPU memory (reserved)",
    "peak_gpu_used_bytes": "peak GPU memory (device)",
    "peak_rss_bytes": "peak memory (RSS)",
}


_GATE_HEADS = ["<th>same tokens</th>", "<th>requests ok</th>", "<th>runs ok</th>"]


_GATES = {
    "ratio": "generated tokens/s of the arm over those of the baseline: geometric mean over pairs of runs with the "
    "same requests, seed and repeat, small the 95 % interval (expanded percentile bootstrap over the pairs; with fewer "
    "than five pairs their range). Of the two medians where runs cannot be paired.",
    "verdict": "of generated tokens/s: better, worse, indistinguishable or confounded. None without enough pairs. The "
    "other metrics stand in the table of comparisons.",
    "same tokens": "whether the token ids of every request equal those of the reference engine; near-ties: they "
    "first differ where the model itself is undecided; unknown if they were not compared.",
    "requests ok": "requests that ended by the end-of-sequence token or at their cap with at least one token, of all "
    "requests of all runs.",
    "runs ok": "runs that ended well, of all; only they enter numbers.",
}


def results_table(results: Results, arms: Sequence[Arm], findings: Sequence[Finding] = ()) -> str:
    """One table a facet, then every comparison and what the columns mean."""
    peak = memory_metric(results.runs)
    headings = {**METRIC_HEADINGS, peak: MEMORY_HEADINGS[peak]}
    shown = {name: text for name, text in headings.items() if any(a.spread(name) for a in arms)}
    tables = []
    for facet, members in by_facet(arms).items():
        title = f"<h3>{escape(facet)}</h3>" if facet else ""
        tables.append(title + _table(members, shown, findings))
    repeats = "Large figures are medians over repeats, small ones the range. " if _repeated(arms) else ""
    note = (
        f'<p class="soft">{repeats}Greyed p99: too few samples. Failed and cancelled requests have no latencies; '
        "padding enters no rate.</p>"
    )
    return "\n".join([*tables, note, comparison_details(findings), _definitions(shown)])


def _repeated(arms: Sequence[Arm]) -> bool:
    return any(len(a.measured) > 1 for a in arms)


def _table(members: Sequence[Arm], shown: dict[str, str], findings: Sequence[Finding]) -> str:
    baseline = baseline_of(members)
    heads = ["<th>arm</th>"]
    for name, text in shown.items():
        unit = column("runs", name).unit
        small = f"<small>{escape(unit)}</small>" if unit != "bytes" else ""
        heads.append(f"<th>{escape(text)}{small}</th>")
        if name == "gen_tok_s":
            if baseline:
                heads += [f"<th>ratio<small>to {escape(baseline.series)}</small></th>", "<th>verdict</th>"]
            heads += _GATE_HEADS
    if "gen_tok_s" not in shown:
        heads += _GATE_HEADS
    rows = "\n".join(f"<tr>{_cells(arm, baseline, shown, findings)}</tr>" for arm in members)
    table = f"<table><thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    return f'<div class="scroll wide">{table}</div>'


def _cells(arm: Arm, baseline: Arm | None, shown: dict[str, str], findings: Sequence[Finding]) -> str:
    cells = [f"<td>{escape(arm.series)}</td>"]
    for name in shown:
        cells.append(_metric_cell(arm, column("runs", name), finding_of(findings, arm.facet, arm.series, name)))
        if name == "gen_tok_s":
            cells += (
                _verdict_cells(arm, baseline, finding_of(findings, arm.facet, arm.series, name)) if baseline else []
            )
            cells += _gate_cells(arm)
    if "gen_tok_s" not in shown:
        cells += _gate_cells(arm)
    return "".join(cells)


def _gate_cells(arm: Arm) -> list[str]:
    """Whether the output was right and complete: beside the rate, because a rate of another output is none."""
    n_ok, n = arm.total("n_ok"), arm.total("n_requests")
    short = n_ok is not None and n is not None and n_ok < n
    tie = arm.gate == EXPLAINED
    match = "near-ties" if tie else {None: UNKNOWN, True: "yes", False: "no"}[arm.tokens_match]
    return [
        _plain(match, bad=arm.tokens_match is False and not tie),
        _plain(f"{UNKNOWN if n_ok is None else n_ok} of {UNKNOWN if n is None else n}", bad=short),
        _plain(f"{len(arm.measured)} of {len(arm.runs)}", bad=len(arm.measured) < len(arm.runs)),
    ]


def _plain(text: str, bad: bool) -> str:
    return f'<td class="bad">{text}</td>' if bad else f"<td>{text}</td>"


def _metric_cell(arm: Arm, definition: Column, finding: Finding | None) -> str:
    spread = arm.spread(definition.name)
    if spread is None:
        return f"<td>{UNKNOWN}</td>"
    text = in_unit(spread.median, definition.unit) + _range(spread, definition.unit)
    if arm.has_few_samples(definition.name):
        return f'<td class="few" title="{arm.samples(definition.name)} samples">{text}</td>'
    if finding is not None and finding.verdict == Verdict.WORSE:
        return f'<td class="bad" title="worse: {escape(finding.reason)}">{text}</td>'
    return f"<td>{text}</td>"


def _range(spread: Spread, unit: str) -> str:
    if spread.n < 2 or unit == "bytes":
        return ""
    return f"<small>{number(spread.low)}–{number(spread.high)}</small>"


def _verdict_cells(arm: Arm, baseline: Arm, finding: Finding | None) -> list[str]:
    """Ratio and verdict of one arm."""
    if arm is baseline:
        return ["<td>baseline</td>", "<td></td>"]
    if finding is not None and finding.reason == IDENTICAL:
        return [f"<td>{UNKNOWN}</td>", f'<td title="{escape(IDENTICAL)}">identical</td>']
    if finding is None or finding.ratio is None:
        against = ratio(arm, baseline, "gen_tok_s")
        unpaired = f"<td>{UNKNOWN}</td>" if against is None else f"<td>{times(against.mean)}</td>"
        return [unpaired, _verdict_cell(finding)]
    low, high = finding.ratio_smallest, finding.ratio_largest
    if finding.verdict is not None and finding.ratio_low is not None:
        low, high = finding.ratio_low, finding.ratio_high
    small = f"<small>{times(low)}–{times(high)}</small>" if low is not None and high is not None else ""
    return [f"<td>{times(finding.ratio)}{small if finding.pairs > 1 else ''}</td>", _verdict_cell(finding)]


def _verdict_cell(finding: Finding | None) -> str:
    if finding is None:
        return f"<td>{UNKNOWN}</td>"
    bad = ' class="bad"' if finding.verdict == Verdict.CONFOUNDED else ""
    return f'<td{bad} title="{escape(finding.reason)}">{finding.verdict or UNKNOWN}</td>'


def comparison_details(findings: Sequence[Finding]) -> str:
    """Every metric of every arm against its baseline, and the rule; "" without comparisons."""
    if not findings:
        return ""
    rows = [
        [
            *([f.facet] if any(g.facet for g in findings) else []),
            f.arm,
            f.metric,
            UNKNOWN if f.ratio is None else times(f.ratio),
            interval_in_words(f),
            str(f.pairs),
            UNKNOWN if f.p_holm is None else f"{f.p_holm:.2g}",
            UNKNOWN if f.noise_floor is None else f"{f.noise_floor:.1%}",
            f.verdict or "none",
            f.reason,
        ]
        for f in findings
    ]
    facet = ["where"] if any(f.facet for f in findings) else []
    header = [*facet, "arm", "metric", "ratio", "95 %", "pairs", "p (Holm)", "A/A floor", "verdict", "why"]
    families = {f.facet: tests_in([g for g in findings if g.facet == f.facet]) for f in findings}
    rule = f"<p>{escape(Thresholds().in_words(max(families.values())))}</p>"
    return details(
        f"Every comparison with {' and '.join(dict.fromkeys(f.baseline for f in findings))}",
        rule + text_table(header, rows),
    )


def _definitions(shown: dict[str, str]) -> str:
    entries = []
    for name, text in shown.items():
        c = column("runs", name)
        null = f" Unknown if: {c.null}." if c.null else ""
        unit = f" [{c.unit}]" if c.unit else ""
        entries.append(
            f"<dt>{escape(text)}{escape(unit)}</dt><dd><code>{name}</code>: {escape(c.definition)}.{escape(null)}</dd>"
        )
    per_request = [
        f"<dt>{heading}</dt><dd><code>{name}</code>: {escape(column(table, name).definition)}.</dd>"
        for heading, table, name in (
            ("one TTFT [ms]", "requests", "ttft_ms"),
            ("one ITL [ms]", "itl", "itl_ms"),
            ("one TPOT [ms]", "requests", "tpot_ms"),
            ("one e2e [ms]", "requests", "e2e_ms"),
        )
    ]
    times = [
        f"<dt>{name} [s]</dt><dd><code>{name}_s</code>: {escape(column('requests', f'{name}_s').definition)}.</dd>"
        for name in ("t_sched", "t_submit", "t_admit", "t_first", "t_last", "t_done")
    ]
    gates = [f"<dt>{heading}</dt><dd>{escape(text)}</dd>" for heading, text in _GATES.items()]
    return details("What the columns mean", f"<dl>{''.join(entries + gates + per_request + times)}</dl>")
