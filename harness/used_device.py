"""Which kind of device the runs of a command would use here, as a run chooses it, without running it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from harness.apart import NoAnswer, answer, ask
from harness.gpus import VISIBLE, gpu_count, visible_gpus

CPU = "cpu"


def kind_of(device: str) -> str:
    """``cuda:1`` is of the kind cuda."""
    return device.partition(":")[0]


def used_kinds(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each config "cpu" or "cuda". Where a GPU may be used, a process of its own looks, because torch must be asked.

    Raises:
        ValueError: that process did not say.
    """
    kinds = [CPU] * len(configs)
    by_env: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        wanted, env = config["measure"]["device"], config["engine"].get("env") or {}
        if wanted != CPU and (wanted != "auto" or _sees_gpu(env)):
            by_env.setdefault(json.dumps(env, sort_keys=True), []).append(number)
    for env, numbers in by_env.items():
        jobs = [{"engine": configs[n]["engine"]["name"], "device": configs[n]["measure"]["device"]} for n in numbers]
        try:
            names = ask("harness.used_device", jobs, env=json.loads(env))
        except NoAnswer as error:
            raise ValueError(f"which device runs would use could not be found out: {error}") from error
        for number, name in zip(numbers, names, strict=True):
            kinds[number] = kind_of(name)
    return kinds


def _sees_gpu(env: Mapping[str, str]) -> bool:
    return bool(gpu_count() and visible_gpus({**os.environ, **env}.get(VISIBLE), gpu_count))


def names(jobs: Sequence[Mapping[str, str]]) -> list[str]:
    """The device of each job, given by the names of its engine and of the device it asks for. Loads torch."""
    from harness.backends import needs_weights, uses_device
    from harness.device import device_of

    return [device_of(job["device"], uses_device(job["engine"]), needs_weights(job["engine"])).name for job in jobs]


if __name__ == "__main__":
    raise SystemExit(answer(names))
