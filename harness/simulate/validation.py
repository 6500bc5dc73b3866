"""Predicted against measured: how far a simulation is from runs that its step-time model was not fitted to."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from harness.metrics import run_values
from harness.report.read import Results
from harness.simulate.fit import STALL, fit_steps
from harness.simulate.setup import EngineSetup, SetupError, attention_of, read_setup
from harness.simulate.simulation import simulate
from harness.simulate.source import (
    conditions,
    measured_runs,
    nothing_to_fit,
    output_lengths,
    own_runs,
    workload_of_run,
)
from harness.simulate.step_time import Kind, ModelError, StepTimeModel, Work
from workloads.workload import Workload

METRICS = ("gen_tok_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p99_ms")
"""Columns of ``runs`` that are compared."""

TARGET = 0.10
"""Median relative error that a simulation should keep."""

SEEDS = (0, 1, 2)
"""Of the spread of step times; what is predicted is the median over them."""

_NOTED = 0.02  # share of a run that a stalled step takes before it is worth a remark


@dataclass(frozen=True)
class Validation:
    """Predicted and measured metrics.

    Attributes:
        rows: one a run and metric: condition (:func:`harness.simulate.source.conditions`), run_id, workload, arm,
            metric, measured, predicted, error (relative, signed), held_out (whether the model had not seen the run).
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
        lines = [f"Median error against {runs} measured runs, each by a model not fitted to its workload: {shown}."]
        if off := [name for name, error in errors.items() if error > TARGET]:
            lines.append(
                f"Above the target of {TARGET:.0%}: {', '.join(off)}. Measure runs nearer to the planned load."
            )
        return lines


def validate(results: Results, say: Callable[[str], None] | None = None) -> Validation:
    """Predict each measured run from a model fitted to the others.

    A fold holds the runs of one condition (:func:`harness.simulate.source.conditions`).

    Args:
        say: told the id of each run before it is predicted.

    Raises:
        ModelError: nothing in ``results`` can be fitted.
    """
    folds = conditions(results)
    if not folds:
        raise ModelError(nothing_to_fit(results))
    frames, notes = [], []
    for name, held in folds.items():
        others = [r for runs in folds.values() if runs is not held for r in runs]
        try:
            model = fit_steps(results, others or held)
        except ModelError as error:
            notes += [f"{run_id} is not predicted: {error}" for run_id in held]
            continue
        for run_id in held:
            if say is not None:
                say(run_id)
            try:
                frames.append(compare(results, run_id, model, bool(others)).assign(condition=name))
            except (ModelError, SetupError) as error:
                notes.append(f"{run_id} is not predicted: {error}")
            else:
                notes += stalls(results, run_id, model)
        notes += untaught(results, held, model)
    columns = ["condition", "run_id", "workload", "arm", "metric", "measured", "predicted", "error", "held_out"]
    rows = pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)
    return Validation(rows.astype({"held_out": bool}), tuple(dict.fromkeys(notes)))


def splits(results: Results, fitted: int) -> Iterator[tuple[tuple[str, ...], dict[str, pd.DataFrame]]]:
    """Every choice of ``fitted`` conditions to fit to, and by name of the others the rows of :class:`Validation`.

    Raises:
        ModelError: a choice cannot be fitted; ValueError: nothing would be left to predict.
    """
    folds = conditions(results)
    if not folds:
        raise ModelError(nothing_to_fit(results))
    if not 0 < fitted < len(folds):
        raise ValueError(
            f"a split of {len(folds)} conditions (workloads at an arm, whatever their seeds) fits 1 to "
            f"{len(folds) - 1} of them, asked for {fitted}"
        )
    for chosen in combinations(folds, fitted):
        model = fit_steps(results, [run_id for name in chosen for run_id in folds[name]])
        yield (
            chosen,
            {
                name: pd.concat([compare(results, run_id, model, True) for run_id in runs], ignore_index=True)
                for name, runs in folds.items()
                if name not in chosen
            },
        )


def predict(fitted: Results, others: Results) -> Validation:
    """Every run of this engine in ``others``, and its experiment, from a model fitted to the step logs of ``fitted``.
    The predicted runs need no step log.

    Raises:
        ModelError: ``fitted`` has nothing to fit to, or ``others`` a step of a kind that it never measured.
        ValueError: ``others`` has no run of this engine, one that was fitted to, or another model or device.
    """
    chosen, wanted = measured_runs(fitted), own_runs(others)
    if not wanted:
        raise ValueError(f"{others.directory} holds no measured run of engine ours to predict")
    if both := sorted(set(chosen) & set(wanted)):
        raise ValueError(f"{', '.join(both)} would be predicted by a model fitted to it: name other results")
    model = fit_steps(fitted, chosen)
    runs = others.runs[others.runs["run_id"].isin(wanted)]
    for name in ("model", "device"):
        if unknown := sorted({str(v) for v in runs[name].dropna()} - set(model.source[name])):
            raise ValueError(
                f"runs of {name} {', '.join(unknown)} cannot be predicted by step logs of "
                f"{', '.join(model.source[name])}: fit to runs of the same {name}"
            )
    known: dict[tuple[object, ...], dict[str, float | None]] = {}
    frames, notes = [], [*model.notes, *untaught(others, wanted, model)]
    for run_id, (_, row) in zip(wanted, runs.iterrows(), strict=True):
        # Repeats serve the same requests with the same settings: one prediction is that of all.
        lengths = output_lengths(others, run_id)
        setup = read_setup(others, run_id)
        same = (row["workload_hash"], repr(setup), tuple(sorted(lengths.items())))
        if same not in known:
            workload, _ = workload_of_run(others, run_id)
            known[same] = predicted_values(workload, setup, lengths, model)
            if unseen := model.unseen_prompts([len(request.prompt_ids) for request in workload.requests]):
                of = "" if pd.isna(row["experiment"]) else f" of {row['experiment']}"
                notes.append(f"{row['workload']}{of}: {unseen}")
        frames.append(pd.DataFrame(_rows(row, run_id, known[same], True, METRICS)).assign(experiment=row["experiment"]))
    return Validation(pd.concat(frames, ignore_index=True), tuple(dict.fromkeys(notes)))


def untaught(results: Results, run_ids: Sequence[str], model: StepTimeModel) -> list[str]:
    """What these runs do that no step the model was fitted to did, in words."""
    attention, launched = Counter[str](), Counter[Kind]()
    own = model.source.get("attention")
    for run_id in run_ids:
        name = attention_of(results, run_id)
        if own and name and name != own:
            attention[name] += 1
        # A step that is not captured is launched; what stands for a kind that was never measured is the other start.
        for prefill, captured in zip((True, False), read_setup(results, run_id).graphs, strict=True):
            if not captured and Kind(prefill, False) not in model.device:
                launched[Kind(prefill, False)] += 1
    found = [f"{count} runs with {name} are predicted by steps of {own}" for name, count in attention.items()]
    return found + [
        f"{count} runs have steps of kind '{kind}', of which none was measured: replayed ones stand for them"
        for kind, count in launched.items()
    ]


def compare(results: Results, run_id: str, model: StepTimeModel, held_out: bool) -> pd.DataFrame:
    """Rows of :class:`Validation` of one run."""
    row = results.runs[results.runs["run_id"] == run_id].iloc[0]
    workload, _ = workload_of_run(results, run_id)
    values = predicted_values(workload, read_setup(results, run_id), output_lengths(results, run_id), model)
    return pd.DataFrame(_rows(row, run_id, values, held_out, METRICS))


def predicted_values(
    workload: Workload, setup: EngineSetup, lengths: Mapping[str, int], model: StepTimeModel
) -> dict[str, float | None]:
    """By metric, what a simulation says of one run: the median over :data:`SEEDS`; None where it has no value.

    Args:
        lengths: by request id, tokens it generates.
    """
    runs = [
        run_values(simulate(workload, setup, model, np.random.default_rng(seed), output_tokens=lengths))
        for seed in SEEDS
    ]
    known = {metric: [float(v) for r in runs if (v := r[metric]) is not None] for metric in METRICS}
    return {metric: statistics.median(values) if values else None for metric, values in known.items()}


def stalls(results: Results, run_id: str, model: StepTimeModel) -> list[str]:
    """Steps of a measured run that took many times as long as their work explains, in words: the measured times of the
    run contain them, the predicted ones do not."""
    steps = results.of_run("steps", run_id).dropna(subset=["t_s", "step_ms", "schedule_ms", "kind"])
    total_ms = float((steps["t_s"] * 1000 + steps["step_ms"]).max() - steps["t_s"].min() * 1000) if len(steps) else 0.0
    found = []
    for step in steps[steps["schedule_ms"] > _NOTED * total_ms].to_dict("records"):
        kind = model.kind_for(Kind(step["prefill_rows"] > 0, step["graph"] is True))
        work = Work(
            int(step["decode_rows"] + step["prefill_tokens"]),
            int(step["decode_rows"] + step["prefill_rows"]),
            int(step["kv_tokens"]),
            0 if pd.isna(step["prefill_pairs"]) else int(step["prefill_pairs"]),
            prefills=int(step["prefill_rows"]),
        )
        usual_ms = model.host[kind].fitted_ms(work) + model.device[kind].fitted_ms(work)
        if step["schedule_ms"] > STALL * model.host[kind].fitted_ms(work) and step["schedule_ms"] > 2 * usual_ms:
            found.append(
                f"{run_id}: launching its step {step['step']} took {step['schedule_ms']:.0f} ms, which no work "
                f"explains (usual: {usual_ms:.0f} ms with all its work); the measured times contain that, the "
                "predicted ones do not"
            )
    return found


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
