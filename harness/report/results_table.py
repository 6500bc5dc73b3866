"""The table of results in the page, with units and definitions from :mod:`harness.tables`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from harness.analysis.comparison import IDENTICAL, Finding, finding_of, tests_in
from harness.analysis.verdict import Thresholds, Verdict
from harness.gate import EXPLAINED
from harness.report.arms import Arm, Spread, baseline_of, by_facet, memory_metric, ratio
from harness.report.page import details, text_table
from harness.report.quantity import UNKNOWN, in_unit, number, times
from harness.report.read import Results
from harness.report.verdicts import interval_in_words, no_verdict_sentences
from harness.tables import Column, column

# Column of runs and its heading; one that is unknown in every arm is left out. The first ones fit a page.
_MAIN = {
    "gen_tok_s": "generated",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p95_ms": "TTFT p95",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "e2e_p50_ms": "e2e p50",
}
_MEMORY = {
    "peak_gpu_reserved_bytes": "peak GPU memory (reserved)",
    "peak_gpu_used_bytes": "peak GPU memory (device)",
    "peak_rss_bytes": "peak memory (RSS)",
}
_MORE = {
    "itl_p95_ms": "ITL p95",
    "tpot_p50_ms": "TPOT p50",
    "e2e_p95_ms": "e2e p95",
    "queue_p50_ms": "queue p50",
    "prompt_tok_s": "prompt",
    "request_s": "requests",
    "preemptions": "preemptions",
    "kv_blocks_free_min": "free blocks, least",
    "warmup_s": "warm-up",
}
_GATE_HEADS = ["<th>same tokens</th>", "<th>requests ok<small>runs ok</small></th>"]


def heading(metric: str) -> str:
    """What a metric is called over a picture."""
    return {**_MAIN, **_MEMORY, **_MORE, "gen_tok_s": "throughput"}[metric]


def metric_name(metric: str) -> str:
    """What a judged metric is called in a table of comparisons, with its unit where its values do not carry it."""
    name = {**_MAIN, **_MEMORY, **_MORE, "goodput_request_s": "goodput"}[metric]
    unit = column("runs", metric).unit
    return name if unit == "bytes" else f"{name} [{unit}]"


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
    main = _known({**_MAIN, peak: _MEMORY[peak]}, arms)
    more = _known(_MORE, arms)
    facets = by_facet(arms)

    def tables(table: Callable[[Sequence[Arm]], str]) -> str:
        titles = (f"<h3>{escape(facet)}</h3>" if facet else "" for facet in facets)
        return "\n".join(title + table(members) for title, members in zip(titles, facets.values(), strict=True))

    repeats = "Large figures are medians over repeats, small ones the range. " if _repeated(arms) else ""
    note = (
        f'<p class="soft">{repeats}Greyed p99: too few samples. Failed and cancelled requests have no latencies; '
        "padding enters no rate.</p>"
    )
    unjudged = "".join(f'<p class="soft">{escape(sentence)}</p>' for sentence in no_verdict_sentences(findings))
    return "\n".join(
        [
            tables(lambda members: _table(members, main, findings, with_gates=True)),
            unjudged,
            note,
            details(
                f"{len(more)} more columns: {', '.join(more.values())}",
                tables(lambda members: _table(members, more, findings, with_gates=False)),
            )
            if more
            else "",
            comparison_details(findings),
            _definitions(main | more),
        ]
    )


def _known(headings: dict[str, str], arms: Sequence[Arm]) -> dict[str, str]:
    return {name: text for name, text in headings.items() if any(a.spread(name) for a in arms)}


def _repeated(arms: Sequence[Arm]) -> bool:
    return any(len(a.measured) > 1 for a in arms)


def _table(members: Sequence[Arm], shown: dict[str, str], findings: Sequence[Finding], with_gates: bool) -> str:
    """Arms by metrics; with gates, whether the output was right stands beside the rate, or first without one."""
    baseline = baseline_of(members)
    first = [name for name in shown if name == "gen_tok_s"]
    rest = [name for name in shown if name not in first]
    judged = [finding_of(findings, arm.facet, arm.series, "gen_tok_s") for arm in members]
    with_verdict = any(f is not None and (f.verdict is not None or f.reason == IDENTICAL) for f in judged)
    compared = [f"<th>ratio<small>to {escape(baseline.series)}</small></th>"] if baseline else []
    compared += ["<th>verdict</th>"] if baseline and with_verdict else []
    heads = ["<th>arm</th>", *(_head(name, shown[name]) for name in first)]
    heads += [*(compared if first else []), *(_GATE_HEADS if with_gates else [])]
    heads += [_head(name, shown[name]) for name in rest]
    rows = []
    for arm in members:
        found = {name: finding_of(findings, arm.facet, arm.series, name) for name in shown}
        cells = [f"<td>{escape(arm.series)}</td>"]
        for name in first:
            cells.append(_metric_cell(arm, column("runs", name), found[name]))
            cells += _verdict_cells(arm, baseline, found[name])[: len(compared)] if baseline else []
        cells += _gate_cells(arm) if with_gates else []
        cells += [_metric_cell(arm, column("runs", name), found[name]) for name in rest]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    table = f"<table><thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    return f'<div class="scroll wide">{table}</div>'


def _head(name: str, text: str) -> str:
    unit = column("runs", name).unit
    small = f"<small>{escape(unit)}</small>" if unit != "bytes" else ""
    return f"<th>{escape(text)}{small}</th>"


def _gate_cells(arm: Arm) -> list[str]:
    """Whether the output was right and complete: beside the rate, because a rate of another output is none."""
    n_ok, n = arm.total("n_ok"), arm.total("n_requests")
    short = (n_ok is not None and n is not None and n_ok < n) or len(arm.measured) < len(arm.runs)
    tie = arm.gate == EXPLAINED
    match = "near-ties" if tie else {None: UNKNOWN, True: "yes", False: "no"}[arm.tokens_match]
    requests = f"{UNKNOWN if n_ok is None else n_ok} of {UNKNOWN if n is None else n}"
    return [
        _plain(match, bad=arm.tokens_match is False and not tie),
        _plain(f"{requests}<small>{len(arm.measured)} of {len(arm.runs)}</small>", bad=short),
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
            metric_name(f.metric),
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
