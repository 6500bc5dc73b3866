"""One measured run on an engine that is warm: everything between "it stands still" and what was observed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import provenance
from harness.backends.base import Backend
from harness.calibration import calibrate
from harness.clock import Clock
from harness.device import Device
from harness.driver import Drive, drive
from harness.gc_log import GcLog
from harness.interruption import by
from harness.journal import Journal, Known
from harness.ledger import reconcile
from harness.machine_load import CpuReading, machine_load
from harness.record import ConfigValue, Outcome, RunRecord
from harness.recorder import Recorder
from harness.scope import outside_scope
from harness.slo import read_slo
from harness.telemetry import Telemetry
from harness.ticker import Ticker
from workloads.describe import describe
from workloads.workload import Workload


@dataclass(frozen=True)
class Served:
    """An engine that has been warmed up, and what is the same for every run on it.

    Attributes:
        device: of this machine; ``on_device`` whether the engine uses it.
        here: whether it runs in this process, so that peaks of this process are its own.
        facts: of the environment: software, source, machine, device and model.
        load_s: time to load the model; None where this process did not.
    """

    engine: str
    backend: Backend
    device: Device
    on_device: bool
    here: bool
    facts: Mapping[str, Any]
    load_s: float | None
    warmup_s: float


@dataclass(frozen=True)
class Messages:
    """How the parent is told."""

    phase: Callable[[str], None]
    counts: Callable[..., None]


def measure(
    served: Served, spec: Mapping[str, Any], workload: Workload, messages: Messages, clock: Clock, earlier: int
) -> RunRecord:
    """Send ``workload`` to the engine and return what was observed.

    Args:
        spec: ``identity``, the config groups (``workload``, ``arrival`` …) as plain values, ``command_line``, ``out``.
        earlier: runs that this process has measured before.

    Raises:
        SinkViolation: the backend broke its contract.
    """
    settings, backend, device = spec["measure"], served.backend, served.device
    identity = dict(spec["identity"]) | {
        "process": f"{spec['identity']['process']}-{os.getpid()}",
        "workload": workload.name,
        "workload_hash": workload.content_hash,
        "device": device.name if served.on_device else None,
        "n_requests": len(workload),
    }
    backend.prepare([r for r in workload.requests if not r.takes_answer])  # the others' prompts are not known yet
    calibration = None
    if settings["calibrate"] and not earlier:
        messages.phase("calibrating the harness")
        calibration = calibrate(clock).as_dict()
    recorder = Recorder(workload)
    config = backend.config()
    environment = {"command_line": list(spec["command_line"]), **served.facts, **_environment(spec, workload, config)}
    settled = [*config, *_harness_config(spec)]
    warmup_s = None if earlier else served.warmup_s
    load_s = None if earlier else served.load_s
    known = Known(identity, load_s, warmup_s, settled, environment, calibration)
    journal = Journal(Path(spec["out"]), known, recorder.records())
    telemetry = Telemetry(settings["telemetry_interval_ms"], device.probe(), clock)
    device.reset_peaks()
    # Objects of loading and warm-up live on; scanning them again would put pauses into the measured latencies.
    gc.collect()
    gc.freeze()
    free_before = device.free_bytes()
    messages.phase("measuring")
    ticker = Ticker(messages.counts, recorder, journal, telemetry)
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
    steps, counters, memory = backend.steps(), backend.counters(), backend.memory()
    if served.here:
        memory = memory | device.peaks() | {"peak_rss_bytes": telemetry.peak("rss_bytes")}
        if earlier:  # torch keeps what the runs before reserved, and no reset gives it back
            memory |= {name: None for name in memory if name == "peak_gpu_reserved_bytes"}
    if result.timed_out or result.interrupted is not None:
        backend.stop()  # ends what is open, as unfinished; the engine serves no further run
    recorder.check()
    environment = {
        **environment,
        **machine_load(cpu_before, cpu_after, os.cpu_count()),
        "memory.free_before_first_request_bytes": free_before,
    }
    if any(r.takes_answer for r in workload.requests):
        environment["workload.unseen_answers"] = result.unseen_answers
    record = RunRecord(
        identity=identity,
        requests=recorder.records(),
        t_start_ns=result.t_start_ns,
        t_end_ns=result.t_end_ns,
        load_s=load_s,
        warmup_s=warmup_s,
        config=settled,
        environment=environment,
        steps=steps,
        counters=counters,
        memory=memory | reconcile(memory, telemetry.peak("gpu_own_bytes")),
        measured_gaps=workload.measured_gaps,
        calibration=calibration,
        telemetry=telemetry.samples(result.t_start_ns),
        gc_pauses=collections.pauses(),
        slo=read_slo(spec["slo"]),
    )
    _judge(record, result, settings["timeout_s"])
    return record


def _harness_config(spec: Mapping[str, Any]) -> list[ConfigValue]:
    """Settings of the other groups, so that arms can be compared field by field from the tables alone."""
    return [
        ConfigValue(f"{group}.{key}", value, "config")
        for group in ("model", "arrival", "workload", "generation", "measure")
        for key, value in spec[group].items()
    ]


def _environment(spec: Mapping[str, Any], workload: Workload, config: Sequence[ConfigValue]) -> dict[str, Any]:
    prompts = {r.request_id: list(r.prompt_ids) for r in workload.requests}
    return {
        "config.resolved_sha256": provenance.digest({c.field: c.value for c in config}),
        "workload.spec": dict(workload.spec),
        "workload.description": describe(workload).as_dict(),
        "workload.prompt_tokens": workload.prompt_tokens,
        "workload.prompt_ids_sha256": provenance.digest(prompts),
        "seed.torch_numpy_random": spec["measure"]["seed"],
        "seed.generation": spec["generation"]["seed"],
    }


def process_facts(engine: str, device: Device | None, model: Mapping[str, Any]) -> dict[str, Any]:
    """The environment that all runs of a process share; asked for once the engine is warm.

    Args:
        device: that the engine runs on; None = none of this machine's.
    """
    facts = provenance.collect()
    if device is not None:
        facts |= device.facts()
    facts["outside_plan_scope"] = outside_scope(engine, None if device is None else device.name)
    facts |= {f"model.{key}": value for key, value in model.items()}
    return facts | {"setup_sha256": provenance.setup_hash(facts)}


def _judge(record: RunRecord, result: Drive, timeout_s: float) -> None:
    """Set the run's status: one without a single answered request is a failed one."""
    bad = [r for r in record.requests if not r.outcome.ok]
    still_open = sum(r.outcome is Outcome.UNFINISHED for r in bad)
    unfinished = f"{still_open} of {len(record.requests)} requests unfinished"
    if result.interrupted is not None:
        record.status = "interrupted"
        record.error = f"{by(result.interrupted)}: {unfinished}"
    elif result.timed_out:
        record.status = "timeout"
        record.error = f"{unfinished} after measure.timeout_s={timeout_s:g}"
    elif len(bad) == len(record.requests):
        cause = next((r.error for r in bad if r.error), None) or bad[0].outcome.value
        record.status = "failed"
        record.error = f"no request was answered; the first: {cause}"
