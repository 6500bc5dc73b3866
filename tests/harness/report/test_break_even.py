"""When a longer warm-up pays, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.report.arms import group_arms
from harness.report.break_even import break_even_tokens, warm_up_section
from harness.report.read import read_results


@pytest.mark.parametrize(
    "arm, base, expected",
    [
        # 60 s more; a token takes 10 ms instead of 20: 60 / 0.010
        ((70.0, 100.0), (10.0, 50.0), 6000.0),
        ((70.0, 50.0), (10.0, 50.0), None),  # nothing is won
        ((70.0, 40.0), (10.0, 50.0), None),
        ((10.0, 100.0), (10.0, 50.0), 0.0),
        ((5.0, 40.0), (10.0, 50.0), None),  # sooner ready and slower: lost in the long run
    ],
)
def test_the_tokens_at_which_both_have_taken_the_same_time(arm, base, expected) -> None:
    tokens = break_even_tokens(*arm, *base)
    assert tokens == (expected if expected is None else pytest.approx(expected))
    if tokens:
        assert arm[0] + tokens / arm[1] == pytest.approx(base[0] + tokens / base[1])


def test_the_section(record_maker, writer, tmp_path: Path, numeric_dir: Path) -> None:
    records = []
    for level, speed, warmup in ((0, 1.0, 2.0), (2, 1.5, 40.0)):
        identity = {"variable": "engine.default_compile_level", "arm": level, "repeat": 0, "workload": "w"}
        record = record_maker(f"level-{level}", speed=speed, **identity)
        record.warmup_s = warmup
        records.append(record)
    text = warm_up_section(group_arms(read_results(writer(tmp_path / "r", records))))
    assert "<h2>Warm-up</h2>" in text
    assert "baseline" in text
    assert " tokens</td>" in text
    assert " min</td>" in text
    assert warm_up_section(group_arms(read_results(numeric_dir))) == ""  # the same warm-up in every arm


def test_arms_of_other_loads_are_not_judged_by_their_rates(record_maker, writer, tmp_path: Path) -> None:
    records = []
    for rate, warmup in ((5, 2.0), (50, 40.0)):
        record = record_maker(f"rate-{rate}", speed=rate / 5, variable="arrival.rate", arm=rate, repeat=0)
        record.warmup_s = warmup
        records.append(record)
    assert warm_up_section(group_arms(read_results(writer(tmp_path / "r", records)))) == ""
