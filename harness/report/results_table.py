"""The table of results in the page, with units and definitions from :mod:`harness.tables`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from harness.gate import EXPLAINED
from harness.report.arms import Arm, Spread, baseline_of, by_facet, memory_metric, ratio
from harness.report.page import details
from harness.report.quantity import UNKNOWN, in_unit, number, times
from harness.report.read import Results
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
    "ratio": "generated tokens/s of the arm over those of the baseline, repeat by repeat where both have the same "
    "repeats, else of the two medians.",
    "same tokens": "whether the token ids of every request equal those of the reference engine; near-ties: they "
    "first differ where the model itself is undecided; unknown if they were not compared.",
    "requests ok": "requests that ended by the end-of-sequence token or at their cap with at least one token, of all "
    "requests of all runs.",
    "runs ok": "runs that ended well, of all; only they enter numbers.",
}


def results_table(results: Results, arms: Sequence[Arm]) -> str:
    """One table a facet, then what its columns mean."""
    peak = memory_metric(results.runs)
    headings = {**METRIC_HEADINGS, peak: MEMORY_HEADINGS[peak]}
    shown = {name: text for name, text in headings.items() if any(a.spread(name) for a in arms)}
    tables = []
    for facet, members in by_facet(arms).items():
        title = f"<h3>{escape(facet)}</h3>" if facet else ""
        tables.append(title + _table(members, shown))
    repeats = "Large figures are medians over repeats, small ones the range. " if _repeated(arms) else ""
    note = (
        f'<p class="soft">{repeats}Greyed p99: too few samples. Failed and cancelled requests have no latencies; '
        "padding enters no rate.</p>"
    )
    return "\n".join([*tables, note, _definitions(shown)])


def _repeated(arms: Sequence[Arm]) -> bool:
    return any(len(a.measured) > 1 for a in arms)


def _table(members: Sequence[Arm], shown: dict[str, str]) -> str:
    baseline = baseline_of(members)
    heads = ["<th>arm</th>"]
    for name, text in shown.items():
        unit = column("runs", name).unit
        small = f"<small>{escape(unit)}</small>" if unit != "bytes" else ""
        heads.append(f"<th>{escape(text)}{small}</th>")
        if name == "gen_tok_s":
            heads += [f"<th>ratio<small>to {escape(baseline.series)}</small></th>"] if baseline else []
            heads += _GATE_HEADS
    if "gen_tok_s" not in shown:
        heads += _GATE_HEADS
    rows = "\n".join(f"<tr>{_cells(arm, baseline, shown)}</tr>" for arm in members)
    return (
        f'<div class="scroll"><table><thead><tr>{"".join(heads)}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    )


def _cells(arm: Arm, baseline: Arm | None, shown: dict[str, str]) -> str:
    cells = [f"<td>{escape(arm.series)}</td>"]
    for name in shown:
        cells.append(_metric_cell(arm, column("runs", name)))
        if name == "gen_tok_s":
            cells += [_ratio_cell(arm, baseline)] if baseline else []
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


def _metric_cell(arm: Arm, definition: Column) -> str:
    spread = arm.spread(definition.name)
    if spread is None:
        return f"<td>{UNKNOWN}</td>"
    text = in_unit(spread.median, definition.unit) + _range(spread, definition.unit)
    if arm.has_few_samples(definition.name):
        return f'<td class="few" title="{arm.samples(definition.name)} samples">{text}</td>'
    return f"<td>{text}</td>"


def _range(spread: Spread, unit: str) -> str:
    if spread.n < 2 or unit == "bytes":
        return ""
    return f"<small>{number(spread.low)}–{number(spread.high)}</small>"


def _ratio_cell(arm: Arm, baseline: Arm) -> str:
    if arm is baseline:
        return "<td>baseline</td>"
    against = ratio(arm, baseline, "gen_tok_s")
    if against is None:
        return f"<td>{UNKNOWN}</td>"
    small = f"<small>{times(against.low)}–{times(against.high)}</small>" if against.n > 1 else ""
    return f"<td>{times(against.median)}{small}</td>"


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
