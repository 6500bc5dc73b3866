"""The measured process: builds the workload, loads the model, warms up, measures, writes the tables.

Started by :mod:`harness.isolate` as ``python -m harness.child SPEC FD``; reports over the pipe ``FD``.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.clock import Clock, RealClock
from harness.driver import Drive, drive
from harness.errors import one_line
from harness.journal import Journal, Known, discard
from harness.preparation import load_or_outline, warmup_of, workload_of
from harness.record import ConfigValue, Outcome, RunRecord
from harness.recorder import Recorder
from harness.ticker import Ticker
from workloads.describe import describe
from workloads.workload import Workload

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while another wants it. Python's 5 ms would make the sender, which shares
the process with the engine, that late for a due time, and the stamps of tokens as coarse. The same for all engines.
"""


class Report:
    """Messages to the parent, one JSON object a line. If the parent is gone, this process ends itself."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                os.write(self._descriptor, data)
        except BrokenPipeError:
            os._exit(1)  # nobody waits for this run any more: do not keep a GPU busy for it

    def phase(self, name: str, **facts: Any) -> None:
        print(f"== {name}", flush=True)
        self.send(phase=name, **facts)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the child; returns its exit code (errors are reported over the pipe and leave code 1)."""
    spec_path, descriptor = argv if argv is not None else sys.argv[1:]
    report = Report(int(descriptor))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an ignored one would be inherited
    try:
        spec = json.loads(Path(spec_path).read_text())
        record = measure(spec, report, RealClock())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt but the writing of what is there
        report.phase("writing")
        from harness.metrics import compute_tables
        from harness.store import write_result

        write_result(Path(spec["out"]), compute_tables(record))
        discard(Path(spec["out"]))
        if record.status != "ok":
            report.send(error=record.error, status=record.status, written=True)
            return 1
        report.phase("done")
        return 0
    except Exception as error:
        text = traceback.format_exc()
        report.send(error=one_line(error), traceback=text, status="failed")
        with suppress(OSError):  # the log is on the disk that may be full
            print(text, file=sys.stderr, flush=True)
        return 1


def measure(spec: Mapping[str, Any], report: Report, clock: Clock) -> RunRecord:
    """Do everything a job specification says and return what was observed.

    Args:
        spec: ``identity``, the config groups (``engine``, ``model`` …) as plain values, and ``command_line``.

    Raises:
        ValueError: a setting that cannot work, in one line.
    """
    from harness.backends import GenerationSettings, create, needs_weights, uses_device
    from harness.calibration import calibrate
    from harness.config import engine_settings
    from harness.gc_log import GcLog
    from harness.ledger import reconcile
    from harness.load import CpuReading, machine_load
    from harness.slo import read_slo
    from harness.telemetry import Telemetry

    identity, settings = dict(spec["identity"]), spec["measure"]
    _prepare_process(settings)
    here = needs_weights(spec["engine"]["name"])
    on_device = uses_device(spec["engine"]["name"])
    device = resolve_device(settings["device"]) if on_device else "cpu"
    free_at_start = free_bytes(device)

    report.phase("loading the model")
    began = time.perf_counter()
    loaded = load_or_outline(spec, device)
    load_s = time.perf_counter() - began

    report.phase("building the workload")
    workload = workload_of(spec, loaded)
    identity |= {
        "workload": workload.name,
        "workload_hash": workload.content_hash,
        "device": device if on_device else None,
        "n_requests": len(workload),
    }

    report.phase("starting the engine")
    generation = GenerationSettings(**spec["generation"])
    backend = create(
        spec["engine"]["name"], loaded.model, engine_settings(spec["engine"]), generation, loaded.tokenizer
    )
    try:
        report.phase("warming up")
        began = time.perf_counter()
        backend.warm_up(warmup_of(workload, settings, loaded))
        warmup_s = time.perf_counter() - began
        backend.prepare([r for r in workload.requests if not r.takes_answer])  # the others' prompts are not known yet
        if settings["calibrate"]:
            report.phase("calibrating the harness")
        calibration = calibrate(clock).as_dict() if settings["calibrate"] else None

        recorder = Recorder(workload)
        config = backend.config()
        environment = _environment(spec, loaded, device if here else None, workload, config)
        environment["memory.free_at_start_bytes"] = free_at_start
        settled = [*config, *_harness_config(spec)]
        known = Known(identity, load_s if here else None, warmup_s, settled, environment, calibration)
        journal = Journal(Path(spec["out"]), known, recorder.records())
        telemetry = Telemetry(settings["telemetry_interval_ms"], _gpu_probe(device), clock)
        if here:
            _reset_peaks(device)
        # Objects of loading and warm-up live on; scanning them again would put pauses into the measured latencies.
        gc.collect()
        gc.freeze()
        free_before = free_bytes(device)
        report.phase("measuring")
        ticker = Ticker(report.send, recorder, journal, telemetry)
        collections = GcLog(clock)
        collections.start()
        telemetry.start()
        ticker.start()
        cpu_before = CpuReading.now(clock)
        try:
            result = drive(workload, backend, recorder, clock, settings["timeout_s"])
        finally:
            cpu_after = CpuReading.now(clock)
            collections.stop()
            telemetry.stop()
            ticker.stop()
        peaks = (_peaks(device) | {"peak_rss_bytes": telemetry.peak("rss_bytes")}) if here else {}
        steps, counters, memory = backend.steps(), backend.counters(), backend.memory()
    finally:
        backend.stop()
    recorder.check()
    record = RunRecord(
        identity=identity,
        requests=recorder.records(),
        t_start_ns=result.t_start_ns,
        t_end_ns=result.t_end_ns,
        load_s=load_s if here else None,
        warmup_s=warmup_s,
        config=settled,
        environment=environment
        | machine_load(cpu_before, cpu_after, os.cpu_count())
        | {"memory.free_before_first_request_bytes": free_before}
        | (
            {"workload.unseen_answers": result.unseen_answers} if any(r.takes_answer for r in workload.requests) else {}
        ),
        steps=steps,
        counters=counters,
        memory=memory | peaks | reconcile(memory | peaks, telemetry.peak("gpu_own_bytes")),
        calibration=calibration,
        telemetry=telemetry.samples(result.t_start_ns),
        gc_pauses=collections.pauses(),
        slo=read_slo(spec["slo"]),
    )
    _judge(record, result, settings["timeout_s"])
    return record


def resolve_device(device: str) -> str:
    """``auto`` becomes cuda:0 where torch finds one, else cpu; everything else is taken as it is."""
    import torch

    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if device == "cuda" else device


def _prepare_process(settings: Mapping[str, Any]) -> None:
    import numpy as np
    import torch

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if settings["torch_threads"] is not None:
        torch.set_num_threads(settings["torch_threads"])
    random.seed(settings["seed"])
    np.random.seed(settings["seed"])
    torch.manual_seed(settings["seed"])


def _gpu_probe(device: str) -> Any:
    """The NVML probe of a CUDA device; None on the CPU, or (said once, in the log) where NVML cannot be read."""
    if not device.startswith("cuda"):
        return None
    import torch

    from harness.nvml import NvmlGpu

    try:
        return NvmlGpu(str(torch.cuda.get_device_properties(torch.device(device)).uuid))
    except RuntimeError as error:
        print(f"GPU telemetry stays null: {error}", flush=True)
        return None


def _reset_peaks(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def _peaks(device: str) -> dict[str, int | None]:
    if not device.startswith("cuda"):
        return {}
    import torch

    return {
        "peak_gpu_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_gpu_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def _harness_config(spec: Mapping[str, Any]) -> list[ConfigValue]:
    """Settings of the other groups, so that arms can be compared field by field from the tables alone."""
    return [
        ConfigValue(f"{group}.{key}", value, "config")
        for group in ("model", "arrival", "workload", "generation", "measure")
        for key, value in spec[group].items()
    ]


def _environment(
    spec: Mapping[str, Any], loaded: Any, device: str | None, workload: Workload, config: Sequence[ConfigValue]
) -> dict[str, Any]:
    from harness import provenance
    from harness.scope import outside_scope

    facts = provenance.collect(spec["command_line"], device)
    facts["outside_plan_scope"] = outside_scope(spec["engine"]["name"], device)
    facts |= {f"model.{key}": value for key, value in loaded.facts.as_dict().items()}
    prompts = {r.request_id: list(r.prompt_ids) for r in workload.requests}
    return facts | {
        "setup_sha256": provenance.setup_hash(facts),
        "config.resolved_sha256": provenance.digest({c.field: c.value for c in config}),
        "workload.spec": dict(workload.spec),
        "workload.description": describe(workload).as_dict(),
        "workload.prompt_tokens": workload.prompt_tokens,
        "workload.prompt_ids_sha256": provenance.digest(prompts),
        "seed.torch_numpy_random": spec["measure"]["seed"],
        "seed.generation": spec["generation"]["seed"],
    }


def free_bytes(device: str) -> int:
    """Memory of ``device`` that anyone could take now; of the machine if it is a CPU."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _judge(record: RunRecord, result: Drive, timeout_s: float) -> None:
    """Set the run's status: an interrupted run, or one without a single answered request, is a failed one."""
    bad = [r for r in record.requests if not r.outcome.ok]
    still_open = sum(r.outcome is Outcome.UNFINISHED for r in bad)
    unfinished = f"{still_open} of {len(record.requests)} requests unfinished"
    if result.interrupted:
        record.status = "failed"
        record.error = f"interrupted: {unfinished}"
    elif result.timed_out:
        record.status = "timeout"
        record.error = f"{unfinished} after measure.timeout_s={timeout_s:g}"
    elif len(bad) == len(record.requests):
        cause = next((r.error for r in bad if r.error), None) or bad[0].outcome.value
        record.status = "failed"
        record.error = f"no request was answered; the first: {cause}"


if __name__ == "__main__":
    raise SystemExit(main())
