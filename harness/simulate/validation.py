"""Predicted against measured: how far a simulation is from runs that its step-time model was not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.metrics import run_values
from harness.report.read import Results
from harness.simulate.fit import fit_steps
from harness.simulate.setup import SetupError, read_setup
from harness.simulate.simulation import simulate
from harness.simulate.source import measured_runs, output_lengths, workload_of_run
from harness.simulate.step_time import ModelError, StepTimeModel

METRICS = ("gen_tok_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p99_ms")
"""Columns of ``runs`` that are compared."""

TARGET = 0.10
"""Median relative error that a simulation should keep."""


@dataclass(frozen=True)
class Validation:
    """Predicted and measured metrics.

    Attributes:
        rows: one a run and metric: run_id, workload, arm, metric, measured, predicted, error (relative, signed),
            held_out (whether the model had not seen the run).
        notes: what could not be compared, in words.
    """

    rows: pd.DataFrame
    notes: tuple[str, ...]

    @property
    def held_out(self) -> pd.DataFrame:
        return self.rows[self.rows["held_out"]]

    def summary(self) -> dict[str, float]:
        """Median absolute error by metric over held-out runs; empty if there are none."""
        known = self.held_out
        return {m: float(v.abs().median()) for m, v in known.groupby("metric", sort=False)["error"]}

    def sentences(self) -> list[str]:
        """What to believe, for a console or a page."""
        errors = self.summary()
        if not errors:
            return ["No run was held out (all measured runs have one workload): the simulation is not validated."]
        shown = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
        runs = self.held_out["run_id"].nunique()
        lines = [f"Median error against {runs} measured runs that the model was not fitted to: {shown}."]
        if off := [name for name, error in errors.items() if error > TARGET]:
            lines.append(
                f"Above the target of {TARGET:.0%}: {', '.join(off)}. Measure runs nearer to the planned load."
            )
        return lines


def validate(results: Results, seed: int = 0) -> Validation:
    """Predict each measured run from a model fitted to the others.

    A fold holds the runs of one workload at one arm, repeats together: a repeat is no independent run.

    Args:
        seed: of the spread of step times.

    Raises:
        ModelError: nothing in ``results`` can be fitted.
    """
    runs = measured_runs(results)
    if not runs:
        raise ModelError(f"{results.directory} holds no measured run of engine ours with a step log")
    keys = results.runs.set_index("run_id")[["workload_hash", "variable", "arm"]].astype(str)
    folds: dict[tuple[str, ...], list[str]] = {}
    for run_id in runs:
        folds.setdefault(tuple(keys.loc[run_id]), []).append(run_id)
    frames, notes = [], []
    for held in folds.values():
        others = [r for r in runs if r not in held]
        for run_id in held:
            try:
                model = fit_steps(results, others or held)
                frames.append(compare(results, run_id, model, bool(others), seed))
            except (ModelError, SetupError) as error:
                notes.append(f"{run_id} is not predicted: {error}")
    columns = ["run_id", "workload", "arm", "metric", "measured", "predicted", "error", "held_out"]
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)
    return Validation(rows.astype({"held_out": bool}), tuple(dict.fromkeys(notes)))


def compare(results: Results, run_id: str, model: StepTimeModel, held_out: bool, seed: int) -> pd.DataFrame:
    """Rows of :class:`Validation` of one run."""
    row = results.runs[results.runs["run_id"] == run_id].iloc[0]
    workload, _ = workload_of_run(results, run_id)
    record = simulate(
        workload,
        read_setup(results, run_id),
        model,
        np.random.default_rng(seed),
        output_tokens=output_lengths(results, run_id),
    )
    predicted = run_values(record)
    return pd.DataFrame(_rows(row, run_id, predicted, held_out, METRICS))


def _rows(
    row: pd.Series, run_id: str, predicted: dict[str, float | None], held_out: bool, metrics: Sequence[str]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for metric in metrics:
        measured, value = row[metric], predicted[metric]
        if pd.isna(measured) or value is None or not measured:
            continue
        where = {"run_id": run_id, "workload": str(row["workload"]), "arm": str(row["arm"]), "metric": metric}
        numbers = {"measured": float(measured), "predicted": float(value), "error": float(value / measured - 1)}
        rows.append({**where, **numbers, "held_out": held_out})
    return rows
