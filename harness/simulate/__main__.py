"""``python -m harness.simulate RESULTS… [fitted=2]``: how far simulations are from measured runs, for every choice of
``fitted`` workloads to fit step times to and the others to predict.

``python -m harness.simulate RESULTS… predict=FOLDER[,FOLDER…]``: fitted to all of RESULTS, the runs of other folders
predicted, which need no step logs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from harness.report.read import ResultsError
from harness.simulate.setup import SetupError
from harness.simulate.source import read_all
from harness.simulate.step_time import ModelError
from harness.simulate.validation import METRICS, predict, splits


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 with one line on standard error if nothing can be compared."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    folders = [Path(a) for a in arguments if "=" not in a]
    settings = dict(a.split("=", 1) for a in arguments if "=" in a)
    others = [Path(name) for name in settings.pop("predict", "").split(",") if name]
    fitted = "2" if others else settings.pop("fitted", "2")
    if not folders or settings or not fitted.isdigit() or {"-h", "--help"} & set(arguments):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        results = read_all(folders)
        if others:
            found = predict(results, read_all(others))
            print("\n".join([*lines_of_arms(found.rows), *(f"\n! {note}" for note in found.notes)]))
            return 0
        table = pd.concat(
            rows.assign(fitted_to=", ".join(chosen), predicted=name)
            for chosen, left in splits(results, int(fitted))
            for name, rows in left.items()
        )
    except (ModelError, SetupError, ResultsError, ValueError, OSError) as error:
        print(f"simulate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print("\n".join(lines(table)))
    return 0


def lines(table: pd.DataFrame) -> list[str]:
    """A Markdown table of relative errors by split and workload (the median of its repeats), and the medians of the
    sizes of those errors."""
    shown = [metric for metric in METRICS if metric in set(table["metric"])]
    errors = table.pivot_table("error", ["fitted_to", "predicted"], "metric", "median", sort=False)[shown]
    found = ["| fitted to | predicted | " + " | ".join(shown) + " |", "|---|---|" + "---|" * len(shown)]
    for (fitted_to, name), row in errors.iterrows():
        cells = ("–" if pd.isna(error) else f"{error:+.1%}" for error in row)
        found.append(f"| {fitted_to} | {name} | " + " | ".join(cells) + " |")
    cells = (f"{median:.1%}" for median in errors.abs().median())
    found.append("| median of the sizes | | " + " | ".join(cells) + " |")
    return found


def lines_of_arms(table: pd.DataFrame) -> list[str]:
    """A Markdown table by experiment and arm: medians of its runs, measured → predicted, and the median of their
    relative errors; then the median size of the errors of all runs."""
    shown = [metric for metric in METRICS if metric in set(table["metric"])]
    found = ["| experiment | arm | runs | " + " | ".join(shown) + " |", "|---|---|---|" + "---|" * len(shown)]
    named = table.assign(experiment=table["experiment"].fillna(table["workload"]))
    for (experiment, arm), rows in named.groupby(["experiment", "arm"], sort=False):
        medians = rows.groupby("metric")[["measured", "predicted", "error"]].median()
        cells = [
            f"{_number(row['measured'])} → {_number(row['predicted'])} ({row['error']:+.1%})"
            for _, row in medians.reindex(shown).iterrows()
        ]
        found.append(f"| {experiment} | {arm} | {rows['run_id'].nunique()} | " + " | ".join(cells) + " |")
    sizes = table["error"].abs().groupby(table["metric"]).median()
    cells = [f"{sizes[metric]:.1%}" for metric in shown]
    found.append(f"| median of the sizes | | {table['run_id'].nunique()} | " + " | ".join(cells) + " |")
    return found


def _number(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
