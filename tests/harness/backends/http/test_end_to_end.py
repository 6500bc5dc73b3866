"""``cb-bench engine=openai_http`` in a process of its own, down to the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness.store import read_result

PROJECT = Path(__file__).resolve().parents[4]


def run(server, folder, *overrides):
    return subprocess.run(
        [
            sys.executable, "-m", "harness", "engine=openai_http", f"engine.base_url={server.base_url}",
            "model=tiny-llama", "workload.requests=4", "workload.prompt_tokens={kind:uniform,low:8,high:8}",
            "workload.output_tokens={kind:uniform,low:3,high:3}", "measure.warmup_requests=1", *overrides,
        ],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip


def test_a_server_is_measured_from_outside(server, Answer, text, usage, tmp_path):
    """Three tokens an answer, counted by the server only; one answer of four is refused."""
    refused = []

    def answer(body):
        if body["max_tokens"] == 3 and len(server.requests) == 4:
            refused.append(body)
            return Answer(status=503, body=b'{"error": "overloaded"}', content_type="application/json")
        words = [(0, text("a")), (0, text("b")), (0, text("c", "length"))]
        return Answer([*words, (0, {"choices": [], "usage": usage(8, 3)})])

    server.answer = answer
    done = run(server, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(refused) == 1
    (folder,) = (tmp_path / "results" / "runs").iterdir()
    tables = read_result(folder)
    row = tables["runs"].iloc[0]
    assert (row.status, row.n_ok, row.n_failed, json.loads(row.outcomes)) == (
        "ok", 3, 1, {"http_503": 1, "ok_length": 3},
    )  # fmt: skip
    assert (row.generated_tokens, row.prompt_tokens) == (9, 24)
    assert row.isna()[["device", "load_s"]].all()
    ok = tables["requests"][tables["requests"]["outcome"] == "ok_length"]
    assert set(ok["output_counted_by"]) == {"total"}
    assert (ok["prompt_tokens"] == ok["planned_prompt_tokens"]).all()
    assert tables["tokens"].shape[0] == 1  # of the refused one: none, and known to be none
    environment = dict(zip(tables["environment"]["key"], tables["environment"]["value"], strict=True))
    assert "over HTTP" in environment["outside_plan_scope"]
    assert (folder / "report.html").is_file()


def test_a_server_that_is_not_there_is_a_failed_row(server, tmp_path):
    server.close()
    done = run(server, tmp_path)
    assert done.returncode == 1
    (folder,) = (tmp_path / "results" / "runs").iterdir()
    row = read_result(folder)["runs"].iloc[0]
    assert (row.status, row.n_ok) == ("failed", 0)
    assert server.base_url in row.error
