"""Jobs of a sweep side by side: each installed launcher really runs two, Slurm's by stand-ins of its commands."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from pathlib import Path

import pandas as pd
import pytest

from harness import manifest

pytestmark = pytest.mark.timeout(240)
SWEEP = (
    "-m", "engine=null", "engine.ttft_ms=1,2", "engine.itl_ms=1", "measure.calibrate=false",
    "measure.reference_engine=null", "hydra.sweep.dir=out",
)  # fmt: skip

# `sbatch` runs each job of the array at once, as `srun` on this machine; `sacct` says that they are done. What a
# cluster adds (queues, nodes, limits) is not there, but the script that submitit writes is read and carried out.
SBATCH = """#!/bin/bash
script="${@: -1}"
cp "$script" "$SCRIPTS"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for task in $(seq 0 "${last:-0}"); do  # in the background: submitit lays out the job after it was accepted
  SLURM_JOB_ID=7$task SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 \\
  SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NODELIST=here bash "$script" > /dev/null 2>&1 &
done
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in --output|--error|-o|-e) shift 2;; *) shift;; esac; done
exec "$@"
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
for task in 0 1; do
  state=RUNNING; [[ -e $RESULTS/7_$task/7_${task}_0_result.pkl ]] && state=COMPLETED
  echo "7_$task|$state|here"
done
"""


def needs(plugin: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(f"hydra_plugins.{plugin}") if importlib.util.find_spec("hydra_plugins") else None
    return pytest.mark.skipif(there is None, reason=f"the Hydra plugin {plugin} is not installed")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("joblib", "hydra.launcher.n_jobs=2"), marks=needs("hydra_joblib_launcher")),
        pytest.param(("submitit_local",), marks=needs("hydra_submitit_launcher")),
        pytest.param(
            ("ray", "+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.init.include_dashboard=false"),
            marks=needs("hydra_ray_launcher"),
        ),
    ],
    ids=lambda launcher: launcher[0],
)
def test_jobs_by_a_launcher(launcher, bench, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    name, *settings = launcher
    check(bench(*SWEEP, f"hydra/launcher={name}", *settings), tmp_path / "out")


@needs("hydra_submitit_launcher")
def test_jobs_by_slurm(bench, tmp_path, monkeypatch):
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        (commands / name).write_text(text)
        (commands / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SCRIPTS", str(tmp_path / "script.sh"))
    monkeypatch.setenv("RESULTS", str(tmp_path / "out" / ".submitit"))
    done = bench(
        *SWEEP, "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpus", "hydra.launcher.gpus_per_node=1"
    )
    check(done, tmp_path / "out")
    script = (tmp_path / "script.sh").read_text()
    for line in ("#SBATCH --array=0-1", "#SBATCH --partition=gpus", "#SBATCH --gpus-per-node=1"):
        assert line in script
    assert sys.executable in script


def check(done, out: Path) -> None:
    """Both jobs ended well in the planned folders, and their tables were joined."""
    assert done.returncode == 0, done.stderr
    states = manifest.latest(out)
    assert [(s.state, s.position) for s in states] == [("ok", 0), ("ok", 1)]
    assert all((out / s.job / "runs.parquet").is_file() for s in states)
    runs = pd.read_parquet(out / "runs.parquet")
    assert list(runs["arm"]) == ["1.0", "2.0"]
    assert runs["n_ok"].tolist() == [6, 6]
    assert runs["run_id"].str.contains("-000-").tolist() == [True, False]
