"""What a result folder says of a run's requests, and several folders as one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.report.read import Results, ResultsError, decoded, read_results
from workloads import build_workload
from workloads.workload import ScheduledRequest, Workload


def read_all(directories: Sequence[Path]) -> Results:
    """The tables of several run or sweep folders, one below the other.

    A folder that is named twice counts once.

    Raises:
        ResultsError: one of them holds nothing, or a run that another one holds too.
    """
    parts = [read_results(directory) for directory in {d.resolve(): d for d in directories}.values()]
    if len(parts) == 1:
        return parts[0]
    seen: dict[str, Path] = {}
    for part in parts:
        for run_id in part.runs["run_id"]:
            if run_id in seen:
                raise ResultsError(f"run {run_id} is in {seen[run_id]} and in {part.directory}: name one of them")
            seen[run_id] = part.directory
    tables = {}
    for name in parts[0].tables:
        filled = [p.tables[name] for p in parts if len(p.tables[name])]
        tables[name] = pd.concat(filled, ignore_index=True) if filled else parts[0].tables[name]
    notes = tuple(note for p in parts for note in p.notes)
    return Results(parts[0].directory, tables, notes, tuple(job for p in parts for job in p.jobs))


def own_runs(results: Results) -> list[str]:
    """Ids of the runs that a simulation can be compared with: measured, ended well, of this engine."""
    runs = results.runs
    wanted = runs[
        (runs["engine"] == "ours") & (runs["status"] == "ok") & (runs["source"].fillna("measured") != "simulated")
    ]
    return [str(r) for r in wanted["run_id"]]


def measured_runs(results: Results) -> list[str]:
    """Ids of the runs that can teach a step-time model: those of :func:`own_runs` with a step log."""
    logged = set(results.tables["steps"]["run_id"])
    return [run_id for run_id in own_runs(results) if run_id in logged]


def nothing_to_fit(results: Results) -> str:
    """Why :func:`measured_runs` finds none, in a line that says what to do."""
    if own := own_runs(results):
        why = [note for note in results.notes if note.startswith("steps.parquet")]
        return (
            f"none of the {len(own)} measured runs of engine ours has its step log "
            f"({why[0] if why else 'it was left out'}): name the folder they were measured in, or measure again"
        )
    return "no measured run of engine ours is there: measure one first"


def conditions(results: Results) -> dict[str, list[str]]:
    """Measured runs by what was measured: the same workload, but for its seed, at the same arm. Repeats, and the
    iterations of one process (each with a seed of its own), are no independent runs.

    The name of a condition is its workload's, with its arm or its first run where that alone does not tell it apart.
    """
    runs = results.runs.set_index("run_id")
    found: dict[tuple[str, ...], list[str]] = {}
    for run_id in measured_runs(results):
        row = runs.loc[run_id]
        key = (_without_seeds(workload_spec(results, run_id)) or str(row["workload_hash"]), str(row["variable"]))
        found.setdefault((*key, str(row["arm"])), []).append(run_id)
    names = [str(runs.loc[ids[0], "workload"]) for ids in found.values()]
    if len(set(names)) < len(names):
        names = [f"{name} {key[-1]}" for name, key in zip(names, found, strict=True)]
    if len(set(names)) < len(names):
        names = [ids[0] for ids in found.values()]
    return dict(zip(names, found.values(), strict=True))


def _without_seeds(spec: Mapping[str, Any] | None) -> str | None:
    if spec is None:
        return None
    parts = {
        k: {n: v for n, v in part.items() if n != "seed"} if isinstance(part, dict) else part
        for k, part in spec.items()
    }
    return json.dumps(parts, sort_keys=True)


def workload_spec(results: Results, run_id: str) -> dict[str, Any] | None:
    """Settings that built the workload of a run; None if they were not recorded."""
    rows = results.of_run("environment", run_id)
    found = rows.loc[rows["key"] == "workload.spec", "value"].dropna()
    spec = decoded(str(found.iloc[0])) if len(found) else None
    return spec if isinstance(spec, dict) and {"workload", "arrival", "vocab_size"} <= spec.keys() else None


def built(spec: Mapping[str, Any], **changes: Any) -> Workload:
    """The workload of a recorded spec, some settings of its ``workload`` part changed."""
    settings = {**spec["workload"], **changes}
    return build_workload(
        settings,
        spec["arrival"],
        vocab_size=spec["vocab_size"],
        seed=settings.get("seed") or 0,
        special_ids=spec.get("special_ids", ()),
    )


def workload_of_run(results: Results, run_id: str) -> tuple[Workload, str | None]:
    """The requests of a measured run, and a remark if they are not exactly those.

    They are built again from their settings where that gives the same content; else their lengths and due times are
    taken from the table of requests, and prompts share nothing.
    """
    row = results.runs[results.runs["run_id"] == run_id].iloc[0]
    spec = workload_spec(results, run_id)
    if spec is not None:
        try:
            workload = built(spec)
        except ValueError:
            pass  # its file is elsewhere, or it needs a tokenizer
        else:
            if workload.content_hash == row["workload_hash"]:
                return workload, None
    requests = results.of_run("requests", run_id).sort_values("t_sched_s", kind="stable")
    columns = zip(
        requests["request_id"],
        requests["t_sched_s"],
        requests["prompt_tokens"],
        requests["max_new_tokens"],
        strict=True,
    )
    rows = tuple(
        ScheduledRequest(str(name), float(due), (1 + number,) * int(prompt), int(tokens))
        for number, (name, due, prompt, tokens) in enumerate(columns)
    )
    settings = {} if spec is None else spec["arrival"]
    remark = "its prompts could not be built again: lengths and times are the recorded ones, no prefix is shared"
    return Workload(str(row["workload"]), rows, settings.get("concurrency"), spec or {}), remark


def output_lengths(results: Results, run_id: str) -> dict[str, int]:
    """By request id, tokens that a request of a measured run really got, where it ended well."""
    rows = results.of_run("requests", run_id)
    rows = rows[rows["outcome"].isin(["ok_eos", "ok_length"]) & rows["output_tokens"].notna()]
    return {str(name): int(n) for name, n in zip(rows["request_id"], rows["output_tokens"], strict=True) if n > 0}
