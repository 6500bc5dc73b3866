"""What ``cb-plan`` does with its arguments: a capacity plan from measured runs, or the replay of a workload."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.capacity import words
from harness.capacity.plan import Plan, PlanSettings, make_plan
from harness.capacity.progress import Progress, TimeToGo
from harness.capacity.question import QuestionError, configuration, parse, slo_of, workload_asked
from harness.capacity.replay import fleet_table
from harness.capacity.write import SETTINGS, write_plan
from harness.interruption import by, exit_code, interrupting, signal_of
from harness.report.read import Results, ResultsError
from harness.simulate import ModelError, SetupError, fit_steps, read_setup
from harness.simulate.source import measured_runs, read_all
from harness.slo import Slo
from workloads.workload import Workload

INCOMPLETE = "this plan is not complete; settings not tried and the fleet are missing"


@dataclasses.dataclass(frozen=True)
class _Arguments(PlanSettings):
    fleet: int | None = None
    out: str | None = None


def run(arguments: Sequence[str]) -> int:
    """Exit status 0; 1 if no rate keeps the SLO; 2 with one line on standard error if nothing can be planned; 128 and
    the number of the signal that interrupted it."""
    try:
        with interrupting():
            return _run(arguments)
    except (QuestionError, ResultsError, ModelError, SetupError, ValueError, OSError) as error:
        print(f"cb-plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"cb-plan: {by(signal_of(interrupt))} before anything was known", file=sys.stderr)
        return exit_code(interrupt)


def _run(arguments: Sequence[str]) -> int:
    question = parse(arguments, _Arguments, hidden=("slo",))
    own = dict(question.own)
    fleet, out = own.pop("fleet", None), own.pop("out", None)
    config = configuration(question)
    slo = slo_of(config)
    with Progress("cb-plan") as say:
        say("reading the measured runs")
        results = read_all(question.folders)
        say("building the workload")
        workload, origin = workload_asked(results, question, config)
    console = Console() if sys.stdout.isatty() else Console(width=240, no_color=True)
    if fleet is not None:
        _replay(results, workload, origin, fleet, slo, console)
        return 0
    settings = PlanSettings(slo or Slo(), **own)
    console.print(escape(f"planning for {origin}: {len(workload)} requests"), highlight=False)
    directory = Path(out) if out is not None else question.folders[0] / "plan"
    parts: list[Plan] = []
    try:
        with Progress("cb-plan") as say:
            plan = make_plan(results, workload, settings, say, parts.append)
    except KeyboardInterrupt as interrupt:
        if not parts:
            raise
        came = by(signal_of(interrupt))
        plan = dataclasses.replace(parts[-1], notes=(f"{came}: {INCOMPLETE}", *parts[-1].notes))
        path = write_plan(plan, directory, ["cb-plan", *arguments])
        print(f"cb-plan: {came}; what was known by then is written: {path}", file=sys.stderr)
        return exit_code(interrupt)
    show(plan, console)
    path = write_plan(plan, directory, ["cb-plan", *arguments])
    if plan.recommended:
        console.print(f"settings: {directory / SETTINGS}", highlight=False, soft_wrap=True)
    console.print(f"plan:     {path}", highlight=False, soft_wrap=True)
    return 0 if plan.capacity is not None else 1


def _replay(results: Results, workload: Workload, origin: str, fleet: int, slo: Slo | None, console: Console) -> None:
    runs = measured_runs(results)
    model, setup = fit_steps(results, runs), read_setup(results, runs[0])
    console.print(escape(f"replaying {origin}: {len(workload)} requests on {fleet} GPUs"), highlight=False)
    with Progress("cb-plan") as say:
        table = fleet_table(workload, setup, model, fleet, slo, TimeToGo(say).begins)
    console.print(_table("by router", *words.fleet_rows(table)))
    if unseen := model.unseen_prompts([len(r.prompt_ids) for r in workload.requests]):
        console.print(escape(f"! {unseen}"), highlight=False)


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    for line in words.headline(plan):
        console.print(escape(line), style="bold", highlight=False)
    for title, capacity in words.capacities(plan):
        console.print(_table(title, *words.seed_rows(capacity)))
    console.print(_table("predicted and measured", *words.validation_rows(plan.validation.rows)))
    console.print(_table("room in the KV cache", *words.kv_rows(plan)))
    console.print(escape(plan.kv.note), highlight=False)
    if len(plan.fleet):
        console.print(_table("the target rate by router", *words.fleet_rows(plan.fleet)))
    if plan.recommended:
        rows = [[s.name, str(s.value), s.reason] for s in plan.recommended]
        console.print(_table("recommended settings", ("setting", "value", "why"), rows))
    for line in words.remarks(plan):
        console.print(escape(f"! {line}"), highlight=False)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
