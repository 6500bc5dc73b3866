"""Every shipped experiment: what its head says is what it does, here and with the settings it names for a GPU."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from harness.estimate import History, PlannedRun, listing
from harness.plan import Plan, make_plan

FOLDER = Path(__file__).parents[2] / "sweeps" / "experiment"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
STAGES = {
    "1 of 4": {"auto_baseline", "static_vs_continuous", "peers", "quickstart", "backends"},
    "2 of 4": {"max_batch_tokens", "max_requests_per_batch"},
    "3 of 4": {"num_blocks", "max_memory_percent", "safety_margin", "page_size", "scheduler", "overload"},
    "after 3 of 4": {"saturation", "server_load"},
    "after 4 of 4": {"tune"},
    "4 of 4": {
        "cuda_graphs", "graphs_vs_async", "prefix_sharing", "cpu_offload", "compile_level", "decode_fast_path",
        "attention_backend",
    },
}  # fmt: skip
HEAD = ("Stage", "Question", "Variable", "Fixed", "Derived")
FEATURES = {"use_cuda_graph": False, "use_async_batching": False, "allow_block_sharing": False, "cpu_offload_space": 0}
OF_FEATURE = {
    "cuda_graphs": {"use_cuda_graph"},
    "graphs_vs_async": {"use_cuda_graph", "use_async_batching"},
    "prefix_sharing": {"allow_block_sharing"},
    "cpu_offload": {"cpu_offload_space"},
}
DEFAULTS = {
    "auto_baseline", "static_vs_continuous", "peers", "quickstart", "backends", "saturation", "server_load",
    "tune",
}  # fmt: skip
"""Those that compare whole engines, or measure one as it chooses by itself."""


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@cache
def plan_of(name: str) -> Plan:
    """Composed once for all tests of it."""
    return make_plan([f"experiment={name}"])


def head_of(name: str) -> dict[str, str]:
    """The paragraphs of a file's head by their first word."""
    found: dict[str, str] = {}
    key = ""
    for line in (FOLDER / f"{name}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        if start := re.match(r"# (\S.{9,10}?)\s+(?=\S)(.*)", line):
            key = start[1].strip()
            found[key] = start[2]
        elif key and line.strip("# "):
            found[key] += " " + line.strip("# ")
    return found


def test_the_stages_of_the_measurement_plan():
    assert set().union(*STAGES.values()) == set(NAMES)
    for stage, names in STAGES.items():
        for name in names:
            assert head_of(name)["Stage"].startswith(stage), name


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_composes_lists_its_runs_and_varies_what_it_says(name):
    head = head_of(name)
    assert all(head.get(key) for key in HEAD), head.keys()
    plan = plan_of(name)
    assert plan.multirun
    experiment = plan.jobs[0].config["experiment"]
    assert (experiment["name"], experiment["question"]) == (name, head["Question"])
    assert experiment["variable"] in head["Variable"] or experiment["variable"] == "engine"
    lines = listing([PlannedRun(j.name, j.config, "cuda") for j in plan.jobs], History({}, {}, {}, Path("results")))
    assert len(lines) == len(plan.jobs) + 1
    assert len({job.name for job in plan.jobs}) == len(plan.jobs)


@pytest.mark.parametrize("name", sorted(set(NAMES) - DEFAULTS))
def test_features_stay_off_but_for_the_one_that_is_asked_about(name):
    arms = [job.config["engine"] for job in plan_of(name).jobs]
    for feature, off in FEATURES.items():
        values = {str(arm[feature]) for arm in arms}
        if feature in OF_FEATURE.get(name, ()):
            assert len(values) > 1
        else:
            assert {str(off), str(float(off))} & values
            assert len(values) == 1
    for arm in arms:
        assert arm["num_blocks"] is None or arm["max_memory_percent"] is None
    if name == "scheduler":
        assert {arm["safety_margin"] for arm in arms} == {0.15}
    if name == "graphs_vs_async":
        assert [(a["use_cuda_graph"], a["use_async_batching"]) for a in arms] == [
            (False, False),
            (True, False),
            (True, True),
        ]


@pytest.mark.parametrize("name", [n for n in NAMES if "=" in head_of(n).get("On a GPU", "")])
def test_the_settings_for_a_gpu_compose(name):
    settings = shlex.split(head_of(name)["On a GPU"].split(";")[0])
    assert all("=" in setting for setting in settings)
    plan = make_plan([f"experiment={name}", *settings])
    assert plan.jobs[0].config["model"]["name"] == "qwen3-4b"
    assert all(job.config["workload"]["requests"] >= 100 for job in plan.jobs)


def test_an_slo_is_decided_before_the_margin_is_varied():
    for name in ("safety_margin", "scheduler", "saturation", "tune"):
        assert plan_of(name).jobs[0].config["slo"]["name"] != "none"


def test_the_readme_names_every_workload() -> None:
    table = (FOLDER.parents[1] / "README.md").read_text().partition("| `workload=` |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert {path.stem for path in (FOLDER.parent / "workload").glob("*.yaml")} <= named
