"""The page of a ramp, and what says that something is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from harness.manifest import FILE
from harness.report import write_report
from harness.report.arms import group_arms
from harness.report.completeness import missing_notes
from harness.report.plots.ledger import ledger_bars
from harness.report.plots.load import latency_vs_rate, pareto, pareto_front
from harness.report.read import read_results
from harness.report.saturation import knee_sentences, knees


def test_the_knee_is_said_first_drawn_and_tabled(rates_dir: Path) -> None:
    results = read_results(rates_dir)
    (knee,) = knees(group_arms(results)).values()
    assert (knee.last_followed, knee.first_lost, knee.within_slo) == (4, 20, 4)
    text = write_report(rates_dir).read_text()
    (sentence,) = knee_sentences(group_arms(results))
    assert sentence.startswith("Throughput follows the load up to 4 requests/s; offered 20, ")
    assert text.index("Throughput follows the load") < text.index("Highest throughput")
    for part in ("Saturation", "Against the offered rate", "Throughput against latency", "Memory by part"):
        assert f"<h2>{part}</h2>" in text
    assert "not followed" in text
    assert "not given the same requests" not in text  # their times are what is varied
    assert "SLO p95 500 ms" in text  # the dotted line's name
    assert {"rate-ours.svg", "pareto.svg", "memory-ledger.svg"} <= {p.name for p in (rates_dir / "plots").glob("*.svg")}


def test_other_sweeps_have_no_knee(numeric_dir: Path, engines_dir: Path) -> None:
    for directory in (numeric_dir, engines_dir):
        arms = group_arms(read_results(directory))
        assert knees(arms) == {}
        assert knee_sentences(arms) == []
    assert latency_vs_rate(arms[:1]) is None


def test_no_arm_of_the_front_is_beaten() -> None:
    # (latency, rate): the second is slower and lower than the first; the third is faster, the fourth higher
    assert pareto_front([(10, 100), (12, 90), (5, 50), (20, 200)]) == {0, 2, 3}
    assert pareto_front([(10, 100), (10, 100)]) == {0, 1}


def test_the_front_needs_two_arms(single_dir: Path, rates_dir: Path) -> None:
    assert pareto(group_arms(read_results(single_dir))) is None
    assert pareto(group_arms(read_results(rates_dir))) is not None


def test_stacked_bars_hold_every_line_and_the_peak() -> None:
    lines = {f"part{k}_bytes": (8 - k) << 30 for k in range(8)}
    drawing = ledger_bars({"a": lines, "b": {"part0_bytes": 1 << 30}}, {"a": 37 << 30})
    assert drawing is not None
    figure, caption = drawing
    (ax,) = figure.axes
    widths = [bar.get_width() for bar in ax.patches if bar.get_y() < 0.5]
    assert sum(widths) == pytest.approx(36)  # 8 + 7 + … + 1; the smallest are one part, "other"
    assert len([w for w in widths if w]) == 6
    assert "held at its peak" in caption
    assert ledger_bars({"a": {}}, {}) is None


def test_a_missing_arm_is_one_line_and_the_rest_is_used(engines_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "part"
    shutil.copytree(engines_dir, folder)
    runs = pd.read_parquet(folder / "runs.parquet")
    kept = runs[~((runs["workload"] == "mixed_staged") & (runs["engine"] == "ours"))]
    kept.to_parquet(folder / "runs.parquet")
    results = read_results(folder)
    (note,) = missing_notes(results, group_arms(results))
    assert note == "Arms are missing, the others are compared without them: mixed_staged without ours."
    assert note in write_report(folder).read_text()
    assert missing_notes(read_results(engines_dir), group_arms(read_results(engines_dir))) == []


def test_a_measured_job_whose_rows_are_gone_is_named(rates_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rates"
    shutil.copytree(rates_dir, folder)
    line = (
        '{"job": "%s", "config_hash": "%s", "overrides": [], "state": "ok", "time": "2026-01-01T00:00:00+00:00", '
        '"error": null, "block": 0, "position": 0}\n'
    )
    (folder / FILE).write_text(line % ("0-there", "00000001") + line % ("9-gone", "deadbeef"))
    results = read_results(folder)
    assert missing_notes(results, group_arms(results)) == ["Measured by the manifest, but not in the tables: 9-gone."]
