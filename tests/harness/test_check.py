"""The child's side of the check; that it is asked before a run is a test of the command line."""

from __future__ import annotations

import importlib.util

import pytest

from harness import check
from harness.check import check_engines, errors

GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "seed": None, "ignore_eos": True}


def job(name, **settings):
    return {"engine": {"name": name, "attn_implementation": "sdpa", **settings}, "generation": GREEDY}


@pytest.mark.parametrize(
    "wrong, expected",
    [
        (job("ours", page_size=-4), "engine ours: page_size must be an integer >= 4, got -4"),
        (job("ours", scheduler_type="fifoo"), "scheduler_type must be one of fifo, prefill_first, got 'fifoo'"),
        (job("ours", safety_margin=1.5), "safety_margin must be a number >= 0 and <= 1 or None, got 1.5"),
        (job("static", wave=0), "engine static: engine.wave is 0: give at least 1 request"),
    ],
)
def test_a_wrong_setting(wrong, expected):
    (found,) = errors([job("static", wave=None), job("ours", page_size=16), wrong])
    assert expected in found


def test_a_package_that_is_not_there_is_named_before_anything_runs(monkeypatch):
    asked = job("vllm", model="m")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert errors([asked]) == ["engine vllm: it needs a package that is not installed: pip install vllm"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert errors([asked]) == []


def test_a_command_is_refused_only_if_every_job_would_fail(monkeypatch):
    good, bad = job("ours", num_blocks=32), job("ours", num_blocks=0)
    asked: list[dict[str, str]] = []

    monkeypatch.setattr(check, "ask", lambda module, jobs, env: asked.append(env) or errors(jobs))
    assert check_engines([good, good]) == []
    (found,) = check_engines([good, bad])
    assert "num_blocks must be an integer >= 1" in found
    assert len(check_engines([job("static"), bad])) == 1, "a job with nothing to ask is a good one"
    with pytest.raises(ValueError, match="num_blocks must be an integer >= 1"):
        check_engines([bad, bad])
    asked.clear()
    apart = job("vllm", model="m", env={"PYTHONPATH": "elsewhere"})
    assert len(check_engines([good, apart, good])) == (importlib.util.find_spec("vllm") is None)
    assert asked == [{}, {"PYTHONPATH": "elsewhere"}], "each in the environment in which it will run"


def test_nothing_wrong_and_nothing_to_ask(monkeypatch):
    assert errors([job("static", wave=2), job("ours"), job("transformers", page_size=16)]) == []

    def ask(*args):
        raise AssertionError("a process was started although no engine has a setting")

    monkeypatch.setattr(check, "ask", ask)
    check_engines([job("ours", page_size=None), job("static")])


def test_an_environment_in_which_nothing_starts_is_named():
    with pytest.raises(
        ValueError, match=r"could not be checked with engine\.env\.PYTHONHOME=/nonexistent: ModuleNotFoundError: "
    ):
        check_engines([job("ours", page_size=16, env={"PYTHONHOME": "/nonexistent"})])
