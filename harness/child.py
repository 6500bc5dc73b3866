"""The measured process: loads the model, starts and warms up the engine, measures its runs, writes their tables.

Started by :mod:`harness.isolate`, which has it forked after :func:`prepare`, as ``main([FD, SPEC, ...])``; reports over
the pipe ``FD``. Each specification is one run; all have the same engine, model, generation and measure, which the first
one gives. Between two runs the engine has nothing to do; a run that does not end well is the last one.
"""

from __future__ import annotations

import ctypes
import importlib
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

from harness.backends import GenerationSettings, create, needs_weights, uses_device
from harness.backends.settings import engine_settings
from harness.clock import Clock, RealClock
from harness.device import device_of
from harness.errors import one_line
from harness.interruption import RELAYED, take_relayed
from harness.journal import discard
from harness.measuring import Messages, Served, measure, process_facts
from harness.preparation import load_or_outline, warmup_of, workload_of
from harness.provenance import own_code_hash
from harness.record import Outcome, RunRecord
from harness.shared_prompts import refuse_shared_prompts

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while another wants it. Python's 5 ms would make the sender, which shares
the process with the engine, that late for a due time, and the stamps of tokens as coarse. The same for all engines.
"""

ABANDONED_LIMIT_S = 60.0
"""What a run whose parent is gone gets to write down what it measured."""

_OF_EVERY_RUN = (
    "torch",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "transformers.processing_utils",
    "harness.metrics",
    "harness.models",
    "harness.store",
)
"""What a run imports whatever its engine and its model are. Those are left to the run: measuring one engine must not
load another.
"""

_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def prepare() -> None:
    """Import what every run needs, once for all runs that are forked from this process.

    Raises:
        RuntimeError: an import has opened the GPU. A process forked from one that has cannot use it.
    """
    # transformers asks at import whether there is a GPU, and CUDA, asked, would be of no use to processes forked later.
    # NVML can answer as well, and can be left again.
    before = os.environ.get(_ASK_NVML)
    os.environ[_ASK_NVML] = "1"
    try:
        for name in _OF_EVERY_RUN:
            importlib.import_module(name)
    finally:
        if before is None:
            del os.environ[_ASK_NVML]
        else:
            os.environ[_ASK_NVML] = before
    with suppress(OSError):  # a machine without NVIDIA's driver has no such library
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        while nvml.nvmlShutdown() == 0:  # once for each time that it was asked
            pass
    import torch

    own_code_hash()  # of what has been imported now, whatever becomes of the files
    devices = _open_gpus()
    if torch.cuda.is_initialized() or devices:
        raise RuntimeError(f"an import has opened the GPU: no process forked from here could use it (open: {devices})")


def _open_gpus() -> list[str]:
    """NVIDIA's devices that this process has open: it or a library of it has initialised CUDA or NVML."""
    opened = Path("/proc/self/fd")
    if not opened.is_dir():
        return []
    links = [os.readlink(link) for link in opened.iterdir() if link.is_symlink()]
    return sorted({link for link in links if link.startswith("/dev/nvidia")})


class Report:
    """Messages to the parent, one JSON object a line.

    If the parent is gone (killed), nobody waits for this run any more and it must not keep a GPU busy. One that is
    measuring is interrupted, so that it writes down what it has; one that is writing ends with that; any other ends
    at once.

    Attributes:
        run: index of the run that the messages are about.
        abandoned: whether the parent is gone.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._phase = "starting"
        self.run = 0
        self.abandoned = False

    def send(self, **message: Any) -> None:
        data = json.dumps({"run": self.run, **message}).encode() + b"\n"
        with self._lock:
            if self.abandoned:
                return
            try:
                os.write(self._descriptor, data)
            except BrokenPipeError:
                self._abandon()

    def phase(self, name: str) -> None:
        print(f"== {name}", flush=True)
        self._phase = name
        self.send(phase=name)

    def _abandon(self) -> None:
        if self._phase not in ("measuring", "writing"):
            os._exit(1)
        self.abandoned = True
        end = threading.Timer(ABANDONED_LIMIT_S, os._exit, (1,))
        end.daemon = True
        end.start()
        if self._phase == "measuring":
            os.kill(os.getpid(), signal.SIGINT)  # reaches the main thread, which waits for the requests


def main(argv: Sequence[str]) -> int:
    """Entry point of the child; returns its exit code (errors are reported over the pipe and leave code 1)."""
    descriptor, *paths = argv
    os.set_inheritable(int(descriptor), False)  # what an engine starts must not keep the pipe open
    report = Report(int(descriptor))
    take_relayed()
    try:
        if not serve([json.loads(Path(path).read_text()) for path in paths], report, RealClock()):
            return 1
        report.phase("done")
        return 0
    except Exception as error:
        text = traceback.format_exc()
        report.send(error=one_line(error), traceback=text, status="failed")
        with suppress(OSError):  # the log is on the disk that may be full
            print(text, file=sys.stderr, flush=True)
        return 1


def serve(specs: Sequence[Mapping[str, Any]], report: Report, clock: Clock) -> bool:
    """Start the engine and measure one run after the other; whether all of them ended well.

    Raises:
        ValueError: a setting that cannot work, in one line.
    """
    first = specs[0]
    engine, settings = first["engine"]["name"], first["measure"]
    _prepare_process(settings)
    here, on_device = needs_weights(engine), uses_device(engine)
    device = device_of(settings["device"], on_device, here)
    free_at_start = device.free_bytes()

    report.phase("loading the model")
    began = time.perf_counter()
    loaded = load_or_outline(first, device.name)
    load_s = time.perf_counter() - began

    report.phase("building the workload")
    workloads = [workload_of(spec, loaded) for spec in specs]
    refuse_shared_prompts(workloads)

    report.phase("starting the engine")
    generation = GenerationSettings(**first["generation"])
    backend = create(engine, loaded.model, engine_settings(first["engine"]), generation, loaded.tokenizer)
    try:
        report.phase("warming up")
        began = time.perf_counter()
        backend.warm_up(warmup_of(workloads, settings, loaded))
        warmup_s = time.perf_counter() - began
        # After the engine has started: one that forks must not inherit it.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        facts = process_facts(engine, device if on_device else None, loaded.facts.as_dict())
        facts["memory.free_at_start_bytes"] = free_at_start
        served = Served(engine, backend, device, on_device, here, facts, load_s if here else None, warmup_s)
        messages = Messages(report.phase, report.send)
        for k, (spec, workload) in enumerate(zip(specs, workloads, strict=True)):
            report.run = k
            record = measure(served, spec, workload, messages, clock, earlier=k)
            if k == len(specs) - 1 or record.status != "ok":
                backend.stop()  # before the tables: what the engine holds is not needed any more
            if not _write(record, Path(spec["out"]), report) or report.abandoned:
                return False
        return True
    finally:
        backend.stop()


def _write(record: RunRecord, out: Path, report: Report) -> bool:
    """Write the tables of a run and tell the parent how it ended; whether it ended well."""
    # Nothing is left to interrupt but the writing of what is there.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in RELAYED.values()}
    report.phase("writing")
    from harness.metrics import compute_tables
    from harness.store import write_result

    if report.abandoned and record.status == "interrupted":
        ended = sum(r.outcome is not Outcome.UNFINISHED for r in record.requests)
        had = f"{ended} of {len(record.requests)} requests had ended"
        record.error = f"the command that started this run is gone; {had}"
    write_result(out, compute_tables(record))
    discard(out)
    if record.status != "ok":
        report.send(error=record.error, status=record.status, written=True)
        return False
    report.send(written=True)
    for number, handler in before.items():
        signal.signal(number, handler)
    return True


def _prepare_process(settings: Mapping[str, Any]) -> None:
    import numpy as np
    import torch

    if settings["torch_threads"] is not None:
        torch.set_num_threads(settings["torch_threads"])
    random.seed(settings["seed"])
    np.random.seed(settings["seed"])
    torch.manual_seed(settings["seed"])
