"""Files and settings of a workload, looked at before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from workloads.build import build_workload, check_sources
from workloads.traces import TraceError


def test_sources_are_looked_at_without_a_model(tmp_path: Path) -> None:
    """What needs no model is found before one is loaded; ids are checked against a vocabulary later."""
    burst = {"kind": "burst"}
    good = tmp_path / "prompts.jsonl"
    good.write_text('{"prompt": "some text"}\n{"prompt_ids": [1, 2, 99999999]}\n')
    check_sources({"kind": "prompts_file", "path": str(good)}, burst)
    with pytest.raises(TraceError, match="this model has no tokenizer"):
        check_sources({"kind": "prompts_file", "path": str(good)}, burst, takes_text=False)
    good.write_text('{"prompt": 5}\n')
    with pytest.raises(TraceError, match=r"prompts.jsonl:1: "):
        check_sources({"kind": "prompts_file", "path": str(good)}, burst)
    with pytest.raises(ValueError, match=r"set workload\.path to a readable file"):
        check_sources({"kind": "trace", "format": "azure", "path": str(tmp_path / "none.csv")}, burst)
    with pytest.raises(ValueError, match="max_requests is -1"):
        check_sources({"kind": "trace", "format": "azure", "path": str(good), "max_requests": -1}, burst)


def test_own_times_that_the_arrival_leaves_aside_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1, 2], "due_s": 0.5}\n{"prompt_ids": [3], "due_s": 2}\n')
    source = {"kind": "prompts_file", "path": str(path)}
    (note,) = check_sources(source, {"kind": "burst"})
    assert note == (
        f"{path}: due_s is not used, arrival=burst says when requests are sent: arrival=as_recorded uses it"
    )
    assert build_workload(source, {"kind": "burst"}, vocab_size=8, seed=0).notes == (note,)
    assert check_sources(source, {"kind": "as_recorded"}) == ()
    path.write_text('{"prompt_ids": [1, 2]}\n')
    assert check_sources(source, {"kind": "burst"}) == ()
