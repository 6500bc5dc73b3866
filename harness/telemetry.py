"""Samples memory, clocks and power of the measured process and its GPU in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import psutil

from harness.clock import NS_PER_S, Clock, RealClock


class GpuProbe(Protocol):
    """Reads one GPU: its columns of the telemetry table, None = not readable (:class:`harness.nvml.NvmlGpu`)."""

    def sample(self) -> Mapping[str, float | int | str | None]: ...


class Telemetry:
    """Samples every ``interval_ms`` between :meth:`start` and :meth:`stop`.

    Args:
        interval_ms: time between samples, > 0.
        gpu: probe of the GPU; None on a CPU run (its columns are then null).
        clock: stamps the samples.
    """

    def __init__(self, interval_ms: float, gpu: GpuProbe | None, clock: Clock | None = None) -> None:
        if interval_ms <= 0:
            raise ValueError(f"measure.telemetry_interval_ms must be above 0, got {interval_ms}")
        self._interval_s = interval_ms / 1000
        self._gpu = gpu
        self._clock = clock or RealClock()
        self._process = psutil.Process()
        self._samples: list[tuple[int, dict[str, Any]]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread."""
        self._stopped.set()
        self._thread.join()

    def peak(self, column: str) -> int | None:
        """Largest sampled value of a column; None if it was never readable."""
        known = [row[column] for _, row in self._samples if row.get(column) is not None]
        return max(known) if known else None

    def samples(self, t_start_ns: int) -> list[dict[str, Any]]:
        """Rows of the telemetry table, ``t_s`` after ``t_start_ns`` (samples before it are dropped)."""
        return [{"t_s": (t_ns - t_start_ns) / NS_PER_S, **row} for t_ns, row in self._samples if t_ns >= t_start_ns]

    def since(self, n: int) -> list[tuple[int, dict[str, Any]]]:
        """The samples after the first ``n``, each with its time in ``perf_counter_ns``."""
        return self._samples[n:]

    def _run(self) -> None:
        while True:
            last = self._stopped.is_set()
            row: dict[str, Any] = {"rss_bytes": int(self._process.memory_info().rss)}
            if self._gpu is not None:
                row.update(self._gpu.sample())
            self._samples.append((self._clock.now_ns(), row))
            if last:
                return
            self._stopped.wait(self._interval_s)
