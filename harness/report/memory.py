"""The memory ledger of each arm beside what was measured, with what neither explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from harness.ledger import NOT_ON_DEVICE, OUTSIDE, PART, PLANNED, RESIDUAL
from harness.report.arms import Arm
from harness.report.page import details, section, text_table
from harness.report.quantity import UNKNOWN, in_unit, memory
from harness.report.read import Results
from harness.tables import column

_DERIVED = (PLANNED, RESIDUAL, OUTSIDE)
_NOT_PLANNED = ("peak_", "free_", *NOT_ON_DEVICE, PART)


def ledger_sentences(results: Results, arms: Sequence[Arm]) -> list[str]:
    """Planned, allocated and the residual of each arm with a ledger on a GPU, a line each.

    On a CPU nothing measures the engine's memory alone: resident memory holds interpreter and libraries too.
    """
    lines = []
    for arm in arms:
        ledger = _ledger(results, arm)
        planned, residual = ledger.get(PLANNED), ledger.get(RESIDUAL)
        allocated = ledger.get("peak_gpu_allocated_bytes")
        if planned is not None and residual is not None and allocated:
            lines.append(
                f"memory of {arm.label}: {memory(planned)} in the ledger, {memory(allocated)} allocated at the peak; "
                f"residual {_signed(residual)} ({100 * residual / allocated:.1f} %)"
            )
    return lines


def ledger_section(results: Results, arms: Sequence[Arm]) -> str:
    """One column an arm: lines of the ledger, their sum, peaks, residuals, free memory; "" if nothing is known."""
    ledgers = {arm.label: _ledger(results, arm) for arm in arms}
    ledgers = {label: ledger for label, ledger in ledgers.items() if ledger}
    names = list(dict.fromkeys(name for ledger in ledgers.values() for name in ledger))
    planned = [n for n in names if n not in _DERIVED and not n.startswith(("peak_", "free_"))]
    measured = [n for n in names if n.startswith("peak_")]
    derived = [n for n in _DERIVED if n in names]
    order = [*planned, *derived[:1], *measured, *derived[1:], *(n for n in names if n.startswith("free_"))]
    if not order:
        return ""
    rows = [[_title(name), *(_amount(ledger, name) for ledger in ledgers.values())] for name in order]
    return section(
        "Memory",
        "<p>First repeat of each arm. Residual: what the allocator (on a CPU: the whole process) held at its peak "
        "beyond the ledger. Outside torch: what NVML saw of this process beyond torch's reserve. Torch's peaks cover "
        "its own allocator exactly; NVML is sampled and covers everything, so short peaks may be missing from it.</p>",
        text_table(["line", *ledgers], rows),
        areas_table(arms),
    )


_AREAS = {
    "input": ("peak_mask_bytes", "chunked_requests", "waiting_max"),
    "KV cache": (
        "unused_slots_mean",
        "kv_blocks_p50",
        "kv_blocks_max",
        "table_pages_max",
        "offloads",
        "restores",
        "restored_bytes",
        "restore_mean_ms",
        "restore_gb_s",
    ),
    "decode reserve": ("held_steps", "prefill_delay_p95_ms", "queue_p95_ms", "ttft_p95_ms"),
}


def areas_table(arms: Sequence[Arm]) -> str:
    """What to watch in each area of memory (M-mem-02), a row a figure and a column an arm; "" if no engine tells."""
    rows = []
    for area, names in _AREAS.items():
        for name in names:
            spreads = [arm.spread(name) for arm in arms]
            if any(spreads):
                unit = column("runs", name).unit
                cells = [UNKNOWN if s is None else in_unit(s.median, unit) for s in spreads]
                rows.append([area, f"{name} [{unit}]", *cells])
    if not any(row[0] == "KV cache" for row in rows):
        return ""
    return details(
        "The areas of memory and what they cost", text_table(["area", "median", *(a.label for a in arms)], rows)
    )


def ledger_lines(results: Results, arms: Sequence[Arm]) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """By arm, the engine's own lines on the model's device in bytes; and what the allocator held at its peak."""
    lines, peaks = {}, {}
    for arm in arms:
        if arm.is_replica:
            continue
        ledger = _ledger(results, arm)
        own = {n: v for n, v in ledger.items() if n not in _DERIVED and not n.startswith(_NOT_PLANNED) and v}
        if own:
            lines[arm.label] = own
            if peak := ledger.get("peak_gpu_allocated_bytes"):
                peaks[arm.label] = peak
    return lines, peaks


def _ledger(results: Results, arm: Arm) -> Mapping[str, int | None]:
    """Lines of the arm's first measured run, with free memory at the start and before the first request."""
    if arm.measured.empty:
        return {}
    run_id = str(arm.measured["run_id"].iloc[0])
    rows = results.of_run("memory_ledger", run_id)
    found = {_line(str(r["line"])): None if pd.isna(r["bytes"]) else int(r["bytes"]) for r in rows.to_dict("records")}
    environment = results.of_run("environment", run_id)
    for row in environment[environment["key"].str.startswith("memory.free_")].dropna(subset="value").to_dict("records"):
        if str(row["value"]).isdigit():
            found[str(row["key"]).removeprefix("memory.")] = int(row["value"])
    return found


def _line(name: str) -> str:
    """A line's name; earlier tables hold some of the engines' lines without the unit: one part, one name."""
    return name if name in _DERIVED or name.endswith("_bytes") else f"{name}_bytes"


def _title(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _amount(ledger: Mapping[str, int | None], name: str) -> str:
    value = ledger.get(name)
    if value is None:
        return UNKNOWN
    return _signed(value) if name in (RESIDUAL, OUTSIDE) else memory(value)


def _signed(value: int) -> str:
    return f"−{memory(-value)}" if value < 0 else memory(value)
