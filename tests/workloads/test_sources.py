"""Files and settings of a workload, looked at before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from workloads.build import check_sources
from workloads.traces import TraceError


def test_sources_are_looked_at_without_a_model(tmp_path: Path) -> None:
    """What needs no model is found before one is loaded; ids are checked against a vocabulary later."""
    burst = {"kind": "burst"}
    good = tmp_path / "prompts.jsonl"
    good.write_text('{"prompt": "some text"}\n{"prompt_ids": [1, 2, 99999999]}\n')
    check_sources({"kind": "prompts_file", "path": str(good)}, burst)
    good.write_text('{"prompt": 5}\n')
    with pytest.raises(TraceError, match=r"prompts.jsonl:1: "):
        check_sources({"kind": "prompts_file", "path": str(good)}, burst)
    with pytest.raises(ValueError, match=r"set workload\.path to a readable file"):
        check_sources({"kind": "trace", "format": "azure", "path": str(tmp_path / "none.csv")}, burst)
    with pytest.raises(ValueError, match="max_requests is -1"):
        check_sources({"kind": "trace", "format": "azure", "path": str(good), "max_requests": -1}, burst)
