"""A plan on disk: tables, page, settings, step-time model, and the run at the capacity as any other run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from harness.capacity.page import plan_page
from harness.capacity.plan import Plan
from harness.capacity.recommend import as_yaml
from harness.capacity.search import Point
from harness.interruption import undisturbed
from harness.metrics import compute_tables
from harness.store import write_result

PAGE = "plan.html"
SETTINGS = "recommended.yaml"
MODEL = "step_times.json"
AT_CAPACITY = "at_capacity"


def write_plan(plan: Plan, directory: Path, command: Sequence[str]) -> Path:
    """Write everything into ``directory``, without interruption, in the place of another plan's; returns the page."""
    with undisturbed():
        return _write(plan, directory, command)


def _write(plan: Plan, directory: Path, command: Sequence[str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SETTINGS).unlink(missing_ok=True)
    shutil.rmtree(directory / AT_CAPACITY, ignore_errors=True)
    for name, frame in tables(plan).items():
        frame.to_parquet(directory / f"{name}.parquet", index=False)
        frame.to_csv(directory / f"{name}.csv", index=False)
    (directory / MODEL).write_text(plan.model.to_json(), encoding="utf-8")
    if plan.recommended:
        (directory / SETTINGS).write_text(as_yaml(plan.recommended), encoding="utf-8")
    if plan.capacity is not None:
        point = (plan.improved or plan.capacity).kept[0]
        record = point.record
        record.identity |= {"model": ", ".join(plan.model.source.get("model", ())), "seed": point.seed}
        write_result(directory / AT_CAPACITY, compute_tables(record))
    path = directory / PAGE
    aside = path.with_name(f".{PAGE}.{os.getpid()}")
    aside.write_text(plan_page(plan, directory, command), encoding="utf-8")
    os.replace(aside, path)
    return path


def tables(plan: Plan) -> dict[str, pd.DataFrame]:
    """The plan's own tables by name: plan (one row), seeds, rates, validation, kv, fleet, settings."""
    settings, capacity = plan.settings, plan.capacity
    one = {
        "workload": plan.workload.name,
        "slo": settings.slo.as_json(),
        "capacity_request_s": None if capacity is None else capacity.rate,
        "capacity_low_request_s": None if capacity is None else capacity.low,
        "capacity_high_request_s": None if capacity is None else capacity.high,
        "improved_request_s": None if plan.improved is None else plan.improved.rate,
        "improved_low_request_s": None if plan.improved is None else plan.improved.low,
        "improved_high_request_s": None if plan.improved is None else plan.improved.high,
        "counted_by_request_s": None if capacity is None else (plan.improved or capacity).sure,
        "unmet": plan.unmet,
        "binding": None if plan.binding is None else plan.binding.name,
        "binding_reason": None if plan.binding is None else plan.binding.reason,
        "target_request_s": settings.target_rate,
        "headroom": settings.headroom,
        "gpus": plan.gpus,
        "cost_per_million_tokens": plan.cost_per_million,
        "little_logged": None if plan.little is None else plan.little.logged,
        "little_predicted": None if plan.little is None else plan.little.predicted,
        "extrapolated_share": plan.extrapolated,
    }
    metrics = (
        "ttft_p50_ms",
        "ttft_p95_ms",
        "itl_p50_ms",
        "itl_p99_ms",
        "running_max",
        "waiting_max",
        "preemptions",
        "slo_broken",
    )
    points = () if capacity is None else capacity.points
    rates = [
        {
            "rate_request_s": p.rate,
            "seed": p.seed,
            "met": p.met,
            **_seen(p),
            **{m: p.values[m] for m in metrics},
        }
        for p in points
    ]
    kv = [
        {f: getattr(r, f) for f in ("tokens", "blocks", "requests", "total_tokens", "bytes_per_token")}
        for r in plan.kv.rooms
    ]
    seeds = [
        {
            "settings": "measured" if found is capacity else "recommended",
            "seed": kept.seed,
            "capacity_request_s": kept.rate,
            "broken_request_s": broken.rate,
            "why_not": broken.why_not,
            "requests": len(kept.record.requests),
        }
        for found in (capacity, plan.improved)
        if found is not None
        for kept, broken in zip(found.kept, found.broken, strict=True)
    ]
    chosen = [{"setting": s.name, "value": str(s.value), "reason": s.reason} for s in plan.recommended]
    frames = {"plan": [one], "seeds": seeds, "rates": rates, "kv": kv, "settings": chosen}
    return {
        **{name: pd.DataFrame(rows) for name, rows in frames.items()},
        "validation": plan.validation.rows,
        "fleet": plan.fleet,
    }


def _seen(point: Point) -> dict[str, float | int | bool | None]:
    """What a run shows beside its latencies: its length, and whether what is asked for is also done."""
    judged = point.judged
    if judged is None:
        return {}
    system, queue = judged.backlog.system, judged.backlog.queue
    return {
        "requests": len(point.record.requests),
        "long_enough": point.long_enough,
        "offered_tok_s": judged.offered_tok_s,
        "generated_tok_s": judged.generated_tok_s,
        "sent_s": system.sent / system.seconds if system.seconds else None,
        "ended_s": system.ended / system.seconds if system.seconds else None,
        "judged_s": system.seconds,
        "queue_sent_s": queue.sent / queue.seconds if queue.seconds else None,
        "queue_admitted_s": queue.ended / queue.seconds if queue.seconds else None,
        "queue_judged_s": queue.seconds,
        "falls_behind": judged.falls_behind,
        "confirmed": point.confirmed,
    }
