"""One table a run or sweep, in a terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from harness.analysis.comparison import IDENTICAL, Finding, finding_of
from harness.gate import EXPLAINED
from harness.report.arms import Arm, Spread, baseline_of, by_facet, group_arms, memory_metric, ratio
from harness.report.completeness import missing_notes
from harness.report.memory import ledger_sentences
from harness.report.model_names import model_labels
from harness.report.phases import phase_tables
from harness.report.quantity import UNKNOWN, memory, number, times
from harness.report.read import Results, read_results
from harness.report.saturation import knee_sentences
from harness.report.slo import slo_sentences
from harness.report.validity import PERCENTILES, validity_notes
from harness.report.verdicts import compare_arms, no_verdict_sentences, verdict_sentences

_PIPE_WIDTH = 240  # nothing is wrapped or cut where no terminal sets a width

_LATENCIES = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p95_ms": "TTFT p95",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "e2e_p50_ms": "e2e p50",
}
# Counts of the scheduler and the cache, shown where there are any.
_COUNTS = {"preemptions": "preempted", "cached_tokens": "cached"}
# What a narrow terminal goes without, first to last.
_DISPENSABLE = ("cached", "preempted", "e2e p50", "peak RSS", "peak GPU", "ITL p50", "TTFT p95", "verdict")


def print_summary(directory: Path | str, console: Console | None = None) -> None:
    """Print the summary table of a run folder or a sweep's root, and what is wrong with its numbers.

    Args:
        console: where to print; standard output if None. Through a pipe the table is plain markdown.

    Raises:
        ResultsError: the directory holds nothing to print, in one line.
    """
    if console is None:
        console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH, no_color=True)
    results = read_results(Path(directory))
    arms = group_arms(results)
    findings = compare_arms(results, arms)
    hidden: list[str] = []
    for facet, members in by_facet(arms).items():
        table, left_out = _fitting(*_content(facet, members, results, findings), console)
        console.print(table)
        hidden += (name for name in left_out if name not in hidden)
    for phases in phase_tables(results, arms):
        title = " · ".join(part for part in (phases.facet, "decode step by requests in it") if part)
        console.print(_table(escape(title), phases.header, phases.rows, (), plain=not console.is_terminal))
    if hidden:
        said = f"Columns left out to fit {console.width} characters: {', '.join(hidden)}. The report has them."
        console.print(said, style="dim", highlight=False)
    for line in _remarks(results, arms, findings, greyed=console.is_terminal):
        console.print(escape(line), style="dim" if console.is_terminal else "", highlight=False)


def _content(
    facet: str, members: list[Arm], results: Results, findings: Sequence[Finding]
) -> tuple[str, list[str], list[list[str]]]:
    """Title, headers and rows of a facet's table."""
    baseline = baseline_of(members)
    peak = memory_metric(results.runs)
    headers = ["arm", "tok/s", *(["ratio", "verdict"] if baseline else []), *_LATENCIES.values()]
    counts = {m: name for m, name in _COUNTS.items() if any(arm.total(m) for arm in members)}
    headers += [*counts.values(), "peak RSS" if peak == "peak_rss_bytes" else "peak GPU", "failed", "same tokens"]
    rows = [
        _row(arm, baseline, [*counts], peak, finding_of(findings, facet, arm.series, "gen_tok_s")) for arm in members
    ]
    return _title(facet, members, results), headers, rows


def _title(facet: str, members: list[Arm], results: Results) -> str:
    """What is varied, on what: ``max_batch_tokens: engine.max_batch_tokens · mixed_staged · smollm2 · cpu``."""
    runs = members[0].runs
    varied = [str(v) for name in ("experiment", "variable") for v in runs[name].dropna().unique()]
    # what the facet does not say is the same in all of them
    models = model_labels(results.runs["model"].dropna())
    workloads, devices = (list(results.runs[name].dropna().unique()) for name in ("workload", "device"))
    on = [facet, *(str(v[0]) for v in (workloads, list(models.values()), devices) if len(v) == 1)]
    head = ": ".join(dict.fromkeys(varied))
    said = " · ".join(part for part in on if part)
    return escape(f"{head} on {said}" if head and said else head or said) + " (times in ms)"


def _fitting(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], console: Console
) -> tuple[Table, list[str]]:
    """The table, and the columns left out of it where a terminal is too narrow to show whole numbers in all."""
    left_out: list[str] = []
    dispensable = [name for name in _DISPENSABLE if name in headers]
    while True:
        table = _table(title, headers, rows, left_out, plain=not console.is_terminal)
        needed = Measurement.get(console, console.options.update(width=_PIPE_WIDTH), table).maximum
        if needed <= console.width or not console.is_terminal or not dispensable:
            return table, left_out
        left_out.append(dispensable.pop(0))


def _table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], left_out: Sequence[str], plain: bool
) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=box.MARKDOWN if plain else box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    shown = [k for k, header in enumerate(headers) if header not in left_out]
    for k in shown:
        header = headers[k] if plain else headers[k].replace(" ", "\n")  # a column is no wider than its numbers
        if k:
            table.add_column(header, justify="right", no_wrap=True)
        else:
            table.add_column(header, overflow="fold", min_width=8)
    for row in rows:
        table.add_row(*(row[k] for k in shown))
    return table


def _row(arm: Arm, baseline: Arm | None, counts: Sequence[str], peak: str, finding: Finding | None) -> list[str]:
    cells = [escape(arm.series), _with_range(arm.spread("gen_tok_s"))]
    if baseline is not None:
        cells += ["baseline", ""] if arm.is_baseline else _against(arm, baseline, finding)
    for metric in _LATENCIES:
        spread = arm.spread(metric)
        text = number(spread.median if spread else None)
        cells.append(f"[dim]{text}[/dim]" if spread and arm.has_few_samples(metric) else text)
    for metric in counts:
        spread = arm.spread(metric)
        cells.append(number(spread.median if spread else None))
    used = arm.spread(peak)
    cells.append(memory(used.median if used else None))
    cells.append(_failures(arm))
    same = {None: UNKNOWN, True: "yes", False: "[bold red]NO[/bold red]"}[arm.tokens_match]
    cells.append("near-ties" if arm.gate == EXPLAINED else same)
    return cells


def _against(arm: Arm, baseline: Arm, finding: Finding | None) -> list[str]:
    """Ratio with its interval where there is a verdict, and the verdict."""
    if finding is not None and finding.reason == IDENTICAL:
        return [UNKNOWN, "identical"]
    if finding is None or finding.ratio is None:
        unpaired = ratio(arm, baseline, "gen_tok_s")
        return [UNKNOWN if unpaired is None else times(unpaired.mean), UNKNOWN]
    text = times(finding.ratio)
    if finding.verdict is not None and finding.ratio_low is not None and finding.ratio_high is not None:
        text += f" ({times(finding.ratio_low)}–{times(finding.ratio_high)})"
    return [text, finding.verdict or UNKNOWN]


def _with_range(spread: Spread | None) -> str:
    if spread is None:
        return UNKNOWN
    if spread.n == 1:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.low)}–{number(spread.high)})"


def _failures(arm: Arm) -> str:
    interrupted = int((arm.runs["status"] == "interrupted").sum())
    failed = len(arm.runs) - len(arm.measured) - interrupted
    requests = arm.total("n_failed") or 0
    parts = [f"{failed} of {len(arm.runs)} runs"] if failed else []
    parts += [f"{interrupted} of {len(arm.runs)} runs interrupted"] if interrupted else []
    parts += [f"{requests} of {arm.total('n_requests') or '?'}"] if requests else []
    return f"[red]{', '.join(parts)}[/red]" if parts else "0"


def _remarks(results: Results, arms: list[Arm], findings: Sequence[Finding], greyed: bool) -> list[str]:
    lines = []
    shown = {metric: name for metric, name in PERCENTILES.items() if metric in _LATENCIES}
    if any(len(a.measured) > 1 for a in arms):
        lines.append("Medians over repeats, range in brackets; ratios are geometric means over pairs of equal repeats.")
    lines += no_verdict_sentences(findings)
    lines += verdict_sentences(arms, findings, {"gen_tok_s": "tok/s", **_LATENCIES})
    lines += [*knee_sentences(arms), *slo_sentences(arms), *ledger_sentences(results, arms)]
    return lines + [
        f"! {note}"
        for note in (*missing_notes(results, arms), *validity_notes(results, arms, shown, greyed), *results.notes)
    ]
