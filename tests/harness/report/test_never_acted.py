"""A sweep whose variable never acted names no winner, and one whose variable may have acted does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.record import RunRecord
from harness.report.arms import group_arms
from harness.report.console import print_summary
from harness.report.html import write_report
from harness.report.never_acted import never_acted
from harness.report.read import read_results

QUIET = {"preemptions": 0, "offloads": 0, "held_steps": 0, "kv_blocks_free_min": 9, "kv_blocks_max": 4}
QUIET |= {"running_max": 3, "cached_tokens": 0, "chunked_requests": 0}


@pytest.fixture
def sweep(record_maker: Callable[..., RunRecord], writer: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A sweep of two values over one engine, with ``counts`` in every run and ``second`` in those of the second arm."""

    def write(name: str, values: tuple[Any, Any], second: dict[str, Any] | None = None, **settings: tuple) -> Path:
        directory = tmp_path / f"s{len(list(tmp_path.iterdir()))}"
        records = [
            record_maker(
                f"r{k}",
                variable=f"engine.{name}",
                arm=value,
                repeat=0,
                config={name: value, **{other: pair[k] for other, pair in settings.items()}},
            )
            for k, value in enumerate(values)
        ]
        writer(directory, records)
        runs = pd.read_parquet(directory / "runs.parquet").assign(**QUIET)
        for column, count in (second or {}).items():
            runs[column] = runs[column].astype("Int64" if column != "status" else "object")
            runs.loc[runs["run_id"] == "r1", column] = count
        runs.to_parquet(directory / "runs.parquet")
        steps = pd.read_parquet(directory / "steps.parquet").assign(decode_rows=3, prefill_tokens=20)
        steps.to_parquet(directory / "steps.parquet")
        return directory

    return write


def clauses(directory: Path) -> list[str]:
    results = read_results(directory)
    return [*never_acted(results, group_arms(results)).values()]


@pytest.mark.parametrize(
    ("name", "values", "telling", "unless"),
    [
        ("safety_margin", (0.0, 0.5), "held back or preempted", {"held_steps": 1}),
        ("num_blocks", (64, 128), "blocks for one more were always free", {"kv_blocks_free_min": 3}),
        ("cpu_offload_space", (0.0, 4.0), "no request was preempted or offloaded", {"preemptions": 2}),
        ("allow_block_sharing", (False, True), "no prompt token came from the prefix cache", {"cached_tokens": 16}),
        ("max_requests_per_batch", (4, 8), "no batch was full", {"running_max": 4}),
        ("max_batch_tokens", (24, 64), "no prompt was split and no step was full", {"chunked_requests": 1}),
    ],
)
def test_a_variable_that_never_acted_is_told_by_what_was_counted(
    sweep: Callable[..., Path], name: str, values: tuple[Any, Any], telling: str, unless: dict[str, Any]
) -> None:
    said = clauses(sweep(name, values))
    assert len(said) == 1
    assert said[0].startswith(f"{name} never acted: ")
    assert telling in said[0]
    assert clauses(sweep(name, values, unless)) == []
    assert clauses(sweep(name, values, dict.fromkeys(unless, pd.NA))) == []  # not known: nothing is said
    assert clauses(sweep(name, values, {"status": "failed"})) == []


def test_a_step_as_large_as_the_smallest_limit_may_have_been_cut_by_it(sweep: Callable[..., Path]) -> None:
    assert clauses(sweep("max_batch_tokens", (23, 64))) == []


def test_what_else_differs_must_not_have_acted_either(sweep: Callable[..., Path]) -> None:
    assert clauses(sweep("num_blocks", (64, 128), max_requests_per_batch=(4, 8)))
    assert clauses(sweep("num_blocks", (64, 128), max_requests_per_batch=(3, 8))) == []
    assert clauses(sweep("num_blocks", (64, 128), scheduler_type=("fifo", "prefill_first"))) == []


def test_other_variables_are_not_judged(sweep: Callable[..., Path]) -> None:
    assert clauses(sweep("page_size", (16, 32))) == []


def test_page_and_console_name_no_winner(sweep: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    clause = "safety_margin never acted: no request was held back or preempted in any arm"
    directory = sweep("safety_margin", (0.0, 0.5))
    text = write_report(directory).read_text(encoding="utf-8")
    assert f'<p class="headline">{clause}; the arms are the same settings in effect.</p>' in text
    assert f"<li>{clause}. What differs between the arms is chance, not an effect of it.</li>" in text
    assert "Highest throughput" not in text
    print_summary(directory)
    assert f"! {clause}." in capsys.readouterr().out
    acted = write_report(sweep("safety_margin", (0.0, 0.5), {"held_steps": 7})).read_text(encoding="utf-8")
    assert "Highest throughput" in acted
    assert "never acted" not in acted
