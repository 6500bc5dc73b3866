"""All tables of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from harness.deliveries import Deliveries
from harness.metrics.attribution import tails
from harness.metrics.frames import booleans, floats, frame, nullable_integers, objects, rows_frame, strings
from harness.metrics.goodput import good_requests
from harness.metrics.inter_token import Gaps, pool_gaps
from harness.metrics.metric import RunView
from harness.metrics.observations import FloatArray, Observations, observe
from harness.metrics.phases import phase_rows
from harness.metrics.planned_arrivals import planned_arrivals
from harness.metrics.registry import REQUEST_METRICS, RUN_METRICS
from harness.metrics.steady import steady_window
from harness.record import RunRecord
from harness.store import conform

_IDENTITY = (
    "experiment",
    "variable",
    "arm",
    "arm_index",
    "repeat",
    "iteration",
    "process",
    "block",
    "position",
    "replica",
    "engine",
    "model",
    "workload",
    "workload_hash",
    "device",
    "seed",
)
_NUMBERS = ("arm_index", "repeat", "iteration", "block", "position", "replica", "seed")
_TEXT_IDENTITY = tuple(name for name in _IDENTITY if name not in _NUMBERS)

_JUDGED_LATER = ("tokens_match", "gate", "n_compared", "n_diverged")
"""Columns that stay null until a run is compared with another (see :mod:`harness.gate`)."""


def compute_tables(record: RunRecord) -> dict[str, pd.DataFrame]:
    """Every table of :mod:`harness.tables` for one run, checked against its schema.

    ``record.identity`` must hold ``run_id`` and ``engine``; what else of it has no column of ``runs`` goes to
    ``environment`` as ``identity.<key>``. The wall time is ``t_end_ns - t_start_ns``: the result depends on nothing
    but the record.

    Raises:
        ValueError: run_id or engine missing, deliveries out of order, an unknown column in a step or a sample.
    """
    for key in ("run_id", "engine"):
        if not record.identity.get(key):
            raise ValueError(f"the record's identity has no {key!r}: given {sorted(record.identity)}")
    run_id = str(record.identity["run_id"])
    view = _view(record)
    observations, gaps, latencies = view.observations, view.gaps, view.latencies
    requests, itl = _requests(record, run_id, observations, latencies), _itl(run_id, observations, gaps)
    steps = _steps(record, run_id)
    pauses = rows_frame("gc_pauses", run_id, [_timed(record, row) for row in record.gc_pauses])
    return {
        "runs": _runs(record, run_id, view),
        "requests": requests,
        "itl": itl,
        "tokens": _tokens(record, run_id, observations),
        "steps": steps,
        "tails": rows_frame("tails", run_id, tails(requests, itl, steps, pauses)),
        "gc_pauses": pauses,
        "divergences": rows_frame("divergences", run_id, []),
        "config": _config(record, run_id),
        "environment": _environment(record, run_id),
        "counters": _named_values("counters", run_id, "name", "value", record.counters),
        "memory_ledger": _named_values("memory_ledger", run_id, "line", "bytes", record.memory),
        "calibration": rows_frame("calibration", run_id, [] if record.calibration is None else [record.calibration]),
        "telemetry": rows_frame("telemetry", run_id, record.telemetry),
        "phases": rows_frame("phases", run_id, phase_rows(record, observations, gaps)),
    }


def run_values(record: RunRecord) -> dict[str, Any]:
    """What the row of table ``runs`` holds of a run, without its identity and without any other table."""
    view = _view(record)
    return {"status": record.status, **{name: metric.compute(view) for name, metric in RUN_METRICS.items()}}


def _view(record: RunRecord) -> RunView:
    observations = observe(record)
    gaps = pool_gaps(observations)
    latencies = {name: metric.compute(observations, gaps) for name, metric in REQUEST_METRICS.items()}
    window = steady_window(observations, planned_arrivals(record, observations))
    return RunView(record, observations, gaps, latencies, window)


def _runs(record: RunRecord, run_id: str, view: RunView) -> pd.DataFrame:
    identity: dict[str, Any] = {name: record.identity.get(name) for name in (*_IDENTITY, *_JUDGED_LATER)}
    for name in _TEXT_IDENTITY:
        identity[name] = None if identity[name] is None else str(identity[name])
    values = {
        **identity,
        "source": record.source,
        "status": record.status,
        "error": record.error,
        "load_s": record.load_s,
        "warmup_s": record.warmup_s,
        **{name: metric.compute(view) for name, metric in RUN_METRICS.items()},
    }
    return frame("runs", run_id, {name: [value] for name, value in values.items()}, 1)


def _requests(record: RunRecord, run_id: str, o: Observations, latencies: Mapping[str, FloatArray]) -> pd.DataFrame:
    rows = record.requests
    times = {name: getattr(o, name) / 1e9 for name in ("t_sched", "t_submit", "t_admit", "t_first", "t_last", "t_done")}
    times |= {name: _since_start(record, name) / 1e9 for name in ("t_pending", "t_decoding", "t_over")}
    if not o.started:
        times = {name: np.full(len(rows), np.nan) for name in times}
    facts = (
        "prompt_tokens",
        "cached_tokens",
        "recomputed_tokens",
        "max_new_tokens",
        "padding_prompt_tokens",
        "padding_output_tokens",
        "prefix_group",
        "holds_answer_of",
        "planned_prompt_tokens",
        "error",
        "statuses",
        "preemptions",
        "prefill_steps",
        "kv_blocks",
        "phase",
    )
    columns: dict[str, Any] = {
        "request_id": list(o.request_ids),
        "outcome": list(o.outcomes),
        "output_tokens": nullable_integers(o.n_tokens, ~o.counted),
        "output_counted_by": [r.output_counted_by or "ids" for r in rows],
        **{name: [getattr(r, name) for r in rows] for name in facts},
        **{f"{name}_s": floats(values) for name, values in times.items()},
        **{name: floats(values) for name, values in latencies.items()},
        "slo_met": _good(record, o, latencies),
    }
    return frame("requests", run_id, columns, len(rows))


def _since_start(record: RunRecord, name: str) -> FloatArray:
    """A time that only the engine knows, in ns after the start of the run; NaN where it does not tell."""
    start, times = record.t_start_ns or 0, (getattr(r, f"{name}_ns") for r in record.requests)
    return np.array([np.nan if t is None else t - start for t in times], dtype=np.float64)


def _good(record: RunRecord, o: Observations, latencies: Mapping[str, FloatArray]) -> Any:
    if record.slo is None or not record.slo.request_limits:
        return [None] * len(record.requests)
    return booleans(good_requests(o, latencies, record.slo))


def _itl(run_id: str, o: Observations, gaps: Gaps) -> pd.DataFrame:
    t_s = gaps.t_ns / 1e9 if o.started else np.full(len(gaps.t_ns), np.nan)
    columns = {
        "request_id": strings(o.request_ids, gaps.request),
        "index": nullable_integers(gaps.index, gaps.index < 0),
        "t_s": floats(t_s),
        "itl_ms": floats(gaps.itl_ms),
        "icl_ms": floats(gaps.icl_ms),
    }
    return frame("itl", run_id, columns, len(gaps.request))


def _tokens(record: RunRecord, run_id: str, o: Observations) -> pd.DataFrame:
    ids = [Deliveries.of(r.chunks).token_ids for r in record.requests]
    seen = [(name, own) for name, own in zip(o.request_ids, ids, strict=True) if own is not None]
    columns = {"request_id": [name for name, _ in seen], "token_ids": objects([own for _, own in seen])}
    return frame("tokens", run_id, columns, len(seen))


def _steps(record: RunRecord, run_id: str) -> pd.DataFrame:
    """The engine's step log; one that comes as a frame is taken by columns."""
    if not isinstance(record.steps, pd.DataFrame):
        rows = [{"step": i, **_timed(record, row)} for i, row in enumerate(record.steps)]
        return rows_frame("steps", run_id, rows)
    given = record.steps.assign(run_id=run_id, step=np.arange(len(record.steps)))
    if "t_ns" in given:
        seconds = (given.pop("t_ns") - record.t_start_ns) / 1e9 if record.t_start_ns is not None else np.nan
        given["t_s"] = seconds
    return conform("steps", given)


def _timed(record: RunRecord, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its ``t_ns`` as seconds after the start of the run."""
    timed = dict(row)
    t_ns = timed.pop("t_ns", None)
    if t_ns is not None and record.t_start_ns is not None:
        timed["t_s"] = (t_ns - record.t_start_ns) / 1e9
    return timed


def _as_json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False, sort_keys=True)


def _config(record: RunRecord, run_id: str) -> pd.DataFrame:
    columns = {
        "field": [c.field for c in record.config],
        "value": [_as_json(c.value) for c in record.config],
        "source": [c.source for c in record.config],
    }
    return frame("config", run_id, columns, len(record.config))


def _environment(record: RunRecord, run_id: str) -> pd.DataFrame:
    # n_requests and what the gate fills in have columns too; everything else the run was called stays findable here.
    in_runs = {"run_id", "n_requests", *_JUDGED_LATER, *_IDENTITY}
    facts = {**record.environment}
    facts.update({f"identity.{key}": value for key, value in record.identity.items() if key not in in_runs})
    columns = {"key": list(facts), "value": [_as_json(value) for value in facts.values()]}
    return frame("environment", run_id, columns, len(facts))


def _named_values(
    table: str, run_id: str, name: str, value: str, values: Mapping[str, float | int | None]
) -> pd.DataFrame:
    return frame(table, run_id, {name: list(values), value: list(values.values())}, len(values))
