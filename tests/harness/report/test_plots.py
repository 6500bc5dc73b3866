"""What can be read off the plots: names that cover no other, values as they are written, no step at the axis."""

from __future__ import annotations

import re
import shutil
from itertools import combinations
from pathlib import Path

import pandas as pd

from harness.report import plots
from harness.report.arms import group_arms
from harness.report.plots.figure import annotate_apart, look, new_figure, save
from harness.report.read import read_results


def test_names_of_points_cover_no_other() -> None:
    points = [("one point", (1.0, 1.0)), *((f"close to it {k}", (1.0 + k / 1000, 1.0)) for k in range(20))]
    with look():
        ax = new_figure(3.0)[1][0]
        for _, (x, y) in points:
            ax.plot(x, y, "o")
        ax.set_xlim(0, 2)
        ax.set_ylim(0, 2)
        left_out = annotate_apart(ax, points)
        written = [t for t in ax.texts if t.get_text()]
        boxes = [t.get_window_extent() for t in written]
    assert "one point" in {t.get_text() for t in written}  # the first one has its name
    assert 2 <= len(written) < len(points)
    assert {t.get_text() for t in written} | set(left_out) == {name for name, _ in points}
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_a_long_first_step_does_not_press_the_others_to_the_axis() -> None:
    rows = pd.DataFrame({"t_s": [0.1 * k for k in range(50)], "step_ms": [4000.0] + [9.0] * 49, "kind": "decode"})
    empty = {name: pd.Series([None] * 50, dtype="Float64") for name in ("running", "waiting", "free_blocks")}
    drawn = plots.step_timeline(rows.assign(**empty))
    assert drawn is not None
    assert [ax.get_yscale() for ax in drawn[0].axes] == ["log"]
    even = plots.step_timeline(rows.assign(**empty, step_ms=9.0))
    assert even is not None
    assert [ax.get_yscale() for ax in even[0].axes] == ["linear"]


def test_values_of_a_variable_are_written_out(rates_dir: Path, tmp_path: Path) -> None:
    arms = group_arms(read_results(rates_dir))
    drawn = plots.metric_vs_variable(arms, "gen_tok_s")
    assert drawn is not None
    text = save(drawn[0], tmp_path, "x", drawn[1]).svg
    assert re.search(r">\d+(\.\d+)?</", text)
    assert "mathdefault" not in text


def test_missing_tables_are_one_note(single_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(single_dir, folder)
    for name in ("tails", "calibration"):
        (folder / f"{name}.parquet").unlink()
    runs = pd.read_parquet(folder / "runs.parquet")
    runs.drop(columns=["position", "replica", "block", "slo", "gate"]).to_parquet(folder / "runs.parquet")
    notes = read_results(folder).notes
    assert "tails.parquet, calibration.parquet are missing: the sections made of them are left out" in notes
    (version,) = (note for note in notes if "another version" in note)
    assert re.fullmatch(
        r"runs.parquet comes from another version: without (\w+, ){2}\w+ and 2 more columns, .*", version
    )
