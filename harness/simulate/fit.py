"""From measured step logs to a step-time model.

A step's log says when its scheduling began, how long it took until it was launched, and when its tokens were on the
host. With async batching steps overlap: a step owns the device from the end of the one before it, or from its launch if
that was later. So the same three parts are read from every log, on a GPU or a CPU, overlapped or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.metrics.observations import BoolArray, FloatArray
from harness.report.read import Results
from harness.simulate.nnls import nonnegative_least_squares
from harness.simulate.setup import setting
from harness.simulate.step_time import KINDS, Cost, Kind, ModelError, Residual, StepTimeModel

MIN_STEPS = 5
"""A kind with fewer measured steps has no cost of its own."""
_SEGMENTS = 6
_PER_SEGMENT = 10  # distinct token counts a segment of the piecewise part needs at least
_ROUNDS = 8
_RANKS = 200  # of the spread that is kept
_KEPT = 0.998  # share of the steps whose spread is kept: the slowest 2 of 1000 are stated, not repeated


@dataclass(frozen=True)
class Observed:
    """Steps of one run, in the order of their ends, as [steps] arrays in ms and units of work."""

    prefill: BoolArray
    graph: BoolArray
    tokens: FloatArray
    rows: FloatArray
    keys: FloatArray
    pairs: FloatArray  # NaN where the log does not say
    host: FloatArray
    device: FloatArray
    between: FloatArray  # until the next turn; NaN where the engine may have waited for requests

    @classmethod
    def read(cls, steps: pd.DataFrame, overlapped: bool) -> Observed:
        """The steps of one run's table.

        Args:
            overlapped: whether the engine plans a step while the one before it runs (async batching).
        """
        known = steps.dropna(subset=["t_s", "step_ms", "schedule_ms", "kind", "kv_tokens"])
        start = _floats(known["t_s"]) * 1000
        order = np.argsort(start, kind="stable")
        known, start = known.iloc[order], start[order]
        host, end = _floats(known["schedule_ms"]), start + _floats(known["step_ms"])
        before = np.concatenate(([-np.inf], end[:-1]))
        decode, prefill_tokens = _floats(known["decode_rows"]), _floats(known["prefill_tokens"])
        prefill_rows = _floats(known["prefill_rows"])
        between = np.full(len(known), np.nan)
        ahead = 2 if overlapped else 1
        if len(known) > ahead:
            gap = start[ahead:] - end[:-ahead]
            # Whoever decodes was there all the time, so the loop never waited.
            between[:-ahead] = np.where((decode[ahead:] > 0) & (gap >= 0), gap, np.nan)
        return cls(
            prefill=prefill_rows > 0,
            graph=np.nan_to_num(_floats(known["graph"])) > 0,
            tokens=decode + prefill_tokens + np.nan_to_num(_floats(known["padded_rows"])),
            rows=decode + prefill_rows,
            keys=_floats(known["kv_tokens"]),
            pairs=np.where(prefill_rows > 0, _floats(known["prefill_pairs"]), 0.0),
            host=host,
            device=np.maximum(end - np.maximum(before, start + host), 1e-6),
            between=between,
        )

    @classmethod
    def joined(cls, parts: Sequence[Observed]) -> Observed:
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__))


def fit_steps(results: Results, run_ids: Iterable[str]) -> StepTimeModel:
    """Fit to the step logs of some runs of this project's engine.

    Raises:
        ModelError: they have no step log, or none that tells a decode step.
    """
    chosen = list(run_ids)
    parts, notes = [], []
    for run_id in chosen:
        steps = results.of_run("steps", run_id)
        if steps.empty:
            notes.append(f"{run_id} has no step log and was left out")
            continue
        parts.append(Observed.read(steps, bool(setting(results, run_id, "use_async_batching", False))))
    if not parts:
        raise ModelError(f"no step log in {results.directory}: measure with engine=ours, whose runs keep one")
    seen = Observed.joined(parts)
    if np.isnan(seen.pairs).any():
        notes.append("the step logs do not tell prompt attention apart (older version): long prompts cost by the token")
        seen = Observed(**{**vars(seen), "pairs": np.zeros_like(seen.pairs)})
    host: dict[Kind, Cost] = {}
    device: dict[Kind, Cost] = {}
    residuals: list[Residual] = []
    for kind in KINDS:
        here = (seen.prefill == kind.prefill) & (seen.graph == kind.graph)
        if here.sum() < MIN_STEPS:
            if here.any():
                notes.append(f"only {int(here.sum())} steps of kind '{kind}': they count as the other kind of start")
            continue
        for name, costs in (("host", host), ("device", device)):
            costs[kind], residual = fit_cost(name, kind, seen, getattr(seen, name), here)
            residuals.append(residual)
    if not device:
        raise ModelError(f"too few steps in {results.directory} ({len(seen.host)}): measure a run with more requests")
    known = ~np.isnan(seen.between)
    if known.sum() >= MIN_STEPS:
        between, residual = fit_cost("between", Kind(False, False), seen, seen.between, known)
        residuals.append(residual)
    else:
        between = Cost(0.0)
        notes.append("no two steps in a row: the time between steps is taken as none")
    runs = results.runs[results.runs["run_id"].isin(chosen)]
    source = {
        "runs": chosen,
        "steps": len(seen.host),
        **{name: sorted({str(v) for v in runs[name].dropna()}) for name in ("model", "device")},
    }
    delivery = delivery_ms(results, chosen)
    return StepTimeModel(host, device, between, delivery, tuple(residuals), source, tuple(notes))


def fit_cost(part: str, kind: Kind, seen: Observed, ms: FloatArray, here: BoolArray) -> tuple[Cost, Residual]:
    """A cost and its residual. Relative errors count; steps far off (a pause, a first launch) count less (Huber)."""
    y = ms[here]
    tokens, rows, keys, pairs = (getattr(seen, name)[here] for name in ("tokens", "rows", "keys", "pairs"))
    knots = _knots(tokens)
    columns = [np.ones_like(y), *_segments(tokens, knots), rows, keys, pairs]
    if part == "between":
        columns[1:] = [np.zeros_like(y)] * len(knots) + [rows, np.zeros_like(y), np.zeros_like(y)]
    a = np.stack(columns, axis=1)
    size = np.maximum(np.abs(a).mean(axis=0), 1e-12)
    scale = np.maximum(y, 0.1 * float(np.median(y)) + 1e-9)
    weights = np.ones_like(y)
    for _ in range(_ROUNDS):
        x = nonnegative_least_squares(a / size * (weights / scale)[:, None], y * weights / scale) / size
        error = np.abs(a @ x - y) / scale
        limit = 1.5 * max(float(np.median(error)), 1e-3)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(error, 1e-12)))
    fitted = np.maximum(a @ x, 1e-6)
    ratio = y / fitted
    ranks = np.quantile(ratio, (np.arange(_RANKS) + 0.5) / _RANKS * _KEPT)
    kept = ratio <= np.quantile(ratio, _KEPT)
    # The mean must be right, whatever the robust fit made of it: throughput is a sum of step times.
    total = float(y[kept].sum() / max(float((fitted[kept]).sum()) * float(ranks.mean()), 1e-12))
    n = len(knots)
    row, key, pair = (float(v) * total for v in x[1 + n :])
    cost = Cost(
        float(x[0]) * total,
        tuple(float(k) for k in knots),
        tuple(float(v) * total for v in x[1 : 1 + n]),
        row,
        key,
        pair,
        tuple(float(r) for r in ranks),
    )
    off = np.abs(fitted * total * cost.mean_ratio - y) / np.maximum(y, 1e-9)
    largest = (int(v.max()) for v in (tokens, rows, keys))
    spilled = float(y[~kept].sum() / y.sum()) if y.sum() > 0 else 0.0
    errors = float(np.median(off)), float(np.quantile(off, 0.9))
    return cost, Residual(part, str(kind), int(here.sum()), *errors, spilled, *largest)


def delivery_ms(results: Results, run_ids: Iterable[str]) -> float:
    """Median time from the end of a step to the first tokens it brought, as the client saw them."""
    delays: list[FloatArray] = []
    for run_id in run_ids:
        steps = results.of_run("steps", run_id).dropna(subset=["t_s", "step_ms"])
        first = _floats(results.of_run("requests", run_id)["t_first_s"].dropna())
        ends = np.sort(_floats(steps["t_s"]) + _floats(steps["step_ms"]) / 1000)
        at = np.searchsorted(ends, first, "right") - 1
        delays.append((first[at >= 0] - ends[at[at >= 0]]) * 1000)
    known = np.concatenate(delays) if delays else np.empty(0)
    return float(np.median(known)) if len(known) else 0.0


def _knots(tokens: FloatArray) -> FloatArray:
    """Where the piecewise part bends: at quantiles of the sizes seen, so that each segment rests on several of them."""
    distinct = np.unique(tokens)
    segments = max(1, min(_SEGMENTS, len(distinct) // _PER_SEGMENT))
    inner = np.quantile(distinct, np.arange(1, segments) / segments) if segments > 1 else np.empty(0)
    return np.unique(np.concatenate(([0.0], inner)))


def _segments(tokens: FloatArray, knots: FloatArray) -> list[FloatArray]:
    ends = np.concatenate((knots[1:], [np.inf]))
    return [np.clip(tokens - low, 0.0, high - low) for low, high in zip(knots, ends, strict=True)]


def _floats(values: pd.Series) -> FloatArray:
    return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64)
