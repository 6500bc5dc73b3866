"""The section "Over time": the requests and the steps of each arm, on axes that can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

import pandas as pd

from harness.report import plots
from harness.report.arms import Arm, by_facet
from harness.report.figures import figures, slug
from harness.report.page import section
from harness.report.plots import Plot
from harness.report.read import Results

_SHOWN = 6  # arms, each with the first of its repeats


def over_time_section(results: Results, arms: Sequence[Arm]) -> str:
    """The first arms over time; a line that says so where nothing was recorded."""
    measured = [a for a in arms if len(a.measured)]
    shown = measured[:_SHOWN]
    folder = results.directory / "plots"
    requests: list[tuple[str, Plot]] = []
    steps: list[tuple[str, Plot]] = []
    without: list[str] = []
    own_axes = False
    for members in by_facet(shown).values():
        tables = [(_rows(results, "steps", a), _rows(results, "requests", a)) for a in members]
        frame = plots.time_frame(tables)
        own_axes |= len(members) > 1 and frame.until_s is None
        for arm, (step_rows, request_rows) in zip(members, tables, strict=True):
            if gantt := plots.request_gantt(request_rows, frame):
                requests.append((arm.label, plots.save(gantt[0], folder, slug("requests", arm.label), gantt[1])))
            if timeline := plots.step_timeline(step_rows, frame):
                steps.append((arm.label, plots.save(timeline[0], folder, slug("timeline", arm.label), timeline[1])))
            else:
                without.append(arm.label)
    if not requests and not steps:
        return section("Over time", "<p>Neither a step log nor request times were recorded.</p>")
    notes = [f"The first {len(shown)} of {len(measured)} arms."] if len(measured) > len(shown) else []
    if any(len(a.measured) > 1 for a in shown):
        notes.append("The first repeat of each arm.")
    if own_axes:
        notes.append("Time axes differ: the longest run took more than five times as long as the shortest.")
    elif len(shown) > 1:
        notes.append("Arms that are compared have the same time axis.")
    if without:
        notes.append(f"Without a step log: {', '.join(without)}.")
    lead = f'<p class="soft">{escape(" ".join(notes))}</p>' if notes else ""
    return section("Over time", lead, _group("Requests", requests), _group("Steps", steps))


def _group(what: str, drawn: Sequence[tuple[str, Plot]]) -> str:
    """One grid; what the first picture says is not said again."""
    said: set[str] = set()
    shown = []
    for label, plot in drawn:
        shown.append((f"{what}: {label}", replace(plot, caption="" if plot.caption in said else plot.caption)))
        said.add(plot.caption)
    return figures(shown) if shown else ""


def _rows(results: Results, table: str, arm: Arm) -> pd.DataFrame:
    return results.of_run(table, str(arm.measured["run_id"].iloc[0]))
