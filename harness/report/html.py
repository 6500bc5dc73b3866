"""The HTML report: one file that stands alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from harness.analysis.comparison import Finding
from harness.report import plots
from harness.report.adoption import adoption_section
from harness.report.arms import Arm, by_facet, group_arms, memory_metric
from harness.report.arms_table import arms_section
from harness.report.break_even import warm_up_section
from harness.report.calibration import calibration_section
from harness.report.completeness import missing_notes
from harness.report.evidence import (
    divergences_section,
    failures_section,
    provenance_section,
    reproduce_section,
    runs_section,
    settings_section,
)
from harness.report.figures import figures, slug
from harness.report.headline import headlines
from harness.report.memory import ledger_lines, ledger_section
from harness.report.model_names import model_labels
from harness.report.never_acted import never_acted
from harness.report.over_time import over_time_section
from harness.report.page import beside, notes_box, page, section
from harness.report.phases import phases_section
from harness.report.plots.figure import series_colours
from harness.report.read import Results, facts, read_results
from harness.report.regressions import regression_sentences
from harness.report.requests import requests_section
from harness.report.results_table import heading, results_table
from harness.report.saturation import VARIABLE, knee_sentences, saturation_section
from harness.report.slo import slo_section, slo_sentences
from harness.report.slowest import slowest_section
from harness.report.validity import validity_notes
from harness.report.verdicts import compare_arms

FILE = "report.html"
_STAMP = re.compile(r"\d{8}T\d{6}-")  # run ids begin with the time of their job
_CROWDED = 12  # comparisons of their own from which on only the first ones get distributions


def write_report(directory: Path | str) -> Path:
    """Write ``report.html`` and ``plots/*.png|svg`` into a run folder or a sweep's root; returns the page's path.

    What the tables do not hold is left out and said so on the page.

    Raises:
        ResultsError: the directory holds nothing to report, in one line.
        OSError: it cannot be written.
    """
    results = read_results(Path(directory))
    arms = group_arms(results)
    findings = compare_arms(results, arms)
    title = _title(results, arms)
    text = page(
        title,
        [
            _head(title, results, arms, findings),
            arms_section(results, arms),
            section("Results", results_table(results, arms, findings)),
            phases_section(results, arms),
            requests_section(results, arms),
            saturation_section(arms),
            slo_section(results, arms),
            warm_up_section(arms),
            *_plot_sections(results, arms),
            adoption_section(results, arms, findings),
            slowest_section(results, arms),
            ledger_section(results, arms),
            divergences_section(results, arms),
            failures_section(results, arms),
            settings_section(results, arms),
            calibration_section(results, arms),
            provenance_section(results),
            runs_section(results, arms),
            reproduce_section(results),
        ],
    )
    path = results.directory / FILE
    aside = path.with_name(f".{FILE}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
    return path


def _title(results: Results, arms: Sequence[Arm]) -> str:
    """The experiment; for a sweep from the command line its variable; else what was run: engine, model, workload."""
    if len(results.runs) > 1:
        for column in ("experiment", "variable"):
            if names := list(dict.fromkeys(results.runs[column].dropna())):
                return ", ".join(map(str, names))
    ran = [", ".join(dict.fromkeys(_ran(a) for a in arms))]
    ran.append(", ".join(model_labels(results.runs["model"].dropna()).values()))
    ran.append(", ".join(dict.fromkeys(map(str, results.runs["workload"].dropna()))))
    return " · ".join(part for part in ran if part)


def _ran(arm: Arm) -> str:
    return arm.series if arm.engine in arm.series else f"{arm.engine}, {arm.series}"


def _head(title: str, results: Results, arms: Sequence[Arm], findings: Sequence[Finding]) -> str:
    runs = results.runs
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f'<p class="question">{escape(str(q))}</p>' for q in facts(results, "identity.question") if q]
    described = [
        (name, ", ".join(dict.fromkeys(str(v) for v in runs[name].dropna())))
        for name in ("model", "workload", "device", *(("experiment",) if len(runs) == 1 else ()), "variable")
    ]
    facts_line = [f"{name} {escape(value)}" for name, value in described if value]
    if days := sorted({str(r)[:8] for r in runs["run_id"] if _STAMP.match(str(r))}):
        dates = [f"{day[:4]}-{day[4:6]}-{day[6:]}" for day in (days[0], days[-1])]
        facts_line.insert(0, "measured " + " to ".join(dict.fromkeys(dates)) + " (UTC)")
    n = len(runs)
    facts_line.append(f"{n} run{'s' if n != 1 else ''} in {len(arms)} arm{'s' if len(arms) != 1 else ''}")
    parts.append(f'<p class="soft">{" · ".join(facts_line)}</p>')
    said = (
        *knee_sentences(arms),
        *headlines(arms, findings, never_acted(results, arms)),
        *regression_sentences(arms, findings),
        *slo_sentences(arms),
    )
    parts += [f'<p class="headline">{escape(sentence)}</p>' for sentence in said]
    notes = [*missing_notes(results, arms), *validity_notes(results, arms), *results.notes]
    return "\n".join([*parts, notes_box(notes)])


def _plot_sections(results: Results, arms: Sequence[Arm]) -> Iterator[str]:
    """Sections of pictures; neighbours of one picture each stand beside each other."""
    folder = results.directory / "plots"
    single: list[str] = []
    for title, drawn, left_out in _pictures(results, arms):
        saved = [(head, plots.save(drawing[0], folder, name, drawing[1])) for name, head, drawing in drawn if drawing]
        if len(saved) == 1:
            single.append(section(title, figures(saved)))
            continue
        if saved:
            yield beside(single)
            yield section(title, figures(saved))
            single = []
        elif left_out:
            yield beside(single)
            yield section(title, f"<p>{left_out}</p>")
            single = []
    yield beside(single)
    yield over_time_section(results, arms)


_Drawn = tuple[str, str, tuple[Figure, str] | None]
"""File name, heading and drawing."""


def _pictures(results: Results, arms: Sequence[Arm]) -> Iterator[tuple[str, Sequence[_Drawn], str]]:
    """Of each section the title, what is drawn, and what is said if that is nothing."""
    colours = series_colours([a.series for a in arms])
    facets = by_facet(arms)
    metrics = ("gen_tok_s", "ttft_p95_ms", "itl_p99_ms", memory_metric(results.runs))
    against = [(f"{m}-vs-variable", heading(m), plots.metric_vs_variable(arms, m)) for m in metrics]
    yield "Against the variable", against, ""
    yield "Against the offered rate", _loads(facets), ""
    bars = [(slug("throughput", f), f, plots.throughput_bars(members, colours)) for f, members in facets.items()]
    yield "Throughput", bars, "No run ended well, so there is no throughput to draw."
    trades = [(slug("pareto", f), f, plots.pareto(members)) for f, members in facets.items()]
    yield "Throughput against latency", trades[:_CROWDED], ""
    latencies: list[_Drawn] = []
    for facet, members in list(facets.items())[:_CROWDED]:
        heads = (f"{facet} · TTFT" if facet else "TTFT", f"{facet} · ITL" if facet else "ITL")
        latencies.append((slug("ttft-cdf", facet), heads[0], plots.ttft_cdf(results, members, colours)))
        latencies.append((slug("itl-cdf", facet), heads[1], plots.itl_cdf(results, members, colours)))
    yield (
        "Latency distributions",
        latencies,
        "No latencies: no answered request, or no readable table of them.",
    )
    yield "Padding", [("padding", "", plots.padding_bars(arms))], ""
    yield "Memory by part", [("memory-ledger", "", plots.ledger_bars(*ledger_lines(results, arms)))], ""


def _loads(facets: Mapping[str, Sequence[Arm]]) -> list[_Drawn]:
    drawn: list[_Drawn] = []
    for facet, members in facets.items():
        for engine in dict.fromkeys(a.engine for a in members if a.variable == VARIABLE):
            head = " · ".join(part for part in (facet, engine) if part)
            own = [a for a in members if a.engine == engine and not a.is_replica]
            drawn.append((slug("rate", head), head, plots.latency_vs_rate(own)))
    return drawn
