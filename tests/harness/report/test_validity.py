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
    for record in two_arms:  # only documents were changed
        record.environment["code.sha256"] = "c" * 64
    assert not any("different code" in line for line in notes(writer(tmp_path / "documents", two_arms)))
    for record in two_arms:  # not a checkout: nothing is known, nothing is said
        record.environment |= dict.fromkeys((*clean, "code.sha256"))
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


def test_what_holds_for_every_one_of_many_arms_is_not_listed_arm_by_arm(
    record_maker: Callable[..., RunRecord], tmp_path: Path, writer: Callable[..., Path]
) -> None:
    def busy(values: tuple[int, ...], others: dict[int, float]) -> list[str]:
        records = []
        for value in values:
            record = record_maker(f"run-{value}", variable="engine.page_size", arm=value, repeat=0)
            record.environment |= {"load.others_cores": others.get(value, 0.0), "load.cores": 2}
            records.append(record)
        name = f"{len(values)}-{len(others)}"
        return [line for line in notes(writer(tmp_path / name, records)) if "machine was busy" in line]

    many = (1, 2, 4, 8, 16)
    assert busy(many, {1: 0.6, 2: 1.7, 4: 0.8, 8: 0.9, 16: 1.0}) == [
        "The machine was busy while this was measured: all 5 arms, most of all page_size = 2 (others used 1.7 of 2 "
        "cores)."
    ]
    (some,) = busy(many, {1: 0.6, 16: 1.0})
    assert some.endswith(": page_size = 1 (others used 0.6 of 2 cores), page_size = 16 (others used 1.0 of 2 cores).")
    (few,) = busy(many[:2], {1: 0.6, 2: 1.0})
    assert "page_size = 1 (others" in few
    assert "page_size = 2 (others" in few
