"""``mode=pinned``: the baseline's derived values become overrides of every arm."""

from __future__ import annotations

import json

import pytest

from harness.pinning import overrides, resolve
from harness.plan import make_plan, pinned

RESOLVED = [
    ("page_size", 16, "default"),
    ("num_blocks", 120, "derived: fills 90% of 3 GiB free memory"),
    ("max_memory_percent", 0.9, "derived: device is cuda"),
    ("use_cuda_graph", [True, False], "derived: where the device can"),
    ("safety_margin", 0.15, "derived: default of scheduler_type=fifo"),
    ("max_requests_per_batch", 8, "user"),
    ("attention_backend", "sdpa", "derived: the model was loaded with it"),
]


def test_only_open_derived_settings_of_the_arm_arepinned():
    engine = dict.fromkeys(("page_size", "num_blocks", "max_memory_percent", "use_cuda_graph", "safety_margin"))
    config = {"engine": engine | {"name": "ours", "max_requests_per_batch": None}}
    # Not the default, not the user's, not what no key sets, not the budget beside what it sizes, not the variable.
    assert overrides(RESOLVED, config, ["engine.safety_margin"]) == (
        "engine.num_blocks=120",
        "engine.use_cuda_graph=[true,false]",
    )
    config["engine"]["num_blocks"] = 7
    assert overrides(RESOLVED, config, ["engine"])[0] == "engine.use_cuda_graph=[true,false]"
    assert overrides(RESOLVED, {"engine": {"name": "static"}}, ["engine"]) == ()


def test_a_scheduler_sweep_has_one_margin(tmp_path, monkeypatch, capsys):
    """M-fix-09: the margin's default goes with the scheduler, so it is pinned."""
    monkeypatch.chdir(tmp_path)
    sweep = ("-m", "engine=ours_small", "model=tiny-llama", "engine.scheduler_type=fifo,prefill_first")
    auto = make_plan(sweep)
    assert pinned(auto) is auto
    assert [c["engine"]["safety_margin"] for c in auto.configs] == [None, None]
    plan = pinned(make_plan([*sweep, "mode=pinned"]))
    assert "engine.safety_margin=0.15" in capsys.readouterr().out
    assert [c["engine"]["safety_margin"] for c in plan.configs] == [0.15, 0.15]
    assert [job.name.rpartition("-")[0] for job in plan.jobs] == [
        "0-engine.scheduler_type=fifo",
        "1-engine.scheduler_type=prefill_first",
    ]
    assert all("engine.safety_margin=0.15" in job.arguments for job in plan.jobs)


def test_pinning_needs_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="it needs a sweep whose jobs are known"):
        pinned(make_plan(["engine=ours_small", "mode=pinned"]))


def test_an_engine_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = json.loads(json.dumps(make_plan(["engine=ours_small", "model=tiny-llama"]).configs[0]))
    config["engine"]["num_blocks"] = 10**12
    with pytest.raises(ValueError, match=r"mode=pinned: the settings of the baseline .*num_blocks=1000000000000"):
        resolve(config)
