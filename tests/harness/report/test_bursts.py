"""A burst that met a running engine is named, with what the first step had of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.report.arms import group_arms
from harness.report.bursts import split_bursts
from harness.report.read import read_results


@pytest.mark.parametrize(
    ("running", "waiting", "gap_ms", "shown"),
    [
        (9, 3, 0.0, "ours (12 of 24)"),
        (9, 15, 0.0, None),  # all were there; how many a step takes is the scheduler's choice
        (9, None, 0.0, None),  # the engine does not tell
        (1, 0, 4.0, None),  # no burst
    ],
)
def test_the_first_step_of_a_burst(
    running: int,
    waiting: int | None,
    gap_ms: float,
    shown: str | None,
    tmp_path: Path,
    record_maker: Callable,
    writer: Callable,
) -> None:
    record = record_maker("r", "ours", workload="w", gap_ms=gap_ms)
    record.steps[0] |= {"running": running, "waiting": waiting}
    results = read_results(writer(tmp_path, [record]))
    said = split_bursts(results, group_arms(results))
    assert len(said) == (shown is not None)
    if shown:
        assert f": {shown}. " in said[0]


def test_of_repeats_the_worst_and_how_many(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    records = []
    for repeat, known in enumerate((12, 24, 7)):
        record = record_maker(f"r{repeat}", "ours", workload="w", gap_ms=0.0, repeat=repeat)
        record.steps[0] |= {"running": known, "waiting": 0}
        records.append(record)
    results = read_results(writer(tmp_path, records))
    (said,) = split_bursts(results, group_arms(results))
    assert "ours (at the fewest 7 of 24 in 2 of 3 runs)" in said
