"""The device that a measured engine runs on: which it is, and what it holds.

Two ways to look at it: with torch, where the engine runs in this process, and from outside with NVML, where it runs in
one of its own. The second never initialises CUDA here: an engine that forks could not use it any more then, and this
process would have memory of its own on the GPU.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

from harness.gpus import VISIBLE, gpu_count, visible_gpus
from harness.nvml import NvmlGpu, visible_gpu
from harness.provenance import gpu_facts, torch_facts


class Device(Protocol):
    """What a measurement asks of it.

    Attributes:
        name: "cpu" or "cuda:N".
    """

    name: str

    def free_bytes(self) -> int | None:
        """Memory that anyone could take now; of the machine if it is a CPU. None = not readable."""

    def probe(self) -> NvmlGpu | None:
        """For telemetry; None on a CPU, or (said once, in the log) where NVML cannot be read."""

    def reset_peaks(self) -> None:
        """From here on peaks are those of what follows."""

    def peaks(self) -> dict[str, int | None]:
        """Columns of the runs table; {} where this process does not allocate on the device."""

    def facts(self) -> dict[str, Any]:
        """For the environment table."""


class HereDevice:
    """The device of an engine in this process, by torch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._cuda = name.startswith("cuda")

    def free_bytes(self) -> int | None:
        if not self._cuda:
            return _machine_free_bytes()
        import torch

        return int(torch.cuda.mem_get_info(self.name)[0])

    def probe(self) -> NvmlGpu | None:
        if not self._cuda:
            return None
        import torch

        return _readable(lambda: NvmlGpu(str(torch.cuda.get_device_properties(torch.device(self.name)).uuid)))

    def reset_peaks(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize(self.name)
            torch.cuda.reset_peak_memory_stats(self.name)

    def peaks(self) -> dict[str, int | None]:
        if not self._cuda:
            return {}
        import torch

        return {
            "peak_gpu_allocated_bytes": torch.cuda.max_memory_allocated(self.name),
            "peak_gpu_reserved_bytes": torch.cuda.max_memory_reserved(self.name),
        }

    def facts(self) -> dict[str, Any]:
        return torch_facts(self.name)


class OutsideDevice:
    """The device of an engine in another process of this machine, by NVML."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._index = int(name.partition(":")[2] or 0)

    def free_bytes(self) -> int | None:
        if self.name == "cpu":
            return _machine_free_bytes()
        gpu = self.probe()
        return None if gpu is None else gpu.free_bytes()

    def probe(self) -> NvmlGpu | None:
        return None if self.name == "cpu" else _readable(lambda: visible_gpu(self._index, own=_family()))

    def reset_peaks(self) -> None:
        """The other process keeps its own."""

    def peaks(self) -> dict[str, int | None]:
        return {}

    def facts(self) -> dict[str, Any]:
        if self.name == "cpu":
            return {}
        return {"device": self.name, **gpu_facts(lambda: visible_gpu(self._index, own=_family()))}


def device_of(wanted: str, uses_device: bool, here: bool) -> Device:
    """The device of a run.

    Args:
        wanted: ``measure.device``.
        uses_device: whether the engine runs on this machine's device at all; if not, it is the CPU.
        here: whether it does so in this process.
    """
    if not uses_device:
        return OutsideDevice("cpu")
    if here:
        return HereDevice(resolve_device(wanted))
    if wanted == "auto":
        return OutsideDevice("cuda:0" if gpu_count() and visible_gpus(os.environ.get(VISIBLE), gpu_count) else "cpu")
    return OutsideDevice("cuda:0" if wanted == "cuda" else wanted)


def resolve_device(device: str) -> str:
    """``auto`` becomes cuda:0 where torch finds one, else cpu; everything else is taken as it is."""
    import torch

    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if device == "cuda" else device


def _family() -> list[int]:
    """This process and all that it started."""
    import psutil

    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]


def _machine_free_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _readable(open_gpu: Any) -> NvmlGpu | None:
    try:
        gpu: NvmlGpu = open_gpu()
    except RuntimeError as error:
        print(f"GPU telemetry stays null: {error}", flush=True)
        return None
    return gpu
