"""Where a number comes from: software, hardware, source revision and command line."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from harness.nvml import NvmlGpu

_PACKAGES = (
    "torch", "transformers", "numpy", "pandas", "pyarrow", "hydra-core", "flash-attn", "flash-attn-3", "triton", "gguf",
    "tokenizers", "safetensors", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-nccl-cu12", "nvidia-ml-py",
)  # fmt: skip
_PROJECT = Path(__file__).resolve().parent.parent
_RUNS = ("engine", "harness", "workloads", "sweeps")
_RUN_AS = (".py", ".yaml", ".json")


def collect() -> dict[str, Any]:
    """Software, source and machine as a flat mapping of JSON-able values (None = could not be determined)."""
    return software() | own_revision() | host()


def software() -> dict[str, Any]:
    """Python and the versions of the packages that shape a measurement; None = not installed."""
    facts: dict[str, Any] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[f"package.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[f"package.{package}"] = None
    return facts


def own_revision() -> dict[str, Any]:
    """:func:`source_revision` of this project, and the hash of its code."""
    return source_revision(_PROJECT) | {CODE_KEY: own_code_hash()}


@cache
def own_code_hash() -> str | None:
    """:func:`code_hash` of this project when it was first asked for in this process, or in the one that it was forked
    from: files that change later are not what it imported."""
    return code_hash(_PROJECT)


def code_hash(directory: Path) -> str | None:
    """SHA-256 over what runs of a project: its code and configs, tracked or not, without documents, results and tests.
    None if there is none."""
    files = sorted(
        path for part in _RUNS for path in (directory / part).rglob("*") if path.suffix in _RUN_AS and path.is_file()
    )
    if not files:
        return None
    return digest({str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files})


def source_revision(directory: Path) -> dict[str, Any]:
    """Git SHA of ``directory``, whether it has local changes, and their hash; None if it is not a checkout."""
    sha = _git(directory, "rev-parse", "HEAD")
    changes = _git(directory, "diff", "HEAD", "--no-ext-diff") if sha else None
    return {
        "git.sha": sha,
        "git.dirty": None if changes is None else bool(changes),
        "git.diff_sha256": hashlib.sha256(changes.encode()).hexdigest() if changes else None,
    }


CODE_KEY = "code.sha256"
REVISION_KEYS = ("git.sha", "git.dirty", "git.diff_sha256", CODE_KEY)


def code_names(revisions: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Names for people of what :func:`own_revision` found, each time: that of the first for all of equal code, though
    their documents may differ; None where it is not known."""
    names: list[str | None] = []
    told: list[tuple[Mapping[str, Any], str]] = []
    for facts in revisions:
        name = next((known for other, known in told if _same_code(facts, other)), None)
        if name is None and (name := _revision_name(facts)) is not None:
            if any(name == known for _, known in told):  # what git does not track, or calls equal
                name = f"{name} (code {str(facts.get(CODE_KEY))[:8]})"
            told.append((facts, name))
        names.append(name)
    return names


def _same_code(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """By the hash of the code; of a run that did not record it by its revision."""
    codes = (a.get(CODE_KEY), b.get(CODE_KEY))
    return codes[0] == codes[1] if all(codes) else _revision_name(a) == _revision_name(b)


def _revision_name(facts: Mapping[str, Any]) -> str | None:
    sha, diff, code = (facts.get(key) for key in ("git.sha", "git.diff_sha256", CODE_KEY))
    if not sha:
        return f"code {str(code)[:8]}" if code else None
    return f"{str(sha)[:10]} with local changes {str(diff)[:8]}" if diff else str(sha)[:10]


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
    # Where both know a fact it is torch's: memory by NVML counts what the driver keeps.
    return gpu_facts(lambda: NvmlGpu(str(properties.uuid))) | facts


def gpu_facts(open_gpu: Callable[[], NvmlGpu]) -> dict[str, Any]:
    """What NVML says of a GPU."""
    try:
        return open_gpu().facts()
    except RuntimeError as error:  # NVML is optional; its absence is itself a fact
        return {"gpu.nvml": f"not available: {error}"}


def digest(facts: Mapping[str, Any]) -> str:
    """SHA-256 of facts: equal where everything in them is."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def setup_hash(facts: Mapping[str, Any]) -> str:
    """:func:`digest` of what must be equal for two runs to have been measured under the same conditions: software,
    code and hardware, without what passes (load, free memory, the command, other processes)."""
    stable = ("package.", "python", "code.", "os", "cpu.", "memory.total", "env", "torch.", "gpu.", "device", "model.")
    passing = ("gpu.other_processes", "gpu.uuid")
    return digest({k: v for k, v in facts.items() if k.startswith(stable) and not k.startswith(passing)})


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
