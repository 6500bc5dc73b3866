"""One job a GPU where several jobs run at once on one host.

Launchers that start jobs side by side (joblib, submitit on the local machine) know nothing of GPUs: two measurements
would share one. Each job therefore takes a GPU for itself, the one of its index if that is free, and sees no other. The
lock is the operating system's and ends with the process, so a job that was killed leaves nothing behind.

A batch system gives each job its own devices; where a job sees just one, there is nothing to take.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.5


def visible_gpus(environment: str | None, count: Callable[[], int]) -> list[str]:
    """GPUs this process may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    Args:
        environment: that variable; None = not set, then all of the machine's.
        count: how many the machine has; only asked if the variable is not set.
    """
    if environment is None:
        return [str(index) for index in range(count())]
    return [part.strip() for part in environment.split(",") if part.strip()]


def gpu_count() -> int:
    """GPUs of this machine by NVML; 0 where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def gpu_names() -> list[str]:
    """Names of this machine's GPUs by NVML; none where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(int(pynvml.nvmlDeviceGetCount()))]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []


@contextmanager
def own_gpu(
    index: int, gpus: Sequence[str], locks: Path, wait: Callable[[float], None] = time.sleep
) -> Iterator[str | None]:
    """Hold one of ``gpus`` and make it the only one that child processes see; None (and nothing changed) for fewer
    than two.

    Args:
        index: of the job; its GPU is the ``index``-th, counted round, or the next one that is free.
        locks: folder of this host with a lock file a GPU, shared by all jobs that must not meet.
        wait: called with seconds while all are taken.
    """
    if len(gpus) < 2:
        yield None
        return
    locks.mkdir(parents=True, exist_ok=True)
    preferred = [gpus[(index + k) % len(gpus)] for k in range(len(gpus))]
    lock, gpu = _take(preferred, locks, wait)
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = gpu
    try:
        yield gpu
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before
        lock.release()


def host_locks() -> Path:
    """The folder for :func:`own_gpu`: of this host and this user."""
    return Path(tempfile.gettempdir()) / f"cb-bench-gpus-{os.getuid()}"


def _take(gpus: Sequence[str], locks: Path, wait: Callable[[float], None]) -> tuple[FileLock, str]:
    while True:
        for gpu in gpus:
            lock = FileLock(locks / f"{gpu}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            return lock, gpu
        wait(_POLL_S)
