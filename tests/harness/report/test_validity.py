"""Sentences on what a reader must know, each from made-up runs that have just that flaw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.record import Outcome, RunRecord
from harness.report.arms import group_arms
from harness.report.console import print_summary
from harness.report.html import write_report
from harness.report.read import read_results
from harness.report.validity import validity_notes


def notes(directory: Path) -> list[str]:
    results = read_results(directory)
    return validity_notes(results, group_arms(results))


@pytest.fixture
def two_arms(record_maker: Callable[..., RunRecord]) -> list[RunRecord]:
    return [record_maker(engine, engine, variable="engine", arm=engine, repeat=0) for engine in ("static", "ours")]


def test_arms_of_different_code(
    two_arms: list[RunRecord], tmp_path: Path, writer: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sha = "a" * 40
    clean = {"git.sha": sha, "git.dirty": False, "git.diff_sha256": None}
    changed = {"git.sha": sha, "git.dirty": True, "git.diff_sha256": "b" * 64}
    for record in two_arms:
        record.environment |= clean
    assert not any("different code" in line for line in notes(writer(tmp_path / "same", two_arms)))
    two_arms[1].environment |= changed
    directory = writer(tmp_path / "changed", two_arms)
    said = (
        "Arms measured with different code, which may be what makes them differ: aaaaaaaaaa: static; "
        "aaaaaaaaaa with local changes bbbbbbbb: ours."
    )
    assert said in notes(directory)
    print_summary(directory)
    assert f"! {said}" in capsys.readouterr().out
    assert said in write_report(directory).read_text(encoding="utf-8")
    for record in two_arms:  # not a checkout: nothing is known, nothing is said
        record.environment |= dict.fromkeys(clean)
    assert not any("different code" in line for line in notes(writer(tmp_path / "unknown", two_arms)))


def test_counts_that_cannot_be_true_are_counted(
    two_arms: list[RunRecord], tmp_path: Path, writer: Callable[..., Path]
) -> None:
    for request in two_arms[1].requests[:3]:
        assert request.outcome is Outcome.OK_LENGTH
        request.output_counted_by = "impossible"
    said = [line for line in notes(writer(tmp_path / "r", two_arms)) if "cannot be true" in line]
    assert len(said) == 1
    assert said[0].endswith("rates that need it are unknown: ours (3 of 24 requests).")
