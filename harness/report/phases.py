"""Decode steps by phase: what a step takes with so many requests in it, arm by arm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from harness.report.arms import Arm, Spread, baseline_of, by_facet
from harness.report.page import section, text_table
from harness.report.quantity import UNKNOWN, number, times
from harness.report.read import Results


@dataclass(frozen=True)
class PhaseTable:
    """The phases of one facet: a row each, the time of every arm and its ratio to the baseline."""

    facet: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def phase_tables(results: Results, arms: Sequence[Arm]) -> list[PhaseTable]:
    """One table a facet that has phases."""
    return [t for facet, members in by_facet(arms).items() if (t := _of_facet(results, facet, members)) is not None]


def _of_facet(results: Results, facet: str, members: Sequence[Arm]) -> PhaseTable | None:
    table = results.tables["phases"]
    baseline = baseline_of(list(members))
    times_of: dict[str, dict[int, Spread | None]] = {}
    requests: dict[int, int] = {}
    context: dict[int, list[float]] = {}
    for arm in members:
        own = table[table["run_id"].isin(arm.measured["run_id"])]
        for phase, rows in own.groupby("phase"):
            requests[int(phase)] = int(rows["n_requests"].iloc[0])
            context.setdefault(int(phase), []).extend(float(v) for v in rows["context_tokens"].dropna())
            spread = Spread.of(float(v) for v in rows["itl_p50_ms"].dropna())
            times_of.setdefault(arm.series, {})[int(phase)] = spread
    if not requests:
        return None
    others = [a.series for a in members if a.series in times_of and (baseline is None or a.series != baseline.series)]
    base = times_of.get(baseline.series) if baseline is not None else None
    shown = [s for s in (baseline.series if base and baseline else None, *others) if s is not None]
    ratios = [s for s in others if base]
    rows_out = []
    for phase in sorted(requests):
        seen = context[phase]
        cells = [str(requests[phase]), number(statistics.median(seen)) if seen else UNKNOWN]
        cells += [_time(times_of[s].get(phase)) for s in shown]
        cells += [_ratio(times_of[s].get(phase), base.get(phase)) for s in ratios if base]
        rows_out.append(tuple(cells))
    header = ("requests", "context", *(f"{s} [ms]" for s in shown))
    header += tuple(f"{s} / {baseline.series}" for s in ratios if baseline)
    return PhaseTable(facet, header, tuple(rows_out))


def phases_section(results: Results, arms: Sequence[Arm]) -> str:
    """The tables on the page; "" without phases."""
    tables = phase_tables(results, arms)
    if not tables:
        return ""
    parts = [
        "<p>Bursts of equal requests, each begun when the one before had ended. Median gap between two tokens while "
        "all requests of the burst were generating: the time of a decode step with so many rows. Context: tokens "
        "read for each of them. Median over runs, range in brackets.</p>"
    ]
    for table in tables:
        parts += [f"<h3>{escape(table.facet)}</h3>" if table.facet else "", text_table(table.header, table.rows)]
    return section("Decode steps by requests", *parts)


def _time(spread: Spread | None) -> str:
    if spread is None:
        return UNKNOWN
    text = f"{spread.median:.3g}" if spread.median < 10 else number(spread.median)
    return text if spread.n == 1 else f"{text} ({spread.low:.3g}–{spread.high:.3g})"


def _ratio(own: Spread | None, base: Spread | None) -> str:
    return UNKNOWN if own is None or base is None or base.median == 0 else times(own.median / base.median)
