"""One GPU as NVML sees it: readings while something is measured, and facts about it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

# NVML's clocks-event (throttle) reasons. Idling and clocks that were asked for slow nothing down.
_REASONS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000010: "sync boost",
    0x0000000000000020: "software thermal",
    0x0000000000000040: "hardware thermal",
    0x0000000000000080: "power brake",
}

Value = float | int | str | None


class NvmlGpu:
    """NVML's view of one GPU. Whatever board or driver do not report is None.

    Args:
        uuid: the device's UUID as torch reports it (with or without the ``GPU-`` prefix), so that
            ``CUDA_VISIBLE_DEVICES`` cannot make it read a neighbour.
        nvml: the ``pynvml`` module; imported if None.

    Raises:
        RuntimeError: NVML or the device cannot be reached, with the reason.
    """

    def __init__(self, uuid: str, nvml: ModuleType | Any = None) -> None:
        nvml = _pynvml() if nvml is None else nvml
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            full = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._device = nvml.nvmlDeviceGetHandleByUUID(full)
        except nvml.NVMLError as error:
            raise RuntimeError(f"NVML cannot reach GPU {uuid}: {error}") from error

    def sample(self) -> dict[str, Value]:
        """Columns of the telemetry table."""
        nvml, device = self._nvml, self._device
        power_mw = self._read(lambda: nvml.nvmlDeviceGetPowerUsage(device))
        utilisation = self._read(lambda: nvml.nvmlDeviceGetUtilizationRates(device))
        return {
            "gpu_used_bytes": self._read(lambda: int(nvml.nvmlDeviceGetMemoryInfo(device).used)),
            "gpu_own_bytes": self._own_bytes(),
            "gpu_util_percent": None if utilisation is None else float(utilisation.gpu),
            "gpu_memory_util_percent": None if utilisation is None else float(utilisation.memory),
            "sm_clock_mhz": self._read(lambda: int(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))),
            "memory_clock_mhz": self._read(lambda: int(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM))),
            "power_w": None if power_mw is None else power_mw / 1000,
            "throttle": self._throttle(),
        }

    def facts(self) -> dict[str, Any]:
        """What stays the same while measuring, and who else is on the device now."""
        nvml, device = self._nvml, self._device
        limit_mw = self._read(lambda: nvml.nvmlDeviceGetPowerManagementLimit(device))
        mig = self._read(lambda: nvml.nvmlDeviceGetMigMode(device))
        return {
            "gpu.driver": self._read(nvml.nvmlSystemGetDriverVersion),
            "gpu.power_limit_w": None if limit_mw is None else limit_mw / 1000,
            "gpu.max_sm_clock_mhz": self._read(lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM)),
            "gpu.max_memory_clock_mhz": self._read(lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_MEM)),
            "gpu.application_sm_clock_mhz": self._read(
                lambda: nvml.nvmlDeviceGetApplicationsClock(device, nvml.NVML_CLOCK_SM)
            ),
            "gpu.mig": None if mig is None else bool(mig[0]),
            "gpu.ecc": self._read(lambda: bool(nvml.nvmlDeviceGetEccMode(device)[0])),
            "gpu.other_processes": self.other_processes(),
        }

    def other_processes(self) -> int | None:
        """How many processes beside this one use the device; None if NVML does not say.

        In a container NVML may name processes by ids of the host, so that this one is among them under another: then
        one of them is taken to be it.
        """
        running = self._read(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device))
        if running is None:
            return None
        others = [p for p in running if p.pid != os.getpid()]
        return len(others) if len(others) < len(running) else max(0, len(others) - 1)

    def _own_bytes(self) -> int | None:
        running = self._read(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device))
        own = [p.usedGpuMemory for p in running or () if p.pid == os.getpid()]
        return None if not own or own[0] is None else int(own[0])

    def _throttle(self) -> str | None:
        """What holds the clocks down now, names joined by commas; "" if nothing does."""
        mask = self._read(lambda: self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device))
        return None if mask is None else ", ".join(name for bit, name in _REASONS.items() if mask & bit)

    def _read(self, reading: Callable[[], Any]) -> Any:
        try:
            return reading()
        except (self._nvml.NVMLError, AttributeError):  # not reported by this board, driver or version of the binding
            return None


def _pynvml() -> ModuleType:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise RuntimeError(f"NVML is not installed ({error}); install nvidia-ml-py for GPU telemetry") from error
