"""What a reader must know before believing the numbers, one sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from harness import manifest
from harness.provenance import REVISION_KEYS, code_names
from harness.report.arms import Arm, by_facet
from harness.report.bursts import split_bursts
from harness.report.never_acted import never_acted_notes
from harness.report.quantity import number
from harness.report.read import Results, decoded
from harness.tables import MIN_P99_SAMPLES

BUSY_SHARE = 0.25
"""Share of the machine's cores that others may use while something is measured, before the report says so."""

THROTTLED_SHARE = 0.05
"""Share of the samples in which the GPU's clocks may be held down before the report says so."""

ATTENTION = "attn_implementation_in_use"

CALIBRATION_LIMITS = {
    "ttft_error_p50_ms": (0.2, "ms"),
    "itl_error_p50_ms": (0.2, "ms"),
    "last_lag_ms": (1.0, "ms"),
    "overhead_us_per_token": (20.0, "µs"),
}
"""What the harness promises to add at most; a calibration beyond it makes small differences of its arm doubtful."""

PERCENTILES = {"ttft_p99_ms": "TTFT", "itl_p99_ms": "ITL"}


def validity_notes(
    results: Results, arms: Sequence[Arm], percentiles: Mapping[str, str] = PERCENTILES, greyed: bool = True
) -> list[str]:
    """Failed runs, a variable that never acted, token mismatches, unequal workloads, arms of mixed runs or of different
    code, shared processes, a busy machine or GPU, a GPU that could not be watched, held clocks, a late sender, a
    harness out of its bounds, token counts that cannot be true, a load that never stood still, few samples,
    bursts that met a running engine, no repeats; [] if all is well.

    Args:
        percentiles: the 99th percentiles that are shown, with their names.
        greyed: whether those of few samples look different where they are shown.
    """
    return [
        *_simulated(results),
        *_bad_runs(results),
        *never_acted_notes(results, arms),
        *_other_tokens(arms),
        *_unequal_workloads(arms),
        *_mixed_configs(results, arms),
        *_mixed_code(results, arms),
        *_double_repeats(arms),
        *_shared_processes(arms),
        *_busy_machine(results, arms),
        *_unwatched_gpu(results, arms),
        *_shared_gpu(results, arms),
        *_throttled(arms),
        *_late_sender(arms),
        *_uncalibrated(results, arms),
        *_impossible_counts(results, arms),
        *_other_attention(results, arms),
        *_unsteady(arms),
        *_few_samples(arms, percentiles, greyed),
        *split_bursts(results, arms),
        *_no_repeats(arms),
    ]


_LISTED = 4
"""More arms than these are not listed one by one where something holds for all of them."""


def _names(arms: Sequence[Arm], of: Sequence[Arm] = ()) -> str:
    """Labels of ``arms``; where they are all of many, how many."""
    if len(arms) == len(of) > _LISTED:
        return f"all {len(arms)} arms"
    return ", ".join(a.label for a in arms)


def _each(found: Sequence[tuple[Arm, float, str]], of: Sequence[Arm]) -> str:
    """Labels of arms with what was found at each; where they are all of many, only the worst.

    Args:
        found: the arm, how bad it is, and in words what was found.
    """
    if len(found) == len(of) > _LISTED:
        arm, _, words = max(found, key=lambda f: f[1])
        return f"all {len(found)} arms, most of all {arm.label} ({words})"
    return ", ".join(f"{arm.label} ({words})" for arm, _, words in found)


def _simulated(results: Results) -> list[str]:
    count = int((results.runs["source"] == "simulated").sum())
    if not count:
        return []
    which = "Every run" if count == len(results.runs) else f"{count} of {len(results.runs)} runs"
    return [f"{which} was simulated, not measured: cb-plan states how far simulations are from measured runs."]


def _bad_runs(results: Results) -> list[str]:
    lines = []
    jobs = [job for job in results.jobs if job.job != "."]
    if any(job.state in ("interrupted", "planned") for job in jobs):
        lines.append(f"The sweep was not finished: {manifest.tally(jobs)}. Only what was measured enters a number.")
    interrupted = int((results.runs["status"] == "interrupted").sum())
    bad = int((results.runs["status"] != "ok").sum()) - interrupted
    for count, what in ((bad, "did not end well"), (interrupted, "interrupted")):
        if count:
            lines.append(f"{count} of {len(results.runs)} runs {what}: no number holds such a run.")
    return lines


def _other_tokens(arms: Sequence[Arm]) -> list[str]:
    lines = []
    wrong = [a for a in arms if (a.runs["gate"] == "failed").any()]
    if wrong:
        lines.append(f"Wrong answers: {_names(wrong)} (see below). Its speed is that of another output.")
    ties = [a for a in arms if (a.runs["gate"] == "explained").any() and a not in wrong]
    if ties:
        lines.append(
            f"Some token ids differ from the reference's, each first where the model itself is undecided: "
            f"{_names(ties)}."
        )
    # Results of before the gate only know that something differed.
    unknown = [a for a in arms if a.tokens_match is False and a.runs["gate"].isna().all()]
    if unknown:
        lines.append(f"Other token ids than the reference: {_names(unknown)}. Its speed is that of another output.")
    return lines


def _unequal_workloads(arms: Sequence[Arm]) -> list[str]:
    lines = []
    for facet, members in by_facet([a for a in arms if not a.varies_requests]).items():
        # The seed may change from repeat to repeat; inside one repeat all arms must get the same requests.
        by_repeat: dict[object, set[str]] = {}
        for arm in members:
            for repeat, text in zip(_repeats(arm), arm.runs["workload_hash"], strict=True):
                if isinstance(text, str):
                    by_repeat.setdefault(repeat, set()).add(text)
        if any(len(hashes) > 1 for hashes in by_repeat.values()):
            where = f" in {facet}" if facet else ""
            lines.append(
                f"The arms{where} were not given the same requests (workload_hash differs): do not compare them."
            )
    return lines


def _mixed_configs(results: Results, arms: Sequence[Arm]) -> list[str]:
    environment = results.tables["environment"]
    rows = environment[environment["key"] == "identity.config_hash"]
    config_of = dict(zip(rows["run_id"], rows["value"], strict=True))
    mixed = [a for a in arms if len({config_of[r] for r in a.runs["run_id"] if r in config_of}) > 1]
    if not mixed:
        return []
    return [
        f"Runs with different configs (config_hash) are in one arm: {_names(mixed)}. They are no repeats of each other."
    ]


def _mixed_code(results: Results, arms: Sequence[Arm]) -> list[str]:
    environment = results.tables["environment"]
    rows = environment[environment["key"].isin(REVISION_KEYS)].dropna(subset="value")
    facts: dict[str, dict[str, object]] = {}
    for run_id, key, value in zip(rows["run_id"], rows["key"], rows["value"], strict=True):
        facts.setdefault(run_id, {})[key] = decoded(value)
    arms_of: dict[str, list[Arm]] = {}
    name_of = dict(zip(facts, code_names(list(facts.values())), strict=True))
    for arm in arms:
        codes = {name_of.get(run_id) for run_id in arm.measured["run_id"]} - {None}
        for code in sorted(str(c) for c in codes):
            arms_of.setdefault(code, []).append(arm)
    if len(arms_of) < 2:
        return []
    shown = "; ".join(f"{code}: {_names(members)}" for code, members in arms_of.items())
    return [f"Arms measured with different code, which may be what makes them differ: {shown}."]


def _impossible_counts(results: Results, arms: Sequence[Arm]) -> list[str]:
    requests = results.tables["requests"]
    impossible = requests.loc[requests["output_counted_by"] == "impossible", "run_id"]
    counted = []
    for arm in arms:
        of_arm = arm.measured["run_id"]
        if n := int(impossible.isin(of_arm).sum()):
            counted.append(f"{arm.label} ({n} of {int(requests['run_id'].isin(of_arm).sum())} requests)")
    if not counted:
        return []
    return [
        "The server's number of generated tokens cannot be true (above max_new_tokens, 0 although text came, falling, "
        f"or no whole number) and is not believed; rates that need it are unknown: {', '.join(counted)}."
    ]


def _double_repeats(arms: Sequence[Arm]) -> list[str]:
    double = [a for a in arms if len(known := [r for r in _repeats(a) if r is not None]) > len(set(known))]
    if not double:
        return []
    return [f"The same repeat is there more than once: {_names(double)}. Ratios to and of such arms are not paired."]


def _repeats(arm: Arm) -> list[tuple[int, int] | None]:
    """Repeat and iteration of each run; None where it states none."""
    columns = (arm.runs[name].fillna(least).tolist() for name, least in (("repeat", -1), ("iteration", 0)))
    return [None if repeat < 0 else (repeat, iteration) for repeat, iteration in zip(*columns, strict=True)]


def _shared_processes(arms: Sequence[Arm]) -> list[str]:
    lines = []
    if again := [a for a in arms if a.repeats < len(a.measured)]:
        lines.append(
            f"Several runs of one process: {_names(again)}. They share a start of the engine and a moment; every "
            "comparison takes their median as one repeat."
        )
    by_process: dict[str, list[Arm]] = {}
    for arm in arms:
        for process in arm.runs["process"].dropna().unique():
            by_process.setdefault(str(process), []).append(arm)
    if together := list(dict.fromkeys(a.label for members in by_process.values() if len(members) > 1 for a in members)):
        lines.append(f"Measured in one process, one after the other: {', '.join(together)}.")
    return lines


def _busy_machine(results: Results, arms: Sequence[Arm]) -> list[str]:
    """Arms beside which others used more than a quarter of the machine, each with its worst run."""
    environment = results.tables["environment"]
    load: dict[str, dict[str, float]] = {}
    for row in environment[environment["key"].str.startswith("load.")].dropna(subset="value").to_dict("records"):
        if isinstance(value := decoded(row["value"]), int | float):
            load.setdefault(row["run_id"], {})[row["key"].removeprefix("load.")] = value
    busy: list[tuple[Arm, float, str]] = []
    for arm in arms:
        known = [load[r] for r in arm.measured["run_id"] if {"others_cores", "cores"} <= load.get(r, {}).keys()]
        worst = max(known, key=lambda facts: facts["others_cores"], default=None)
        if worst is not None and worst["others_cores"] > worst["cores"] * BUSY_SHARE:
            average = worst.get("average_1min_start")
            shown = "" if average is None else f", load {average:.1f} at the start"
            used = f"others used {worst['others_cores']:.1f} of {worst['cores']:g} cores{shown}"
            busy.append((arm, worst["others_cores"], used))
    return [f"The machine was busy while this was measured: {_each(busy, arms)}."] if busy else []


def _unwatched_gpu(results: Results, arms: Sequence[Arm]) -> list[str]:
    """Arms on a GPU with samples of which none could read it."""
    telemetry = results.tables["telemetry"]
    seen = telemetry.groupby("run_id")["gpu_used_bytes"].count()
    blind = {str(run_id) for run_id, read in seen.items() if read == 0}
    named = []
    for arm in arms:
        on_gpu = arm.measured["device"].str.startswith("cuda").fillna(False)
        if blind & set(arm.measured.loc[on_gpu, "run_id"]):
            named.append(arm)
    if not named:
        return []
    return [
        f"NVML could not be read (run.log says why): {_names(named)}. Clocks, power, other processes and memory "
        "outside of torch are unknown there."
    ]


def _shared_gpu(results: Results, arms: Sequence[Arm]) -> list[str]:
    environment = results.tables["environment"]
    rows = environment[(environment["key"] == "gpu.other_processes") & environment["value"].notna()]
    shared = {r["run_id"] for r in rows.to_dict("records") if isinstance(n := decoded(r["value"]), int) and n > 0}
    named = [a for a in arms if shared & set(a.measured["run_id"])]
    return [f"Other processes used the GPU: {_names(named)}."] if named else []


def _throttled(arms: Sequence[Arm]) -> list[str]:
    held = [(a, s) for a in arms if (s := a.spread("throttled_share")) and s.high > THROTTLED_SHARE]
    if not held:
        return []
    shown = ", ".join(f"{arm.label} ({100 * share.high:.0f} % of the samples)" for arm, share in held)
    return [f"The GPU's clocks were held down (power or heat, see telemetry): {shown}."]


def _uncalibrated(results: Results, arms: Sequence[Arm]) -> list[str]:
    calibration = results.tables["calibration"]
    outside = []
    for arm in arms:
        own = calibration[calibration["run_id"].isin(arm.measured["run_id"])]
        for column, (limit, unit) in CALIBRATION_LIMITS.items():
            worst = own[column].max()
            if pd.notna(worst) and worst > limit:
                outside.append(f"{arm.label} ({column.rpartition('_')[0]} {number(float(worst))} of {limit:g} {unit})")
                break
    if not outside:
        return []
    return [f"The harness did not give a known schedule back within its bounds here: {', '.join(outside)}."]


def _other_attention(results: Results, arms: Sequence[Arm]) -> list[str]:
    """Padded static batching beside engines that switched to another attention by themselves (M-stat-01)."""
    config = results.tables["config"]
    rows = config[config["field"] == ATTENTION].dropna(subset="value")
    in_use = {r: str(decoded(v)).removeprefix("paged|") for r, v in zip(rows["run_id"], rows["value"], strict=True)}
    lines = []
    for facet, members in by_facet(arms).items():
        static = {in_use[r] for a in members if a.engine == "static" for r in a.runs["run_id"] if r in in_use}
        others = {a.series: in_use[r] for a in members if a.engine != "static" for r in a.runs["run_id"] if r in in_use}
        different = [f"{series} on {name}" for series, name in others.items() if static and name not in static]
        if different:
            where = f" in {facet}" if facet else ""
            lines.append(
                f"Static batching ran on {', '.join(sorted(static))} attention{where}, {', '.join(different)}: ratios "
                "to it hold that difference too. Pin it for all: experiment=static_vs_continuous does, or "
                "model.attn_implementation with engine.auto_switch_to_flash=false."
            )
    return lines


def _unsteady(arms: Sequence[Arm]) -> list[str]:
    """Loads that never stood still. A burst has no steady state by its nature and is no warning."""
    lines = []
    for state, text in (
        ("saturated", "The queue grew to the end (saturated): latencies are of this run's length, no steady state"),
        ("non_stationary", "The load never stood still: no steady window, so no rates of one"),
    ):
        if named := [a for a in arms if (a.measured["steady_state"] == state).any()]:
            lines.append(f"{text}: {_names(named, arms)}.")
    return lines


def _late_sender(arms: Sequence[Arm]) -> list[str]:
    late: list[tuple[Arm, float, str]] = []
    for arm in arms:
        lag, ttft = arm.spread("sched_lag_p99_ms"), arm.spread("ttft_p50_ms")
        if lag is not None and lag.high > max(1.0, 0.02 * ttft.median if ttft else 0.0):
            late.append((arm, lag.high, f"{number(lag.high)} ms"))
    if not late:
        return []
    return [f"The sender was late, p99 above max(1 ms, 2 % of the median TTFT): {_each(late, arms)}."]


def _few_samples(arms: Sequence[Arm], percentiles: Mapping[str, str], greyed: bool) -> list[str]:
    few: dict[str, list[Arm]] = {}
    for metric, name in percentiles.items():
        if named := [a for a in arms if a.spread(metric) and a.has_few_samples(metric)]:
            few[name] = named
    if not few:
        return []
    too_few = (
        f"rests on fewer than {MIN_P99_SAMPLES} samples, with at most seven beyond it, and may be another next time"
    )
    if greyed:
        return [f"p99 of {' and '.join(few)} in some arms {too_few}: shown greyed."]
    return [f"p99 of {name} {too_few}: {_names(named, arms)}." for name, named in few.items()]


def _no_repeats(arms: Sequence[Arm]) -> list[str]:
    if len(arms) < 2 or any(a.repeats > 1 for a in arms):
        return []
    return ["One process an arm: how much a number would change from process to process is unknown."]
