"""What can be read off the plots: names that cover no other, values as they are written, no step at the axis."""

from __future__ import annotations

import re
import shutil
from itertools import combinations, pairwise
from pathlib import Path

import pandas as pd
import pytest

from harness.report import plots
from harness.report.arms import group_arms
from harness.report.plots.figure import annotate_apart, legend_above, log_scale, look, new_figure, save, texts_outside
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


@pytest.mark.parametrize(
    "name", ["ours", "a_rather_long_name_of_an_engine and its setting = 123456", "x" * 70, "连续批处理" * 16]
)
@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")  # which fonts a machine has is not the point
def test_no_text_of_the_memory_plot_is_cut(name: str) -> None:
    ledger = {f"{part}_bytes": (9 - k) << 28 for k, part in enumerate(("kv_cache", "packed_weights", "step_buffers"))}
    ledger |= {"graph_pool_of_captured_steps_bytes": 1 << 29, "workspaces_bytes": 1 << 10}
    drawn = plots.ledger_bars({name: ledger, "static": {"weights_bytes": 1 << 30}}, {name: 11 << 29})
    assert drawn is not None
    assert texts_outside(drawn[0]) == []
    legend = drawn[0].axes[0].get_legend()
    assert legend is not None
    assert "step buffers" in {text.get_text() for text in legend.get_texts()}
    assert "Too small to be seen: workspaces." in drawn[1]


def test_a_text_over_the_edge_is_found() -> None:
    for written, outside in (((0, 0), []), ((-400, 0), ["here"]), ((500, 0), ["here"]), ((0, 300), ["here"])):
        with look():
            figure, (ax,) = new_figure(2.0)
            ax.annotate("here", (0, 0), xytext=written, textcoords="offset points").set_in_layout(False)
            assert texts_outside(figure) == outside


@pytest.mark.parametrize(
    ("high", "numbers"),
    [(900, ["1", "2", "5", "10", "20", "50", "100", "200", "500"]), (2e4, ["1", "10", "100", "1000", "10000"])],
)
def test_numbers_of_a_long_logarithmic_axis_do_not_run_into_each_other(high: float, numbers: list[str]) -> None:
    figure, (ax,) = new_figure(2.6)
    log_scale(ax, "x")
    ax.set_xlim(1, high)
    figure.canvas.draw()
    shown = [label for label in ax.get_xticklabels() if label.get_text() and 1 <= label.get_position()[0] <= high]
    assert [label.get_text() for label in shown] == numbers
    boxes = [label.get_window_extent() for label in shown]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_a_legend_that_is_too_long_for_a_line_takes_several() -> None:
    with look():
        figure, (ax,) = new_figure(2.4)
        ax.barh([0], [1], label="a word and another " * 6)
        ax.barh([1], [1], label="short")
        legend_above(ax)
    assert texts_outside(figure) == []
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text().count("\n") > 0 for text in legend.get_texts()] == [True, False]


def test_memory_of_a_small_model_is_in_a_unit_that_shows_it() -> None:
    for size, unit in ((5 << 20, "MiB"), (5 << 30, "GiB")):
        drawn = plots.ledger_bars({"a": {"weights_bytes": size}}, {})
        assert drawn is not None
        (ax,) = drawn[0].axes
        assert ax.get_xlabel() == unit
        assert [bar.get_width() for bar in ax.patches] == [5.0]
        assert [t.get_text() for t in ax.texts] == [f"5 {unit}"]


def test_few_samples_are_drawn_as_steps(single_dir: Path) -> None:
    results = read_results(single_dir)
    (arm,) = group_arms(results)
    drawn = plots.ttft_cdf(results, [arm], {arm.series: "k"})
    assert drawn is not None
    (line,) = drawn[0].axes[0].lines
    assert line.get_drawstyle() == "steps-post"
    n = int(results.tables["requests"]["ttft_ms"].notna().sum())
    assert list(line.get_ydata()) == pytest.approx([k / n for k in range(n + 1)])


def run_over_time(seconds: float, step_ms: float, with_blocks: bool = True) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Steps and requests of a run of two requests."""
    n = 20
    steps = pd.DataFrame(
        {
            "t_s": [seconds * k / n for k in range(n)],
            "running": pd.array([2] * n, dtype="Int64"),
            "waiting": pd.array([0] * n, dtype="Int64"),
            "free_blocks": pd.array([8 if with_blocks else None] * n, dtype="Int64"),
            "step_ms": [step_ms] * n,
            "kind": "decode",
        }
    )
    times = {"t_submit_s": 0.0, "t_first_s": seconds / 2, "t_last_s": seconds, "t_done_s": seconds}
    return steps, pd.DataFrame([{**times, "outcome": "ok_length"}] * 2)


def test_runs_that_are_compared_have_the_same_axes_and_panels() -> None:
    runs = [run_over_time(4.0, 10.0), run_over_time(2.0, 30.0, with_blocks=False)]
    frame = plots.time_frame(runs)
    assert frame.panels == ("requests", "free_blocks", "step_ms")
    limits = []
    for steps, requests in runs:
        timeline, gantt = plots.step_timeline(steps, frame), plots.request_gantt(requests, frame)
        assert timeline is not None
        assert gantt is not None
        queue, blocks, step = timeline[0].axes
        limits.append((queue.get_xlim(), queue.get_ylim(), step.get_ylim(), timeline[0].get_figheight()))
        assert gantt[0].axes[0].get_xlim() == queue.get_xlim()
        said = [t.get_text() for t in blocks.texts]
        assert said == ([] if steps["free_blocks"].notna().any() else ["not recorded"])
    assert limits[0] == limits[1]
    assert limits[0][0] == (0, pytest.approx(4.0 * 1.03))
    assert limits[0][2] == (0, pytest.approx(30.0 * 1.08))


def test_a_run_many_times_as_long_does_not_hide_the_short_one() -> None:
    frame = plots.time_frame([run_over_time(1.0, 10.0), run_over_time(6.0, 10.0)])
    assert frame.until_s is None
    drawn = plots.step_timeline(run_over_time(1.0, 10.0)[0], frame)
    assert drawn is not None
    assert drawn[0].axes[0].get_xlim()[1] < 2


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
