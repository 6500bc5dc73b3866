"""What a result folder says of a run's requests, and several folders as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.report.read import Results, decoded, read_results
from workloads import build_workload
from workloads.workload import ScheduledRequest, Workload


def read_all(directories: Sequence[Path]) -> Results:
    """The tables of several run or sweep folders, one below the other.

    Raises:
        ResultsError: one of them holds nothing.
    """
    parts = [read_results(directory) for directory in directories]
    if len(parts) == 1:
        return parts[0]
    tables = {}
    for name in parts[0].tables:
        filled = [p.tables[name] for p in parts if len(p.tables[name])]
        tables[name] = pd.concat(filled, ignore_index=True) if filled else parts[0].tables[name]
    notes = tuple(note for p in parts for note in p.notes)
    return Results(parts[0].directory, tables, notes, tuple(job for p in parts for job in p.jobs))


def measured_runs(results: Results) -> list[str]:
    """Ids of the runs that can teach a step-time model: measured, ended well, of this engine, with a step log."""
    runs = results.runs
    wanted = runs[
        (runs["engine"] == "ours") & (runs["status"] == "ok") & (runs["source"].fillna("measured") != "simulated")
    ]
    logged = set(results.tables["steps"]["run_id"])
    return [str(r) for r in wanted["run_id"] if r in logged]


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
