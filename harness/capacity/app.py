"""``cb-plan RESULTS… slo.ttft_p95_ms=500 target_rate=200 [workload=…]``: a capacity plan from measured runs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.capacity import words
from harness.capacity.plan import Plan, PlanSettings, fleet_table, make_plan
from harness.capacity.question import Question, QuestionError, configuration, parse, slo_of, workload_asked
from harness.capacity.write import SETTINGS, write_plan
from harness.report.read import Results, ResultsError
from harness.simulate import ModelError, SetupError, fit_steps, read_setup
from harness.simulate.source import measured_runs, read_all
from harness.slo import Slo

USAGE = """cb-plan RESULTS… [KEY=VALUE…]
  RESULTS                    folders of measured runs or sweeps (engine=ours) on the GPU to plan for
  slo=chat                   limits, or single ones: slo.ttft_p95_ms=500 slo.itl_p99_ms=50
  workload=azure_2023 …      what will arrive, by cb-bench's configuration; left out: the workload of the first run
  target_rate=200            requests/s to serve: how many GPUs
  headroom=0.2               share of each GPU left free
  price_per_gpu_hour=3.5     for the cost of a million generated tokens
  requests=1000 seeds=3      of each simulated run; searches that the interval rests on
  recommend=false            do not try other settings
  fleet=4                    instead of a plan: replay the workload as it is recorded on 4 GPUs behind each router
  out=DIR                    where to write; left out: plan/ inside the first folder"""


@dataclasses.dataclass(frozen=True)
class _Arguments(PlanSettings):
    fleet: int | None = None
    out: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 if no rate keeps the SLO; 2 with one line on standard error if nothing can be planned."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print(USAGE)
        return 0
    try:
        return _run(arguments)
    except (QuestionError, ResultsError, ModelError, SetupError, ValueError, OSError) as error:
        print(f"cb-plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    question = parse(arguments, _Arguments, hidden=("slo",))
    own = dict(question.own)
    fleet, out = own.pop("fleet", None), own.pop("out", None)
    config = configuration(question)
    slo = slo_of(config)
    results = read_all(question.folders)
    console = Console() if sys.stdout.isatty() else Console(width=240, no_color=True)
    if fleet is not None:
        _replay(results, question, config, fleet, slo, console)
        return 0
    settings = PlanSettings(slo or Slo(), **own)
    workload, origin = workload_asked(results, question, config)
    console.print(escape(f"planning for {origin}: {len(workload)} requests"), highlight=False)
    plan = make_plan(results, workload, settings)
    show(plan, console)
    directory = Path(out) if out is not None else question.folders[0] / "plan"
    path = write_plan(plan, directory, ["cb-plan", *arguments])
    if plan.recommended:
        console.print(f"settings: {directory / SETTINGS}", highlight=False, soft_wrap=True)
    console.print(f"plan:     {path}", highlight=False, soft_wrap=True)
    return 0 if plan.capacity is not None else 1


def _replay(
    results: Results, question: Question, config: dict[str, object], fleet: int, slo: Slo | None, console: Console
) -> None:
    workload, origin = workload_asked(results, question, config)
    runs = measured_runs(results)
    model, setup = fit_steps(results, runs), read_setup(results, runs[0])
    console.print(escape(f"replaying {origin}: {len(workload)} requests on {fleet} GPUs"), highlight=False)
    console.print(_table("by router", *words.fleet_rows(fleet_table(workload, setup, model, fleet, slo))))


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    for line in words.headline(plan):
        console.print(escape(line), style="bold", highlight=False)
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


if __name__ == "__main__":
    raise SystemExit(main())
