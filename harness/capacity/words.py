"""A plan in sentences and tables, the same for console and page."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

from harness.capacity.binding import Binding
from harness.capacity.plan import Plan
from harness.capacity.recommend import WORTH
from harness.capacity.search import Capacity
from harness.report.quantity import UNKNOWN, memory, number

MANY = 0.1
"""Share of extrapolated steps that the answer itself names."""

BINDING_WORDS = {
    "ttft": "the time to the first token",
    "itl": "the gap between tokens",
    "kv_memory": "KV memory",
    "max_requests": "max_requests_per_batch",
    "compute": "compute (throughput)",
}


def headline(plan: Plan) -> list[str]:
    """The answer in a few sentences."""
    if plan.capacity is None:
        return [f"No answer under this SLO: {plan.unmet}."]
    lines = [
        f"One {device_word(plan)} carries {rate_words(plan.capacity)} of '{plan.workload.name}' within {limits(plan)}."
    ]
    if plan.binding is not None:
        remedy = chunk_words(plan) if plan.binding.cuttable else ""
        lines.append(binding_words(plan.binding, plan.capacity.deciding.rate, remedy))
    if plan.improved is not None:
        lines.append(f"With the recommended settings it carries {rate_words(plan.improved)}.")
    target = plan.settings.target_rate
    if plan.gpus is not None and target is not None:
        sure = number((plan.improved or plan.capacity).sure)
        lines.append(
            f"{number(target)} requests/s need {gpus_words(plan, plan.gpus)}"
            f"{' with those' if plan.improved is not None else ''}, with {plan.settings.headroom:.0%} headroom below "
            f"{sure} requests/s each (the lower end of the interval, or the worst seed if that is less)."
        )
    if plan.cost_per_million is not None:
        load = (
            f"at {number(target)} requests/s on {gpus_words(plan, plan.gpus)}"
            if plan.gpus is not None and target is not None
            else f"at {1 - plan.settings.headroom:.0%} of what a {device_word(plan)} carries"
        )
        lines.append(
            f"A million generated tokens cost {number(plan.cost_per_million)} {load}, in the currency of "
            "price_per_gpu_hour."
        )
    return [*lines, *trust(plan)]


def device_word(plan: Plan) -> str:
    """What the step times were measured on."""
    devices = plan.model.source.get("device", ())
    return "machine" if devices and all(str(name).startswith("cpu") for name in devices) else "GPU"


def gpus_words(plan: Plan, count: int) -> str:
    """How many GPUs, or machines without one."""
    return f"{count:,} {device_word(plan)}" + ("s" if count > 1 else "")


def trust(plan: Plan) -> list[str]:
    """How far to believe the metric that binds: its error on runs that the model had not seen, and how many of the
    steps are unlike any measured one if those are many."""
    if plan.capacity is None:
        return []
    broken = re.match(r"\w+", str((plan.improved or plan.capacity).deciding.values["slo_broken"] or ""))
    metric = broken[0] if broken else "gen_tok_s"
    rows = plan.validation.rows
    errors = rows[(rows["metric"] == metric) & rows["held_out"]]["error"].abs()
    what = (
        f"{metric}, which binds at that load,"
        if broken
        else f"{metric}, which binds at that load (more is asked for than done),"
    )
    if len(errors):
        lines = [f"{what} is predicted with a median error of {errors.median():.0%} on runs the model had not seen."]
    else:
        lines = [f"{what} was not compared with any measured run that the model had not seen."]
    if plan.extrapolated and plan.extrapolated > MANY:
        lines.append(
            f"But {plan.extrapolated:.0%} of the steps at that load are larger than any measured one: of those the "
            "error says little."
        )
    return lines


def limits(plan: Plan) -> str:
    """The SLO's limits."""
    return ", ".join(
        f"{name.removesuffix('_ms').replace('_', ' ')} ≤ {limit:g} ms"
        for name, limit in plan.settings.slo.run_limits.items()
    )


def rate_words(capacity: Capacity) -> str:
    """The capacity with its interval."""
    if capacity.low is None or capacity.high is None:
        return f"{number(capacity.rate)} requests/s (one seed, no interval)"
    return f"{number(capacity.rate)} requests/s (95 % interval {number(capacity.low)} to {number(capacity.high)})"


def capacities(plan: Plan) -> list[tuple[str, Capacity]]:
    """The capacities of a plan, each with a title."""
    titled = [("what bound each seed", plan.capacity), ("the same with the recommended settings", plan.improved)]
    return [(title, capacity) for title, capacity in titled if capacity is not None]


def seed_rows(capacity: Capacity) -> tuple[Sequence[str], list[list[str]]]:
    """What each seed carried, and why the next higher rate that was tried was not."""
    header = ("seed", "carries, requests/s", "not", "because", "requests")
    rows = []
    for kept, broken in zip(capacity.kept, capacity.broken, strict=True):
        why = broken.why_not or UNKNOWN
        if broken.confirmed is not None:
            why += ", as in the trial of half as many" if broken.confirmed else ", in one trial only"
        requests = f"{len(kept.record.requests):,}"
        rows.append([str(kept.seed), number(kept.rate), number(broken.rate), why, requests])
    return header, rows


def binding_words(binding: Binding, rate: float, remedy: str = "") -> str:
    """What limits it, as the trial showed that was just too fast."""
    return f"What binds is {BINDING_WORDS[binding.name]}, seen at {number(rate)} requests/s: {binding.reason}{remedy}."


def chunk_words(plan: Plan) -> str:
    """What a smaller ``max_batch_tokens``, which cuts prompts, is worth: as far as it was tried."""
    measured = plan.setup.max_batch_tokens
    chosen = next((s for s in plan.recommended if s.name == "max_batch_tokens"), None)
    if chosen is None or not chosen.tried:
        return ": a smaller max_batch_tokens would cut them (not tried)"
    if chosen.value < measured:
        return f": max_batch_tokens={chosen.value} cuts them"
    return f": smaller max_batch_tokens than {measured}, which would cut them, do not carry {WORTH:.0%} more"


def remarks(plan: Plan) -> list[str]:
    """What to know before believing the numbers."""
    lines = [*plan.validation.sentences(), *plan.notes]
    if plan.extrapolated:
        lines.append(
            f"{plan.extrapolated:.0%} of the steps at the capacity are larger than any measured one: their times are "
            "extrapolated; measure a run at a higher rate."
        )
    if plan.little is not None:
        lines.append(
            f"Little's law at the capacity: {number(plan.little.logged)} requests in the system by the step log, "
            f"{number(plan.little.predicted)} by rate x time of stay ({plan.little.difference:+.1%})."
        )
    lines.append(
        "Simulated from in-process runs: no HTTP parsing, network or authentication is in it. Load-test a server with "
        "the same settings before relying on the number (experiment=server_load)."
    )
    return lines


def kv_rows(plan: Plan) -> tuple[Sequence[str], list[list[str]]]:
    """Room in the KV cache by length of request."""
    header = ("positions a request", "KV blocks each", "requests at once", "positions in all", "bytes a position")
    rows = [
        [
            number(r.tokens),
            number(r.blocks),
            number(r.requests),
            number(r.total_tokens),
            memory_of_token(r.bytes_per_token),
        ]
        for r in plan.kv.rooms
    ]
    return header, rows


def memory_of_token(size: float) -> str:
    """Bytes of one token."""
    return f"{number(size / 1024)} KiB" if size < 2**20 else memory(size)


def validation_rows(frame: pd.DataFrame) -> tuple[Sequence[str], list[list[str]]]:
    """Predicted against measured: medians over the repeats of a condition, what was measured with its range. The error
    is that of the medians shown; the median error that the remarks name is over single runs."""
    header = ("workload", "arm", "runs", "metric", "measured", "predicted", "error", "seen by the model")
    rows = []
    for (condition, metric), runs in frame.groupby(["condition", "metric"], sort=False):
        measured, arm = runs["measured"], str(runs["arm"].iloc[0])
        off = round(100 * (runs["predicted"].median() / measured.median() - 1), 1) + 0.0  # no -0.0
        between = f" ({number(measured.min())}–{number(measured.max())})" if len(runs) > 1 else ""
        rows.append(
            [
                str(condition),
                UNKNOWN if arm in ("nan", "<NA>", "None") else arm,
                str(len(runs)),
                str(metric),
                number(measured.median()) + between,
                number(runs["predicted"].median()),
                f"{off:+.1f}%",
                "no" if runs["held_out"].all() else "yes",
            ]
        )
    return header, rows


def fleet_rows(frame: pd.DataFrame) -> tuple[Sequence[str], list[list[str]]]:
    """What clients see behind each router."""
    header = (
        "router",
        "GPUs",
        "sent/s, steady",
        "ended/s, steady",
        "tok/s, steady",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "ITL p50 ms",
        "ITL p99 ms",
        "within SLO",
        "prefix hits",
    )
    rows = []
    for r in frame.to_dict("records"):
        met = UNKNOWN if r["slo_met"] is None or pd.isna(r["slo_met"]) else "yes" if r["slo_met"] else "no"
        share = r["prefix_hit_share"]
        hits = UNKNOWN if share is None or pd.isna(share) else f"{share:.0%}"
        latencies = [number(r[c]) for c in ("ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p99_ms")]
        rates = [number(r[c]) for c in ("steady_sent_s", "steady_request_s", "steady_gen_tok_s")]
        if pd.isna(r["steady_request_s"]):
            rates[1] = f"none: {str(r['steady_state']).replace('_', ' ')} ({r['steady_reason']})"
        numbers = [*rates, *latencies]
        rows.append([str(r["router"]).replace("_", " "), str(r["replicas"]), *numbers, met, hits])
    return header, rows
