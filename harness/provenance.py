"""Where a number comes from: software, hardware, source revision and command line."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torch", "transformers", "numpy", "pandas", "pyarrow", "hydra-core", "flash-attn", "triton", "gguf")
_PROJECT = Path(__file__).resolve().parent.parent


def collect(command_line: Sequence[str], device: str | None) -> dict[str, Any]:
    """The environment of a run as a flat mapping of JSON-able values (None = could not be determined).

    Args:
        command_line: the command that repeats this run.
        device: "cpu" or "cuda[:n]"; None leaves torch alone (a parent that only writes a failed run's row).
    """
    facts: dict[str, Any] = {"command_line": list(command_line)}
    facts |= software()
    facts |= source_revision(_PROJECT)
    facts |= host()
    return facts if device is None else facts | torch_facts(device)


def software() -> dict[str, Any]:
    """Python and the versions of the packages that shape a measurement; None = not installed."""
    facts: dict[str, Any] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[f"package.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[f"package.{package}"] = None
    return facts


def source_revision(directory: Path) -> dict[str, Any]:
    """Git SHA of ``directory`` and whether it has local changes; None if it is not a checkout."""
    sha = _git(directory, "rev-parse", "HEAD")
    status = _git(directory, "status", "--porcelain", "--untracked-files=no") if sha else None
    return {"git.sha": sha, "git.dirty": None if status is None else bool(status)}


def host() -> dict[str, Any]:
    """Operating system, CPU and memory."""
    return {
        "os": platform.platform(),
        "cpu.model": _cpu_model(),
        "cpu.cores": psutil.cpu_count(logical=False),
        "cpu.threads_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory.total_bytes": psutil.virtual_memory().total,
        "env": {k: os.environ[k] for k in sorted(os.environ) if k in _ENVIRONMENT_KEYS},
    }


_ENVIRONMENT_KEYS = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_VISIBLE_DEVICES",
        "ENGINE_CHECK",
        "ENGINE_CACHE_DIR",
        "ENGINE_TUNE",
        "MKL_NUM_THREADS",
        "NVIDIA_TF32_OVERRIDE",
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    }
)


def torch_facts(device: str) -> dict[str, Any]:
    """Torch build and, on CUDA, the GPU, its limits and the driver."""
    import torch

    facts: dict[str, Any] = {
        "torch.threads": torch.get_num_threads(),
        "torch.cuda": torch.version.cuda,
        "torch.matmul_precision": torch.get_float32_matmul_precision(),
        "device": device,
    }
    if not device.startswith("cuda"):
        return facts
    properties = torch.cuda.get_device_properties(torch.device(device))
    facts |= {
        "torch.cudnn": torch.backends.cudnn.version(),
        "gpu.name": properties.name,
        "gpu.uuid": str(properties.uuid),
        "gpu.memory_bytes": properties.total_memory,
        "gpu.capability": f"{properties.major}.{properties.minor}",
        "gpu.count": torch.cuda.device_count(),
    }
    return facts | _nvml_facts(str(properties.uuid))


def _nvml_facts(uuid: str) -> dict[str, Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        return {
            "gpu.driver": pynvml.nvmlSystemGetDriverVersion(),
            "gpu.power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(device) / 1000,
            "gpu.max_sm_clock_mhz": pynvml.nvmlDeviceGetMaxClockInfo(device, pynvml.NVML_CLOCK_SM),
            "gpu.other_processes": [
                p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device) if p.pid != os.getpid()
            ],
        }
    except Exception as error:  # NVML is optional; its absence is itself a fact
        return {"gpu.nvml": f"not available: {error}"}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None
