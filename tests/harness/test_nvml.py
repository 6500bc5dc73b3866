"""NVML's readings, with a fake library in place of a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from harness.nvml import NvmlGpu


class FakeNvml:
    """The part of pynvml that is used; ``missing`` functions answer as a board that does not report them."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, mask: int = 0, processes: tuple = (), missing: tuple[str, ...] = ()) -> None:
        self.asked: list[str] = []
        answers = {
            "nvmlDeviceGetPowerUsage": 698_500,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=61),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=80 * 2**30),
            "nvmlDeviceGetCurrentClocksThrottleReasons": mask,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=p, usedGpuMemory=b) for p, b in processes],
            "nvmlDeviceGetPowerManagementLimit": 700_000,
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlSystemGetDriverVersion": "570.1",
        }
        for name, answer in answers.items():
            setattr(self, name, self._raising if name in missing else (lambda *a, answer=answer: answer))
        clocks = {1: 1980, 2: 3201}
        for name in ("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo"):
            setattr(self, name, lambda device, which: clocks[which])

    def _raising(self, *arguments):
        raise self.NVMLError("not supported")

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked.append(uuid)
        if "unknown" in uuid:
            raise self.NVMLError("not found")
        return "device"


def test_every_column_is_read():
    nvml = FakeNvml(mask=0x4 | 0x40, processes=((os.getpid(), 7 * 2**30), (1, 5)))
    sample = NvmlGpu("abc", nvml).sample()
    assert nvml.asked == ["GPU-abc"]
    assert sample == {
        "gpu_used_bytes": 80 * 2**30,
        "gpu_own_bytes": 7 * 2**30,
        "gpu_util_percent": 97.0,
        "gpu_memory_util_percent": 61.0,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "power_w": 698.5,
        "throttle": "power cap, hardware thermal",
    }


def test_idling_is_no_throttling():
    assert NvmlGpu("abc", FakeNvml(mask=0x1)).sample()["throttle"] == ""


def test_what_is_not_reported_is_null():
    missing = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetCurrentClocksThrottleReasons")
    sample = NvmlGpu("abc", FakeNvml(missing=missing)).sample()
    unknown = ("power_w", "gpu_util_percent", "gpu_memory_util_percent", "throttle", "gpu_own_bytes")
    assert all(sample[name] is None for name in unknown)
    assert sample["sm_clock_mhz"] == 1980


@pytest.mark.parametrize(
    "processes, others",
    [
        ((), 0),
        (((os.getpid(), 1),), 0),
        (((os.getpid(), 1), (4, 1)), 1),
        (((4, 1),), 0),  # in a container: this process by the host's id
        (((4, 1), (5, 1)), 1),
    ],
)
def test_other_processes_are_counted(processes, others):
    facts = NvmlGpu("abc", FakeNvml(processes=processes)).facts()
    assert facts["gpu.other_processes"] == others
    assert (facts["gpu.mig"], facts["gpu.driver"], facts["gpu.power_limit_w"]) == (False, "570.1", 700.0)
    assert facts["gpu.application_sm_clock_mhz"] is None  # the binding does not have it


def test_unreachable_is_one_reason(monkeypatch):
    with pytest.raises(RuntimeError, match="NVML cannot reach GPU unknown: not found"):
        NvmlGpu("unknown", FakeNvml())
    import pynvml

    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with pytest.raises(RuntimeError, match="NVML cannot reach GPU abc"):
        NvmlGpu("abc")
