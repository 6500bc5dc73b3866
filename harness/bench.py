"""What the harness itself costs and how exact it is, on this machine: ``python -m harness.bench``.

Each figure stands beside the value it has to reach on a quiet machine; the exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.backends.http.answer import AnswerReader
from harness.backends.http.events import EventParser
from harness.backends.null import NullSettings
from harness.calibration import judge, overhead_us_per_token, run_null
from harness.clock import RealClock
from harness.metrics import compute_tables
from harness.metrics.observations import observe
from harness.record import Outcome, RunRecord
from harness.recorder import Recorder
from harness.store import write_result
from workloads.workload import ScheduledRequest, Workload

SWITCH_INTERVAL_S = 0.0005  # as in the measured process


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: ``limit`` None = for information."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def missed(self) -> bool:
        return self.limit is not None and self.value > self.limit

    def __str__(self) -> str:
        aim = "" if self.limit is None else f"  at most {self.limit:g}: {'MISSED' if self.missed else 'ok'}"
        return f"{self.name:<52} {self.value:10.3f} {self.unit:<4}{aim}"


def schedule(seconds: float) -> list[Figure]:
    """Errors of a known schedule at 2,000 tokens/s: 100 requests at a time, a token every 50 ms each."""
    streams, itl_ms = 100, 50.0
    settings = NullSettings(ttft_ms=40.0, ttft_step_ms=1.0, itl_ms=itl_ms, itl_step_ms=0.0)
    tokens = round(seconds * 1000 / itl_ms)
    requests = tuple(ScheduledRequest(f"r{k}", k * itl_ms / 1000 / streams, (0,), tokens) for k in range(streams))
    cpu_before = time.process_time()
    record = run_null(Workload("schedule", requests), settings, RealClock())
    cpu_s = time.process_time() - cpu_before
    found = judge(record, settings, overhead_us_per_token())
    return [
        Figure("known schedule: rate", found.gen_tok_s, "tok/s"),
        Figure("known schedule: TTFT error, median", found.ttft_error_p50_ms, "ms", 0.2),
        Figure("known schedule: TTFT error, p99", found.ttft_error_p99_ms, "ms"),
        Figure("known schedule: ITL error, median", found.itl_error_p50_ms, "ms", 0.2),
        Figure("known schedule: ITL error, p99", found.itl_error_p99_ms, "ms"),
        Figure("recording a token, processor time", found.overhead_us_per_token, "µs", 20.0),
        Figure("sending, waiting, delivering and recording, a token", cpu_s / found.tokens * 1e6, "µs"),
    ]


def arrivals(n: int, per_s: float) -> list[Figure]:
    """Lag of ``n`` arrivals at a constant rate, each answered at once with one token.

    Lateness that adds up shows in the last of them and in the last tenth; one that passes (a pause of the machine, or
    of the process) shows in the 99th percentile, which is held to what makes a measured run doubtful.
    """
    requests = tuple(ScheduledRequest(f"r{k}", k / per_s, (0,), 1) for k in range(n))
    record = run_null(Workload("arrivals", requests), NullSettings(0.0, 0.0, 0.0, 0.0), RealClock())
    o = observe(record)
    lag_ms = (o.t_submit - o.t_sched) / 1e6
    tenth = max(1, n // 10)
    most = int(lag_ms.argmax())
    return [
        Figure(f"{n:,} arrivals at {per_s:g}/s: lag of the last", float(lag_ms[-1]), "ms", 1.0),
        Figure("  lag, median of the first tenth", float(np.median(lag_ms[:tenth])), "ms", 1.0),
        Figure("  lag, median of the last tenth", float(np.median(lag_ms[-tenth:])), "ms", 1.0),
        Figure("  lag, p99", float(np.percentile(lag_ms, 99)), "ms", 1.0),
        Figure(f"  lag, most (arrival {most:,})", float(lag_ms[most]), "ms"),
    ]


def storing(requests: int, tokens: int) -> list[Figure]:
    """From token events in memory to parquet and csv on disk."""
    scheduled = tuple(ScheduledRequest(f"request-{k}", 0.0, (0,), tokens) for k in range(requests))
    recorder = Recorder(Workload("storing", scheduled))
    before = _peak_mib()
    late = np.random.default_rng(0)
    for i in range(tokens):
        # Times as they come, to the ns: were all gaps alike, text and compression would have it easy.
        for r, own_ns in zip(scheduled, late.integers(0, 900_000, requests).tolist(), strict=True):
            recorder.on_tokens(r.request_id, (i,), 1_000_000 * (i + 1) + own_ns)
    for r in scheduled:
        recorder.sent(r.request_id, 0, 0)
        recorder.on_end(r.request_id, Outcome.OK_LENGTH, 1_000_000 * (tokens + 1))
    began, cpu_before = time.perf_counter(), time.process_time()
    identity = {"run_id": "20260101T000000-00000000-r0", "engine": "null"}
    record = RunRecord(identity, recorder.records(), t_start_ns=0, t_end_ns=1_000_000 * (tokens + 1))
    with tempfile.TemporaryDirectory() as folder:
        write_result(Path(folder) / "run", compute_tables(record))
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_before
        size_mib = sum(f.stat().st_size for f in (Path(folder) / "run").iterdir()) / 2**20
    million = f"{requests * tokens / 1e6:g} M token events"
    return [
        Figure(f"{million}: metrics and tables written", wall_s, "s", 2.0),
        Figure(f"{million}: processor time of that", cpu_s, "s"),
        Figure(f"{million}: memory from the first event on", _peak_mib() - before, "MiB", 300.0),
        Figure(f"{million}: size on disk", size_mib, "MiB", 300.0),
    ]


def http_client(tokens: int) -> list[Figure]:
    """Processor time to read one token of a server's stream, without the network."""
    chunk = {"id": "cmpl-0123456789", "object": "text_completion", "created": 0, "model": "m", "usage": None}
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "token_ids": [1234]}
    data = f"data: {json.dumps(chunk | {'choices': [choice]})}\n\n".encode()
    recorder = Recorder(Workload("http", (ScheduledRequest("r", 0.0, (0,), tokens),)))
    parser, reader = EventParser(), AnswerReader(tokens, running_usage=False)
    began = time.thread_time_ns()
    for _ in range(tokens):
        for event in parser.feed(data):
            found = reader.take(event)
            assert found is not None
            assert found.token_ids is not None
            recorder.on_tokens("r", found.token_ids, time.perf_counter_ns())
    cost_us = (time.thread_time_ns() - began) / tokens / 1000
    return [Figure("reading and recording a token of a server's stream", cost_us, "µs", 20.0)]


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Print every figure; 1 if one is missed."""
    parser = argparse.ArgumentParser(prog="python -m harness.bench", description="What the harness itself adds.")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the known schedule")
    parser.add_argument("--arrivals", type=int, default=10_000, help="arrivals of the drift test, at 2,000 a second")
    parser.add_argument("--events", type=int, default=1_000_000, help="token events to write")
    args = parser.parse_args(argv)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}: the limits are meant for a quiet machine")
    missed = False
    for part in (
        lambda: storing(1000, max(1, args.events // 1000)),  # first: memory has a high-water mark only
        lambda: schedule(args.seconds),
        lambda: arrivals(args.arrivals, 2000.0),
        lambda: http_client(20_000),
    ):
        for figure in part():
            print(figure, flush=True)
            missed |= figure.missed
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
