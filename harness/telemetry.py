"""Samples memory, clocks and power of the measured process and its GPU in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import psutil

from harness.clock import NS_PER_S, Clock, RealClock


class GpuProbe(Protocol):
    """Reads one GPU: columns ``gpu_*``, ``sm_clock_mhz``, ``power_w`` of the telemetry table (None = not readable)."""

    def sample(self) -> dict[str, float | int | None]: ...


class NvmlProbe:
    """NVML readings of one GPU.

    Args:
        uuid: the device's UUID as torch reports it (with or without the ``GPU-`` prefix), so that
            ``CUDA_VISIBLE_DEVICES`` cannot make it read a neighbour.

    Raises:
        RuntimeError: NVML or the device cannot be reached, with the reason.
    """

    def __init__(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise RuntimeError(f"NVML is not installed ({error}); install nvidia-ml-py for GPU telemetry") from error
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            full = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._device = pynvml.nvmlDeviceGetHandleByUUID(full)
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML cannot reach GPU {uuid}: {error}") from error

    def sample(self) -> dict[str, float | int | None]:
        nvml, device = self._nvml, self._device
        power_mw = self._read(lambda: nvml.nvmlDeviceGetPowerUsage(device))
        return {
            "gpu_used_bytes": self._read(lambda: int(nvml.nvmlDeviceGetMemoryInfo(device).used)),
            "gpu_util_percent": self._read(lambda: float(nvml.nvmlDeviceGetUtilizationRates(device).gpu)),
            "sm_clock_mhz": self._read(lambda: int(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))),
            "power_w": None if power_mw is None else power_mw / 1000,
        }

    def _read(self, reading: Callable[[], Any]) -> Any:
        try:
            return reading()
        except self._nvml.NVMLError:  # a quantity this board or driver does not report
            return None


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

    def samples(self, t_start_ns: int) -> list[dict[str, Any]]:
        """Rows of the telemetry table, ``t_s`` after ``t_start_ns`` (samples before it are dropped)."""
        return [{"t_s": (t_ns - t_start_ns) / NS_PER_S, **row} for t_ns, row in self._samples if t_ns >= t_start_ns]

    def _run(self) -> None:
        while True:
            last = self._stopped.is_set()
            row: dict[str, Any] = {"rss_bytes": int(self._process.memory_info().rss)}
            if self._gpu is not None:
                row |= self._gpu.sample()
            self._samples.append((self._clock.now_ns(), row))
            if last:
                return
            self._stopped.wait(self._interval_s)
