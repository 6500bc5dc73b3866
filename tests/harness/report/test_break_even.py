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


def levels(record_maker, writer, folder: Path, starts: dict[int, tuple[float, ...]]) -> str:
    """The section of two compile levels, the second one faster; a warm-up a repeat."""
    records = []
    for level, warmups in starts.items():
        for repeat, warmup in enumerate(warmups):
            identity = {"variable": "engine.default_compile_level", "arm": level, "repeat": repeat, "workload": "w"}
            record = record_maker(f"level-{level}-{repeat}", speed=1 + level / 4, **identity)
            record.warmup_s = warmup
            records.append(record)
    return warm_up_section(group_arms(read_results(writer(folder, records))))


def test_the_section(record_maker, writer, tmp_path: Path, numeric_dir: Path) -> None:
    text = levels(record_maker, writer, tmp_path / "r", {0: (2.0, 2.0), 2: (40.0, 40.0)})
    assert "<h2>Warm-up</h2>" in text
    assert "baseline" in text
    assert " tokens</td>" in text
    assert " min</td>" in text
    assert warm_up_section(group_arms(read_results(numeric_dir))) == ""  # the same warm-up in every arm


def test_a_cold_first_start_is_not_charged_to_its_arm(record_maker, writer, tmp_path: Path) -> None:
    # 31 s compiling what the others find on the disk: without it the baseline is the sooner one
    text = levels(record_maker, writer, tmp_path / "cold", {0: (31.0, 2.0, 2.5, 2.0), 2: (6.0, 5.0, 5.5, 5.0)})
    assert "<td>31</td><td>2 (3)</td>" in text  # shown, and left out
    assert "<td>6</td><td>5 (3)</td>" in text
    assert " tokens</td>" in text
    assert "the first start of each arm is left out" in text
    alike = {0: (31.0, 2.0, 2.0), 2: (6.0, 2.1, 2.0)}
    assert levels(record_maker, writer, tmp_path / "alike", alike) == ""  # only the first starts differed


def test_one_start_an_arm_says_nothing_of_what_pays(record_maker, writer, tmp_path: Path) -> None:
    assert levels(record_maker, writer, tmp_path / "none", {0: (2.0,), 2: (40.0, 30.0)}) == ""  # unknown in all
    text = levels(record_maker, writer, tmp_path / "r", {0: (2.0, 2.0), 1: (20.0,), 2: (40.0, 30.0)})
    assert "<td>20</td><td>–</td>" in text
    assert "<td>unknown</td>" in text
    assert text.count(" tokens</td>") == 1
    assert "Unknown after one start" in text


def test_arms_of_other_loads_are_not_judged_by_their_rates(record_maker, writer, tmp_path: Path) -> None:
    records = []
    for rate, warmup in ((5, 2.0), (50, 40.0)):
        record = record_maker(f"rate-{rate}", speed=rate / 5, variable="arrival.rate", arm=rate, repeat=0)
        record.warmup_s = warmup
        records.append(record)
    assert warm_up_section(group_arms(read_results(writer(tmp_path / "r", records)))) == ""
