"""The parts of a page that let a reader check it: settings, provenance, failures, and how to run it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

import pandas as pd
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.manifest import MULTIRUN_FILE
from harness.report.arms import Arm
from harness.report.config_diff import ENGINE_ONLY, Difference, config_differences
from harness.report.page import details, section, text_table
from harness.report.quantity import UNKNOWN, number
from harness.report.read import Results, decoded, facts

_SHOWN_ELSEWHERE = ("command_line", "identity.question")
_NULL = "null"
_MOST_DIVERGENCES = 30
_LONGEST = 400  # characters of a value that are shown; the tables hold the rest


def settings_section(results: Results, arms: Sequence[Arm]) -> str:
    """Settings that differ between the arms, then every setting of each."""
    if results.tables["config"].empty:
        return section("Settings", "<p>No settings were recorded.</p>")
    found = config_differences(results, arms)
    shared = [d for d in found if d.kind != ENGINE_ONLY]
    single = [d for d in found if d.kind == ENGINE_ONLY]
    if len(arms) < 2:
        lead = ""
    elif shared:
        lead = _difference_table(shared)
    else:
        lead = "<p>No setting that all arms have differs between them.</p>"
    return section(
        "Settings",
        lead,
        details(f"Settings that only some engines have ({len(single)})", _difference_table(single)) if single else "",
        details("Every setting", _every_setting(results, arms)),
    )


def _difference_table(found: Sequence[Difference]) -> str:
    series = list(dict.fromkeys(name for d in found for name in d.values))
    merged: dict[tuple[str, ...], list[str]] = {}
    for d in found:
        cells = [d.field, d.kind, *(_shown(d.values.get(s)) for s in series), "; ".join(d.sources)]
        merged.setdefault(tuple(cells), []).append(d.facet)
    with_facet = any(d.facet for d in found)
    header = ["setting", "role", *series, "source", *(["where"] if with_facet else [])]
    rows = [[*cells, *([", ".join(facets)] if with_facet else [])] for cells, facets in merged.items()]
    return text_table(header, rows)


def _every_setting(results: Results, arms: Sequence[Arm]) -> str:
    config = results.tables["config"]
    first_runs = {a.label: str(a.runs["run_id"].iloc[0]) for a in arms}
    columns = {}
    for label, run_id in first_runs.items():
        rows = config[config["run_id"] == run_id]
        columns[label] = dict(zip(rows["field"], rows["value"], strict=True))
    columns = {label: values for label, values in columns.items() if values}
    fields = list(dict.fromkeys(f for values in columns.values() for f in values))
    return text_table(["setting", *columns], [[f, *(_shown(v.get(f)) for v in columns.values())] for f in fields])


def provenance_section(results: Results) -> str:
    """Facts that hold for all runs, then those that differ, by run."""
    environment = results.tables["environment"]
    if environment.empty:
        return section("Provenance", "<p>Nothing about machine and software was recorded.</p>")
    run_ids = list(dict.fromkeys(results.runs["run_id"]))
    by_key: dict[str, dict[str, str]] = {}
    for row in environment[~environment["key"].isin(_SHOWN_ELSEWHERE)].to_dict("records"):
        by_key.setdefault(row["key"], {})[row["run_id"]] = _shown(row["value"])
    same, differing = [], []
    for key, values in by_key.items():
        if len(set(values.values())) == 1:
            where = "" if len(values) >= len(run_ids) else f" (in {len(values)} of {len(run_ids)} runs)"
            same.append([key, next(iter(values.values())) + where])
        else:
            differing.append([key, *(values.get(r, UNKNOWN) for r in run_ids)])
    absent = [key for key, value in same if value == _NULL]
    same = [row for row in same if row[1] != _NULL]
    same += [["unknown or not installed", ", ".join(absent)]] if absent else []
    shown_ids = run_ids[:12]
    more = f"<p>{len(run_ids) - 12} more runs are in environment.parquet.</p>" if len(run_ids) > 12 else ""
    return section(
        "Provenance",
        text_table(["fact", "value"], same),
        details(
            f"Facts that differ between runs ({len(differing)})",
            text_table(["fact", *shown_ids], [row[: len(shown_ids) + 1] for row in differing]) + more,
        )
        if differing
        else "",
    )


def failures_section(results: Results, arms: Sequence[Arm]) -> str:
    """Runs, requests and jobs that did not end well; "" if all did."""
    label = {str(r): a.label for a in arms for r in a.runs["run_id"]}
    runs = [
        [row["run_id"], label[row["run_id"]], row["status"], _shown(row["error"])]
        for row in results.runs.fillna({"error": UNKNOWN}).to_dict("records")
        if row["status"] != "ok"
    ]
    requests = results.tables["requests"]
    bad = requests[~requests["outcome"].isin(["ok_eos", "ok_length"])]
    groups = [
        [label.get(str(run_id), str(run_id)), str(outcome), str(len(rows)), _shown(_first(rows["error"].dropna()))]
        for (run_id, outcome), rows in bad.groupby(["run_id", "outcome"], sort=False)
    ]
    jobs = [
        [job.job, " ".join(job.overrides), job.state, _shown(job.error)] for job in results.jobs if job.state != "ok"
    ]
    return section(
        "Failures",
        "<h3>Runs</h3>" + text_table(["run", "arm", "status", "error"], runs) if runs else "",
        "<h3>Requests</h3>" + text_table(["arm", "outcome", "requests", "first error"], groups) if groups else "",
        "<h3>Jobs</h3>" + text_table(["job", "overrides", "state", "error"], jobs) if jobs else "",
    )


def divergences_section(results: Results, arms: Sequence[Arm]) -> str:
    """Requests whose answers are not the reference's, with the margin between the candidates; "" if there are none."""
    table = results.tables["divergences"]
    if table.empty:
        return ""
    label = {str(r): a.label for a in arms for r in a.runs["run_id"]}
    rows = [
        [
            label.get(str(d["run_id"]), str(d["run_id"])),
            str(d["request_id"]),
            str(d["index"]),
            str(d["kind"]),
            number(None if pd.isna(d["margin"]) else float(d["margin"])),
            number(None if pd.isna(d["limit"]) else float(d["limit"])),
            str(d["verdict"]),
            "" if pd.isna(d["note"]) else str(d["note"]),
        ]
        for d in table.head(_MOST_DIVERGENCES).to_dict("records")
    ]
    more = len(table) - len(rows)
    header = ["arm", "request", "token", "kind", "margin", "limit", "verdict", "note"]
    return section(
        "Other answers than the reference",
        "<p>First difference of each request. The margin is how far the lower of the two candidates lies below the "
        "best logit of the model itself, re-scored in float32; up to the limit its dtype cannot tell them apart.</p>",
        text_table(header, rows),
        f"<p>{more} more are in divergences.parquet.</p>" if more else "",
    )


def _first(values: Sequence[str]) -> str | None:
    return next(iter(values), None)


def reproduce_section(results: Results) -> str:
    """The commands that made these results, that of a whole sweep first, and where the numbers are."""
    commands = [_command(value) for value in facts(results, "command_line")]
    shown = "\n".join(commands[:10]) + (f"\n# and {len(commands) - 10} more" if len(commands) > 10 else "")
    singles = f"<pre>{escape(shown)}</pre>" if commands else "<p>The command was not recorded.</p>"
    whole = sweep_command(results.directory)
    return section(
        "Run it again",
        f"<pre>{escape(whole)}</pre>" + details(f"One arm alone ({len(commands)})", singles) if whole else singles,
        "<p>Every number of this page is in the parquet and csv tables beside it; results/README.md of the project "
        "states each column. Latencies of in-process engines hold no HTTP, network or authentication: they are not a "
        "server's capacity.</p>",
        _outside_scope(results),
    )


def sweep_command(directory: Path) -> str | None:
    """The command of the sweep in ``directory``, from what Hydra recorded of it; None where that is not there.

    What ``cb-bench`` itself adds is left out: the variable it finds, and that a sweep was resumed.
    """
    try:
        config = OmegaConf.load(directory / MULTIRUN_FILE)
        given = OmegaConf.select(config, "hydra.overrides.task")
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return None
    if not given:
        return None
    own = ("resume=", "experiment.variable='")
    # quoted for Hydra's grammar, which cb-bench does by itself
    typed = [o.replace("'null'", "null") if o.startswith("engine=") else o for o in map(str, given)]
    return shlex.join(["cb-bench", "-m", *(o for o in typed if not o.startswith(own))])


def runs_section(results: Results, arms: Sequence[Arm]) -> str:
    """Every run with the folder that its numbers come from, and which kinds of statement a page holds (M-scope-03)."""
    rows = []
    for arm in arms:
        for run_id in arm.runs["run_id"]:
            folder = results.folders.get(str(run_id))
            link = UNKNOWN if folder is None else f'<a href="{quote(folder)}/">{escape(folder)}</a>'
            rows.append(f"<tr><td>{escape(str(run_id))}</td><td>{escape(arm.label)}</td><td>{link}</td></tr>")
    head = "<tr><th>run</th><th>arm</th><th>folder of its tables</th></tr>"
    table = f'<div class="scroll"><table class="text"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
    return section(
        "Where the numbers come from",
        "<p>Measured: every number of this page, each from the runs below. Mechanism: what a setting does, in the "
        "engine's documentation. Choice: which settings were varied and held, one at a time, in the head of the "
        "experiment. Nothing here is promised of other models, machines or requests.</p>",
        details(f"The {len(rows)} runs", table),
    )


def _outside_scope(results: Results) -> str:
    """Why some of these runs cannot stand beside the project's reference results; "" if all can."""
    reasons = sorted(
        {str(r) for found in facts(results, "outside_plan_scope") if isinstance(found, list) for r in found}
    )
    if not reasons:
        return ""
    return (
        "<p>Not to be compared with the project's reference results, which are of an engine inside the measuring "
        f"process on one CUDA GPU. Here: {escape('; '.join(reasons))}.</p>"
    )


def _command(value: object) -> str:
    return shlex.join(str(part) for part in value) if isinstance(value, list) else str(value)


def _shown(value: object) -> str:
    """A stored value for people: JSON texts without their quotes, cut where they are very long."""
    if not isinstance(value, str):
        return UNKNOWN
    plain = decoded(value)
    text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"
