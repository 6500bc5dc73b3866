"""One GPU as NVML sees it: readings while something is measured, and facts about it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from harness.gpus import VISIBLE, visible_gpus

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
        own: ids of the processes that are measured; None = this one.

    Raises:
        RuntimeError: NVML or the device cannot be reached, with the reason.
    """

    def __init__(self, uuid: str, nvml: ModuleType | Any = None, own: Collection[int] | None = None) -> None:
        nvml = _pynvml() if nvml is None else nvml
        self._nvml = nvml
        self._own = frozenset([os.getpid()] if own is None else own)
        try:
            nvml.nvmlInit()
            self.uuid = full = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._device = nvml.nvmlDeviceGetHandleByUUID(full)
        except nvml.NVMLError as error:
            raise RuntimeError(f"NVML cannot reach GPU {uuid}: {error}") from error

    def free_bytes(self) -> int | None:
        """Memory of the device that nobody uses."""
        free: int | None = self._read(lambda: int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).free))
        return free

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
            "gpu.name": self._read(lambda: _text(nvml.nvmlDeviceGetName(device))),
            "gpu.uuid": self.uuid.removeprefix("GPU-"),
            "gpu.memory_bytes": self._read(lambda: int(nvml.nvmlDeviceGetMemoryInfo(device).total)),
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
        """How many processes beside the measured ones use the device; None if NVML does not say.

        In a container NVML may name processes by ids of the host, so that a measured one is among them under another:
        then one of them is taken to be it.
        """
        running = self._read(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device))
        if running is None:
            return None
        others = [p for p in running if p.pid not in self._own]
        return len(others) if len(others) < len(running) else max(0, len(others) - 1)

    def _own_bytes(self) -> int | None:
        running = self._read(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device))
        own = [p.usedGpuMemory for p in running or () if p.pid in self._own]
        return None if not own or None in own else sum(map(int, own))

    def _throttle(self) -> str | None:
        """What holds the clocks down now, names joined by commas; "" if nothing does."""
        mask = self._read(lambda: self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device))
        return None if mask is None else ", ".join(name for bit, name in _REASONS.items() if mask & bit)

    def _read(self, reading: Callable[[], Any]) -> Any:
        try:
            return reading()
        except (self._nvml.NVMLError, AttributeError):  # not reported by this board, driver or version of the binding
            return None


def visible_gpu(index: int, own: Collection[int] | None = None) -> NvmlGpu:
    """The GPU that CUDA calls ``index`` in this process, found without CUDA.

    Numbers in ``CUDA_VISIBLE_DEVICES`` are taken as NVML's, which holds where all GPUs of a machine are alike.

    Raises:
        RuntimeError: NVML or the device cannot be reached.
    """
    nvml = _pynvml()
    try:
        nvml.nvmlInit()
        named = visible_gpus(os.environ.get(VISIBLE), lambda: int(nvml.nvmlDeviceGetCount()))
        if index >= len(named):
            raise RuntimeError(f"there is no GPU {index}: {VISIBLE} shows {len(named)}")
        name = named[index]
        uuid = _text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(name)))) if name.isdigit() else name
    except nvml.NVMLError as error:
        raise RuntimeError(f"NVML cannot reach GPU {index}: {error}") from error
    return NvmlGpu(uuid, nvml, own)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _pynvml() -> ModuleType:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise RuntimeError(f"NVML is not installed ({error}); install nvidia-ml-py for GPU telemetry") from error
