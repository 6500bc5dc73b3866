"""Measured processes on a GPU: forked from one server, each with a CUDA context and peaks of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from harness import forked
from harness.isolate import Limits, run_isolated
from harness.job import workload_of_iteration
from harness.plan import make_plan
from harness.store import read_result

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda:0"


def measured(folder: Path, *overrides: str) -> tuple[Mapping[str, Any], psutil.Process, set[str]]:
    """Row of one run, its server, and what that had open of the GPU while the run was measured."""
    common = ("model=tiny-llama", "workload.requests=4", f"measure.device={DEVICE}", "measure.calibrate=false")
    config = make_plan([*common, *overrides, f"results_dir={folder / 'unused'}"]).configs[0]
    groups = ("engine", "model", "arrival", "generation", "measure", "slo")
    spec = {group: config[group] for group in groups} | {"workload": workload_of_iteration(config, 0)}
    folder.mkdir()
    identity = {"run_id": folder.name, "engine": config["engine"]["name"], "process": folder.name}
    spec |= {"identity": identity, "command_line": [], "out": str(folder)}
    (folder / "job.json").write_text(json.dumps(spec))
    opened: set[str] = set()
    servers: list[psutil.Process] = []

    def look(message: Mapping[str, Any]) -> None:
        if message.get("phase") == "writing":
            servers.extend(psutil.Process().children())
            fds = Path(f"/proc/{servers[0].pid}/fd")
            opened.update(os.readlink(fd) for fd in fds.iterdir())

    run_isolated([folder / "job.json"], folder / "run.log", Limits(300, 100), look)
    (server,) = servers
    return read_result(folder, ("runs",))["runs"].iloc[0], server, {name for name in opened if "nvidia" in name}


def test_runs_of_one_server_each_use_the_gpu_and_have_peaks_of_their_own(tmp_path: Path) -> None:
    """A run with a large cache, then one with a small: anything carried over would show in its peaks."""
    forked.end_servers()
    large, server, opened = measured(tmp_path / "large", "engine=ours", "engine.num_blocks=131072")
    small, same_server, opened_later = measured(tmp_path / "small", "engine=ours", "engine.num_blocks=64")
    assert server == same_server
    assert opened == opened_later == set()
    assert large["process"] != small["process"]
    for row in (large, small):
        assert (row["status"], row["device"], row["n_ok"]) == ("ok", DEVICE, 4)
    assert 0 < small["peak_gpu_allocated_bytes"] < large["peak_gpu_allocated_bytes"] / 2
    assert 0 < small["peak_gpu_reserved_bytes"] < large["peak_gpu_reserved_bytes"]
    assert not server.children()
