"""``python -m harness.simulate RESULTS… [fitted=2]``: how far simulations are from measured runs, for every choice of
``fitted`` runs to fit step times to and the others to predict."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from harness.report.read import Results, ResultsError
from harness.simulate.setup import SetupError
from harness.simulate.source import read_all
from harness.simulate.step_time import ModelError
from harness.simulate.validation import METRICS, splits


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 with one line on standard error if nothing can be compared."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    folders = [Path(a) for a in arguments if "=" not in a]
    settings = dict(a.split("=", 1) for a in arguments if "=" in a)
    fitted = settings.pop("fitted", "2")
    if not folders or settings or not fitted.isdigit() or {"-h", "--help"} & set(arguments):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        results = read_all(folders)
        names = _names(results, folders)
        table = pd.concat(
            rows.assign(fitted_to=", ".join(names[r] for r in chosen)) for chosen, rows in splits(results, int(fitted))
        )
    except (ModelError, SetupError, ResultsError, ValueError, OSError) as error:
        print(f"simulate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    table["predicted_run"] = table["run_id"].map(names)
    print("\n".join(lines(table)))
    return 0


def lines(table: pd.DataFrame) -> list[str]:
    """A Markdown table of relative errors by split and run, and the medians of their sizes."""
    found = ["| fitted to | predicted | " + " | ".join(METRICS) + " |", "|---|---|" + "---|" * len(METRICS)]
    for (fitted_to, run), rows in table.groupby(["fitted_to", "predicted_run"], sort=False):
        errors = rows.set_index("metric")["error"]
        cells = (f"{errors[m]:+.1%}" if m in errors else "–" for m in METRICS)
        found.append(f"| {fitted_to} | {run} | " + " | ".join(cells) + " |")
    medians = table.groupby("metric")["error"].apply(lambda e: e.abs().median())
    cells = (f"{medians[m]:.1%}" if m in medians else "–" for m in METRICS)
    found.append("| median of the sizes | | " + " | ".join(cells) + " |")
    return found


def _names(results: Results, folders: Sequence[Path]) -> dict[str, str]:
    """By run, the name of its folder where each folder holds one run, else its id."""
    runs = [str(r) for r in results.runs["run_id"]]
    return (
        dict(zip(runs, (f.name for f in folders), strict=True)) if len(runs) == len(folders) else {r: r for r in runs}
    )


if __name__ == "__main__":
    raise SystemExit(main())
