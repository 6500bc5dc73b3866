"""The summary table in a terminal and through a pipe."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from harness.report import print_summary
from harness.report.app import main
from harness.report.arms import group_arms
from harness.report.memory import ledger_lines
from harness.report.read import read_results


def test_pipe_is_plain_markdown_on_one_line_a_row(engines_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(engines_dir)
    text = capsys.readouterr().out
    assert "\x1b[" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 * (3 + 2)  # two workloads: three engines, header and rule
    ours = next(row for row in rows if row.startswith("|ours"))
    assert "×" in ours
    assert " yes|" in ours
    failed = [row for row in rows if row.startswith("|transformers")][1]
    assert "3 of 3 runs" in failed
    assert "3 of 18 runs did not end well" in text


def test_preempted_and_cached_are_shown_where_there_are_any(
    tmp_path: Path, record_maker: Callable, writer: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_maker(run_id="one", engine="ours")
    print_summary(writer(tmp_path / "none", [record]))
    assert "preempted" not in capsys.readouterr().out
    print_summary(writer(tmp_path / "some", [replace(record, counters={**record.counters, "preemptions": 7})]))
    header, _, row = (line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|"))
    at = [cell.strip() for cell in header].index("preempted")
    assert row[at].strip() == "7"


def test_terminal_is_styled_and_keeps_to_its_width(engines_dir: Path) -> None:
    out = io.StringIO()
    print_summary(engines_dir, Console(file=out, force_terminal=True, width=110, color_system="standard"))
    assert "\x1b[" in out.getvalue()


def test_a_narrow_terminal_has_fewer_columns_and_whole_numbers(engines_dir: Path) -> None:
    def shown(width: int) -> str:
        out = io.StringIO()
        print_summary(engines_dir, Console(file=out, force_terminal=True, width=width, color_system=None))
        return out.getvalue()

    narrow, wide = shown(84), shown(160)
    assert "…" not in narrow
    assert "Columns left out to fit 84 characters: e2e p50, peak " in narrow
    assert max(map(len, narrow.splitlines())) <= 84
    assert "left out" not in wide
    cell = next(line.split()[1] for line in wide.splitlines() if line.startswith(" ours"))
    assert cell in narrow


def test_lines_of_one_name_are_one_line(engines_dir: Path) -> None:
    results = read_results(engines_dir)
    runs = results.runs[results.runs["status"] == "ok"]["run_id"]
    names = ["weights", "weights_bytes"] * len(runs)  # of an earlier version and of this one
    ledger = pd.DataFrame([{"run_id": run, "line": name, "bytes": 7} for run, name in zip(runs, names, strict=False)])
    results = replace(results, tables={**results.tables, "memory_ledger": ledger})
    lines, _ = ledger_lines(results, group_arms(results))
    assert len(lines) > 1
    assert all(own == {"weights_bytes": 7} for own in lines.values())


def test_single_run_counts_its_failed_requests(single_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(single_dir)
    text = capsys.readouterr().out
    assert "2 of 24" in text
    assert "ratio" not in text  # nothing to compare with


def test_cb_report_prints_and_writes(single_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(single_dir)]) == 0
    assert capsys.readouterr().out.strip().endswith("report.html")
    assert main([str(single_dir), "--no-html"]) == 0
    assert "report.html" not in capsys.readouterr().out


def test_cb_report_says_in_one_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory, reason in ((tmp_path / "no", "is not a directory"), (tmp_path, "holds no results")):
        assert main([str(directory)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("cb-report: ")
        assert reason in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_several_sweeps_and_two_folders_are_refused(
    tmp_path: Path, record_maker: Callable, writer: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"job": "0", "config_hash": "h", "overrides": [], "state": "ok", "time": "t"}
    for stamp in ("1", "2"):
        writer(tmp_path / "sweeps" / "engine" / stamp, [record_maker(f"run{stamp}")], [job])
    for folder in (tmp_path, tmp_path / "sweeps", tmp_path / "sweeps" / "engine"):
        assert main([str(folder)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "is not one run or sweep but holds 2: name one of" in said
        assert str(Path("engine", "1")) in said
    assert main(["a", "b"]) == 2
    assert capsys.readouterr().err == "cb-report: name one folder; to compare two: cb-compare A B\n"


def test_only_percentiles_of_the_table_are_remarked_on(engines_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(engines_dir)
    said = capsys.readouterr().out
    few = "! p99 of ITL rests on fewer than 662 samples, with at most seven beyond it, and may be another next time: "
    assert few in said  # which arms: nothing is grey in a pipe
    assert "greyed" not in said
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    print_summary(engines_dir, console)
    assert "may be another next time: shown greyed." in console.file.getvalue()


def test_an_interrupted_run_is_not_called_failed(
    tmp_path: Path, record_maker: Callable, writer: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_maker("r", "ours", workload="w")
    record.status, record.error = "interrupted", "interrupted by Ctrl-C"
    print_summary(writer(tmp_path, [record]))
    said = capsys.readouterr().out
    assert "1 of 1 runs interrupted" in said
    assert "! 1 of 1 runs interrupted: no number holds such a run." in said
    assert "did not end well" not in said
