"""``cb-workload``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.workload_app import _shown, main
from workloads.describe import LengthSummary

TINY = ("model=tiny-llama", "measure.seed=0")


def test_describe_prints_numbers_and_draws(tmp_path, capsys):
    code = main(["describe", "workload=mixed_staged", "arrival=gamma", "arrival.cv=3", *TINY, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert code == 0
    assert "requests   32" in out
    assert "gaps with CV" in out
    assert "at block size 16" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"{name}.{kind}" for name in ("lengths", "prefix_reuse", "rate") for kind in ("png", "svg")
    ]
    for picture in tmp_path.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 5000


def test_json_is_only_json(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["describe", "workload=sessions", "workload.sessions=3", *TINY, "--json", "--no-plots"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["sessions"] == 3
    assert described["rate_request_s"] is None  # turns wait for answers
    assert described["prefix_reuse"]["16"] > 0.3
    assert list(tmp_path.iterdir()) == []


def test_plots_have_a_folder_of_their_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["describe", "workload=quickstart", "workload.requests=4", *TINY]) == 0
    (folder,) = (tmp_path / "results" / "workloads").iterdir()
    assert folder.name.startswith("quickstart-")
    assert sorted(p.stem for p in folder.glob("*.svg")) == ["lengths", "prefix_reuse"]  # a burst has no rate


def test_notes_of_a_file_are_shown(tmp_path, capsys):
    trace = tmp_path / "own.jsonl"
    trace.write_text(
        '{"due_s": 1, "prompt_tokens": 4, "output_tokens": 2}\n' * 2
        + '{"due_s": 0, "prompt_tokens": 0, "output_tokens": 2}'
    )
    assert main(["describe", "workload=own_trace", f"workload.path={trace}", *TINY, "--no-plots"]) == 0
    out, error = capsys.readouterr()
    assert error == "cb-workload: reading the vocabulary of tiny-llama, some seconds\n"  # notes: in the description
    assert f"note       {trace}: 1 of 3 rows are left out" in out
    assert f"note       {trace}: 1 of 3 rows stand after a later one" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["workload=mixed_stagd"], "Did you mean 'mixed_staged'?"),
        (["workload.request=3"], "Did you mean 'workload.requests'?"),
        (["workload=azure_2023"], "workload.path is not set"),
        (["workload=servegen"], "give the folder of a ServeGen pool"),
        (["arrival=gamma", "arrival.cv=-1"], "arrival.cv is -1"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert main(["describe", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cb-workload: ")
    assert message in error
    assert error.count("\n") == 1


def test_lengths_needs_a_tokenizer(tmp_path, capsys):
    (tmp_path / "s.json").write_text("[]")
    assert main(["lengths", str(tmp_path / "s.json"), str(tmp_path / "out.csv"), "model=tiny-llama"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    assert not Path(tmp_path / "out.csv").exists()


@pytest.mark.parametrize("tokens, shown", [(4.5, "4.5"), (4.0, "4"), (1234.25, "1,234.2"), (100.0, "100")])
def test_a_percentile_between_two_lengths_is_not_rounded_to_one_of_them(tokens, shown):
    lengths = LengthSummary(total=9, mean=4.5, p50=tokens, p95=5.0, max=5)
    assert f"p50 {shown}, p95 5, max 5, mean 4.5, 9 tokens" in _shown(lengths)
