"""Engines and step-time models by hand, and result folders made of simulated runs that pass for measured ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from engine.cache import CacheLayout
from harness.metrics import compute_tables
from harness.record import ConfigValue, RunRecord
from harness.simulate import EngineSetup, StepTimeModel, simulate
from harness.simulate.step_time import KINDS, Cost, Residual
from harness.store import write_result
from harness.tables import TABLES
from workloads import build_workload
from workloads.arrivals import Poisson
from workloads.config import LengthConfig, SyntheticWorkload
from workloads.workload import ScheduledRequest, Workload


def make_setup(windows: tuple[int | None, ...] = (None, None), page_size: int = 4, **changes: Any) -> EngineSetup:
    """A small engine: 64 blocks of 4 tokens, 16 tokens a step, 8 places."""
    layout = CacheLayout.build(windows, page_size, 2, 8, 4)
    given = {"num_blocks": 64, "max_batch_tokens": 16, "max_requests_per_batch": 8, "safety_margin": 0.0}
    return EngineSetup(**{"layout": layout, **given, **changes})


def make_model(
    host: Cost | None = None, device: Cost | None = None, between: Cost | None = None, delivery_ms: float = 0.0
) -> StepTimeModel:
    """The same costs for every kind of step; 1 ms, 2 ms and half a ms if nothing is given."""
    host, device, between = host or Cost(1.0), device or Cost(2.0), between or Cost(0.5)
    largest = (10**6, 10**4, 10**8)
    residuals = tuple(Residual("device", str(kind), 99, 0.0, 0.0, 0.0, *largest) for kind in KINDS)
    costs = (dict.fromkeys(KINDS, host), dict.fromkeys(KINDS, device))
    return StepTimeModel(*costs, between, delivery_ms, residuals)


def make_workload(*requests: tuple[float, int, int], concurrency: int | None = None) -> Workload:
    """Requests of (due, prompt tokens, new tokens) that share no prefix."""
    rows = (ScheduledRequest(f"r{i}", due, (i + 1,) * n, new) for i, (due, n, new) in enumerate(requests))
    return Workload("by_hand", tuple(rows), concurrency)


TRUE = make_model(
    Cost(0.2, row_ms=0.01, ratios=(0.9, 1.0, 1.1)),
    Cost(2.0, (0.0,), (0.05,), key_ms=0.001, pair_ms=0.0005, ratios=(0.95, 1.0, 1.05)),
    Cost(0.1),
    0.3,
)
"""What the result folders below are made with."""

SETUP = make_setup(page_size=16, num_blocks=512, max_batch_tokens=256, max_requests_per_batch=64)


def as_measured(record: RunRecord, setup: EngineSetup, **identity: Any) -> RunRecord:
    """A simulated run in the clothes of a measured one."""
    layout = setup.layout
    extra = {
        "attention_backend": "sdpa",
        "q_padding_interval_size": 0,
        "kv_padding_interval_size": 0,
        "table_pages": setup.table_pages,
        "cache.windows": layout.windows,
        "cache.num_kv_heads": layout.num_kv_heads,
        "cache.head_dim": layout.head_dim,
        "cache.itemsize": layout.itemsize,
    }
    config = [*record.config, *(ConfigValue(name, value, "derived: by hand") for name, value in extra.items())]
    return replace(record, source="measured", config=config, identity=record.identity | identity)


def measured_folder(directory: Path, rates: tuple[float, ...] = (4.0, 10.0), setup: EngineSetup = SETUP) -> Path:
    """A sweep over the rate, each run of 60 requests with other prompts."""
    parts = []
    for i, rate in enumerate(rates):
        lengths = LengthConfig("uniform", low=8, high=120)
        synthetic = SyntheticWorkload(
            requests=60, prompt_tokens=lengths, output_tokens=LengthConfig("uniform", low=4, high=40)
        )
        workload = build_workload(synthetic, Poisson(rate), vocab_size=500, seed=i)
        record = simulate(workload, setup, TRUE, np.random.default_rng(i))
        identity = {
            "run_id": f"run{i}",
            "variable": "arrival.rate",
            "arm": str(rate),
            "model": "tiny",
            "device": "cpu",
            "workload_hash": workload.content_hash,
        }
        parts.append(compute_tables(as_measured(record, setup, **identity)))
    joined = {n: pd.concat([p[n] for p in parts if len(p[n])] or [parts[0][n]], ignore_index=True) for n in TABLES}
    write_result(directory, joined)
    return directory
