"""Made-up runs, written as the harness writes them: no engine, no clock, the same every time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from harness.metrics import compute_tables
from harness.record import ConfigValue, Outcome, RequestRecord, RunRecord, TokenChunk
from harness.report import plots
from harness.report.plots.figure import texts_outside
from harness.slo import Slo
from harness.store import write_result
from harness.tables import TABLES

T0 = 7_000_000_000_000
_STEP_MS = {"static": 14.0, "ours": 9.0, "transformers": 12.0}


def make_record(
    run_id: str,
    engine: str = "ours",
    *,
    n: int = 24,
    speed: float = 1.0,
    failed_requests: int = 0,
    config: Mapping[str, Any] | None = None,
    steps: bool = True,
    gap_ms: float = 4.0,
    wait_ms: float = 3.0,
    **identity: Any,
) -> RunRecord:
    """A finished run of ``n`` requests, one every ``gap_ms``, each waiting ``wait_ms`` longer than the one before;
    larger ``speed`` is faster."""
    rng = np.random.default_rng(abs(hash_of(run_id)))
    step_ms = _STEP_MS[engine] / speed
    requests = []
    for i in range(n):
        due = 0 if engine == "static" else int(i * gap_ms * 1e6)
        first = due + int((60 + wait_ms * i + rng.gamma(2, 8)) * 1e6 / speed)
        gaps = rng.gamma(20, step_ms / 20, size=8 + int(rng.integers(0, 24)))
        gaps[rng.random(len(gaps)) < 0.05] *= 6
        times = [first, *(first + np.cumsum(gaps * 1e6).astype(int)).tolist()]
        bad = i < failed_requests
        requests.append(
            RequestRecord(
                f"q{i}",
                prompt_tokens=20 + 3 * i,
                max_new_tokens=64,
                t_sched_ns=T0 + due,
                t_submit_ns=T0 + due + 200_000,
                t_admit_ns=None if engine == "static" else T0 + due + int(5e6 * (1 + i / 6)),
                t_done_ns=T0 + times[-1],
                chunks=[] if bad else [TokenChunk(T0 + t, (i, j)[:1]) for j, t in enumerate(times)],
                outcome=Outcome.ENGINE_ERROR if bad else Outcome.OK_LENGTH,
                error="out of blocks <b>" if bad else None,
                padding_prompt_tokens=3 * (n - 1 - i) if engine == "static" else 0,
                padding_output_tokens=40 - len(times) if engine == "static" else 0,
            )
        )
    end = max(r.t_done_ns or 0 for r in requests)
    log: list[dict[str, Any]] = []
    if steps and engine == "ours":
        t = 0.0
        while t < (end - T0) / 1e6:
            prefill = t < 150 and len(log) % 3 == 0
            duration = float(step_ms * (2.5 if prefill else 1) * rng.uniform(0.9, 1.2))
            running = int(min(n, 4 + t / 12))
            log.append(
                {
                    "step": len(log),
                    "t_ns": T0 + int(t * 1e6),
                    "kind": "mixed" if prefill else "decode",
                    "running": running,
                    "waiting": max(0, n - running),
                    "free_blocks": 128 - 4 * running,
                    "step_ms": duration,
                }
            )
            t += duration
    values = {"page_size": 16, "dtype": "float32", **(config or {})}
    return RunRecord(
        {"run_id": run_id, "engine": engine, "model": "tiny", "device": "cpu", "workload_hash": "ab12", **identity},
        requests,
        t_start_ns=T0,
        t_end_ns=end,
        warmup_s=1.5,
        config=[ConfigValue(k, v, "derived: memory" if k == "num_blocks" else "user") for k, v in values.items()],
        environment={"torch": "2.13.0", "cpu.model": "test CPU", "command_line": ["cb-bench", "-m", "x=a b"]},
        steps=log,
        memory={"peak_rss_bytes": int(600 * 2**20 * (1 + 0.1 * speed))},
    )


def hash_of(text: str) -> int:
    """A number from a text that does not change from process to process, as ``hash`` does."""
    return int.from_bytes(text.encode(), "big") % 2**63


def write_records(directory: Path, records: Sequence[RunRecord], jobs: Sequence[Mapping[str, Any]] = ()) -> Path:
    """The tables of several runs joined in one directory, and the manifest's lines."""
    parts = [compute_tables(record) for record in records]
    joined = {name: pd.concat([p[name] for p in parts if len(p[name])] or [parts[0][name]]) for name in TABLES}
    write_result(directory, joined)
    if jobs:
        (directory / "manifest.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    return directory


def engine_sweep() -> tuple[list[RunRecord], list[dict[str, Any]]]:
    """Three engines, two workloads, three repeats; one engine fails on one workload."""
    records = []
    for workload, factor in (("uniform_burst", 1.0), ("mixed_staged", 0.8)):
        for repeat in range(3):
            for engine in ("static", "ours", "transformers"):
                identity = {
                    "experiment": "static_vs_continuous",
                    "variable": "engine",
                    "arm": engine,
                    "repeat": repeat,
                    "workload": workload,
                    "question": "What does continuous batching gain over padded static batching?",
                }
                run_id = f"{workload}-{engine}-{repeat}"
                if engine == "transformers" and workload == "mixed_staged":
                    failed = {"run_id": run_id, "engine": engine, "model": "tiny", "device": "cpu", **identity}
                    records.append(RunRecord(failed, status="failed", error="engine stopped: no blocks left"))
                    continue
                identity["tokens_match"] = None if engine == "static" else True
                settings = {"wave": 24} if engine == "static" else {"max_batch_tokens": 512, "num_blocks": 128}
                speed = factor * (1 + 0.03 * repeat)
                records.append(make_record(run_id, engine, speed=speed, config=settings, **identity))
    job = {
        "job": "7",
        "config_hash": "77",
        "overrides": ["engine=ours"],
        "state": "interrupted",
        "time": "t",
        "error": "^C",
    }
    return records, [job]


def numeric_sweep() -> list[RunRecord]:
    """One engine, four values of a setting, two repeats, and an arm that is no number."""
    records = []
    for repeat in range(2):
        for value, speed in ((256, 0.7), (1024, 1.2), (64, 0.4), (None, 1.1)):
            identity = {
                "experiment": "max_batch_tokens",
                "variable": "engine.max_batch_tokens",
                "arm": "auto" if value is None else value,
                "repeat": repeat,
                "workload": "staged",
            }
            settings = {"max_batch_tokens": value or 8192, "num_blocks": 100 + (value or 8192) // 16}
            run_id = f"mbt-{value}-{repeat}"
            records.append(make_record(run_id, speed=speed + 0.02 * repeat, config=settings, **identity))
    return records


def rate_sweep() -> list[RunRecord]:
    """Four rates, two repeats; from 20 requests/s on each request waits longer than the one before. With an SLO."""
    records = []
    for repeat in range(2):
        for rate, wait_ms in ((1, 0.0), (4, 0.0), (20, 60.0), (40, 90.0)):
            identity = {
                "experiment": "saturation",
                "variable": "arrival.rate",
                "arm": rate,
                "repeat": repeat,
                "workload": "staged",
                "config_hash": f"{rate:08x}",
            }
            record = make_record(f"rate-{rate}-{repeat}", n=60, gap_ms=1000 / rate, wait_ms=wait_ms, **identity)
            record.identity["workload_hash"] = f"at {rate}"
            record.memory |= {"weights_bytes": 3 << 30, "kv_cache_bytes": 2 << 30}
            record.slo = Slo("chat", ttft_p95_ms=500)
            records.append(record)
    return records


@pytest.fixture(autouse=True)
def _no_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever picture a test of this folder saves for a page, all its texts are inside."""
    real = plots.save

    def save(figure: Figure, directory: Path, name: str, caption: str) -> plots.Plot:
        plot = real(figure, directory, name, caption)
        assert texts_outside(figure) == [], name
        return plot

    monkeypatch.setattr(plots, "save", save)


@pytest.fixture
def record_maker() -> Callable[..., RunRecord]:
    return make_record


@pytest.fixture
def writer() -> Callable[..., Path]:
    return write_records


@pytest.fixture(scope="session")
def _sweeps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("results")
    records, jobs = engine_sweep()
    return {
        "engines": write_records(root / "engines", records, jobs),
        "numeric": write_records(root / "numeric", numeric_sweep()),
        "rates": write_records(root / "rates", rate_sweep()),
        "single": write_records(root / "single", [make_record("one", workload="staged", failed_requests=2)]),
    }


@pytest.fixture
def engines_dir(_sweeps: dict[str, Path]) -> Path:
    return _sweeps["engines"]


@pytest.fixture
def numeric_dir(_sweeps: dict[str, Path]) -> Path:
    return _sweeps["numeric"]


@pytest.fixture
def rates_dir(_sweeps: dict[str, Path]) -> Path:
    return _sweeps["rates"]


@pytest.fixture
def single_dir(_sweeps: dict[str, Path]) -> Path:
    return _sweeps["single"]
