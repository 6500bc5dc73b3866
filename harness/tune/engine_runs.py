"""Runs of the engine for a confirmation: the measured run's own configuration, at a rate, with changed settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from harness import store
from harness.execution import run_job
from harness.job import Job
from harness.report.read import Results, decoded
from harness.simulate.setup import settings_of
from harness.slo import Slo
from harness.tune.confirm import OUT_OF_MEMORY, Measured

SURGE = 0.1
"""Offloaded requests, as a share of all, from which memory counts as short."""

GROUPS = ("model", "arrival", "workload", "generation", "measure")

_LIMITED = {"ttft": "ttft_sched", "itl": "itl", "e2e": "e2e"}


def check_machine(results: Results, run_id: str, here: Sequence[str]) -> None:
    """Refuse to confirm on another machine what was measured on a GPU: the baseline would be another one.

    Args:
        here: names of this machine's GPUs.

    Raises:
        ValueError: none of them is the run's.
    """
    rows = results.of_run("environment", run_id)
    named = rows.loc[rows["key"] == "gpu.name", "value"].dropna()
    measured_on = decoded(str(named.iloc[0])) if len(named) else None
    # torch names a MIG slice after its GPU
    if measured_on is not None and not any(str(measured_on).startswith(name) for name in here):
        raise ValueError(
            f"run {run_id} was measured on {measured_on}, this machine has {', '.join(here) or 'no GPU'}: runs on the "
            "engine would say nothing about it. Tune there, or set confirm=false to stay on the simulator"
        )


def job_config(results: Results, run_id: str, slo: Slo, rate: float, requests: int) -> dict[str, Any]:
    """The configuration of a measured run, its arrivals at ``rate``, its SLO as asked, one repeat.

    Raises:
        ValueError: the run did not record its configuration.
    """
    settings = settings_of(results, run_id)
    groups = {
        group: {k.removeprefix(f"{group}."): v for k, v in settings.items() if k.startswith(f"{group}.")}
        for group in GROUPS
    }
    rows = results.of_run("config", run_id)
    given = {str(f) for f, s in zip(rows["field"], rows["source"], strict=True) if s == "user"}
    if missing := [name for name, values in groups.items() if not values]:
        raise ValueError(
            f"run {run_id} does not state its {', '.join(missing)}: measure it again, or set confirm=false"
        )
    engine = {"name": "ours"} | {name: settings[name] for name in sorted(given) if "." not in name}
    arrival, workload = _arrivals(groups["arrival"], groups["workload"], rate, results, run_id)
    if workload.get("requests") is not None:
        workload["requests"] = requests
    limits = {"name": slo.name, **slo.run_limits}
    return {
        **groups,
        "engine": engine,
        "arrival": arrival,
        "workload": workload,
        "measure": groups["measure"]
        | {"repeats": 1, "runs_per_process": 1, "share_process": False, "reference_engine": None},
        "slo": limits,
        "experiment": {"name": "tune", "question": "Does the engine confirm it?", "variable": "engine"},
        "mode": "auto",
    }


def _arrivals(
    arrival: Mapping[str, Any], workload: Mapping[str, Any], rate: float, results: Results, run_id: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    if "rate" in arrival:
        return {**arrival, "rate": rate}, dict(workload)
    if "time_scale" in workload and arrival.get("kind") == "as_recorded":
        row = results.runs[results.runs["run_id"] == run_id].iloc[0]
        recorded = row["offered_request_s"]
        if not pd.isna(recorded):
            return dict(arrival), {**workload, "time_scale": workload["time_scale"] * float(recorded) / rate}
    return {"kind": "poisson", "rate": rate}, dict(workload)


def engine_measure(config: Mapping[str, Any], slo: Slo, directory: Path, say: Callable[[str], None]) -> Any:
    """A function that runs changed settings in a process of their own and reads what came of it.

    The value is the SLO headroom: the smallest of limit / measured percentile over the limits. At a fixed rate it says
    how far the engine is from the SLO, on both sides of it.
    """
    count = 0

    def measure(changed: Mapping[str, Any], repeat: int) -> Measured:
        nonlocal count
        count += 1
        shown = ", ".join(f"{k}={v}" for k, v in changed.items()) or "baseline"
        say(f"engine run {count}: {shown}")
        place = directory / f"{count:03d}"
        engine = {**config["engine"], **changed}
        job = Job(
            config={
                **config,
                "engine": engine,
                "measure": {**config["measure"], "seed": config["measure"]["seed"] + repeat},
            },
            directory=place,
            root=directory,
            overrides=tuple(f"engine.{k}={v}" for k, v in changed.items()),
            number=count,
            arm=shown,
            stamp=datetime.now(UTC).strftime("%Y%m%dT%H%M%S"),
        )
        run_job(job)
        return read_measured(place, slo)

    return measure


def read_measured(directory: Path, slo: Slo) -> Measured:
    """What a run came to."""
    tables = store.read_result(directory, ("runs", "requests"))
    row = tables["runs"].iloc[0]
    outcomes = set(tables["requests"]["outcome"])
    error = None if pd.isna(row["error"]) else str(row["error"])
    shortage = next((name for name in OUT_OF_MEMORY if name in outcomes), None)
    if shortage is None and error is not None and ("out of memory" in error.lower() or "oom_" in error):
        shortage = "oom_load" if "load" in error.lower() else "out of memory"
    offloads = 0 if pd.isna(row["offloads"]) else int(row["offloads"])
    planned = 1 if pd.isna(row["n_requests"]) else int(row["n_requests"])  # unknown if it ended before it was measured
    if shortage is None and offloads > SURGE * max(planned, 1):
        shortage = f"offload surge ({offloads} offloads)"
    if row["status"] != "ok":
        return Measured(None, False, shortage, error or str(row["status"]))
    met = False if pd.isna(row["slo_met"]) else bool(row["slo_met"])
    return Measured(headroom(row, slo), met, shortage)


def headroom(row: pd.Series, slo: Slo) -> float | None:
    """Smallest of limit / measured over the SLO's limits; None where nothing was measured."""
    ratios = []
    for name, limit in slo.run_limits.items():
        kind, rest = name.split("_", 1)
        value = row[f"{_LIMITED[kind]}_{rest}"]
        if not pd.isna(value) and value > 0:
            ratios.append(limit / float(value))
    return min(ratios) if ratios else None
