"""ServeGen pools: a small one in the format of the real ones, and the statistics of what is drawn."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from workloads import Workload, build_workload
from workloads.build import check_sources
from workloads.config import ServeGenWorkload
from workloads.servegen import Window, _arrivals, _gap, _windows
from workloads.traces import TraceError
from workloads.traces.rows import SourceText

RECORDED = {"kind": "as_recorded"}
SILENT = "0,0,,0,0"


def client(folder: Path, n: int, windows: list[str], lengths: dict[str, tuple[str, str]] | None) -> None:
    text = "".join(f"{600 * k},{line}\r\n" for k, line in enumerate(windows))
    (folder / f"chunk-{n}-trace.csv").write_bytes(text.encode())
    if lengths is not None:
        data = {start: {"input_tokens": a, "output_tokens": b} for start, (a, b) in lengths.items()}
        (folder / f"chunk-{n}-dataset.json").write_text(json.dumps(data))


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    client(
        tmp_path,
        0,
        ["2.0,1.0,Gamma,1.0,0.5", "4.0,2.0,Gamma,0.25,1.0", SILENT],
        {"0": ("{100: 0.75, 200: 0.25}", "{10: 1.0}"), "1200": ("{}", "{}")},
    )
    client(
        tmp_path, 1, [SILENT, "1.0,0.5,Weibull,2.0,1.0", SILENT], {"0": ("{}", "{}"), "600": ("{7: 1.0}", "{3: 1.0}")}
    )
    client(tmp_path, 2, ["9.0,1.0,Gamma,1.0,0.1", SILENT, SILENT], None)
    return tmp_path


def build(pool: Path, **given: Any) -> Workload:
    settings: dict[str, Any] = {"window_start_s": 0.0, "window_end_s": 1200.0} | given
    return build_workload(ServeGenWorkload(path=str(pool), **settings), RECORDED, vocab_size=500, seed=1)


def test_rates_and_lengths_by_client(pool: Path) -> None:
    """2/s then 4/s for ten minutes each from client 0; 1/s in the second ten from client 1: 1200 + 2400 + 600."""
    w = build(pool)
    one = [r for r in w.requests if len(r.prompt_ids) == 7]
    zero = [r for r in w.requests if len(r.prompt_ids) != 7]
    assert {r.max_new_tokens for r in one} == {3}
    assert {(len(r.prompt_ids), r.max_new_tokens) for r in zero} == {(100, 10), (200, 10)}
    assert min(r.due_s for r in one) >= 600
    assert len(one) == pytest.approx(600, abs=4 * math.sqrt(600) * 0.53)  # Weibull of shape 2: CV 0.523
    assert sum(r.due_s < 600 for r in zero) == pytest.approx(1200, abs=4 * math.sqrt(1200))
    assert sum(r.due_s >= 600 for r in zero) == pytest.approx(2400, abs=4 * math.sqrt(2400) * 2)  # CV 2
    assert sum(len(r.prompt_ids) == 100 for r in zero) / len(zero) == pytest.approx(0.75, abs=0.04)
    assert w.notes == (f"{pool}: 1 of 3 clients are left out: they have no dataset.json",)
    assert check_sources(ServeGenWorkload(path=str(pool), window_end_s=9.0), RECORDED) == w.notes


def test_a_window_and_a_rate(pool: Path) -> None:
    w = build(pool, window_start_s=300.0, window_end_s=900.0, rate=20.0, time_scale=0.5)
    assert len(w) == pytest.approx(12_000, rel=0.05)
    assert 0 <= w.requests[0].due_s < 1
    assert 299 < w.requests[-1].due_s <= 300
    # 600 + 1200 + 300 of 2100 expected requests keep their shares
    assert sum(len(r.prompt_ids) == 7 for r in w.requests) / len(w) == pytest.approx(300 / 2100, rel=0.1)


def test_a_window_is_part_of_the_same_seed_and_hash(pool: Path) -> None:
    assert build(pool).content_hash == build(pool).content_hash
    assert build(pool).spec["trace_sha256"] == build(pool, rate=3.0).spec["trace_sha256"]
    assert build(pool, max_requests=5).requests[4].due_s == build(pool).requests[4].due_s


@pytest.mark.parametrize(("family", "shape", "cv"), [("Gamma", 0.25, 2.0), ("Gamma", 4.0, 0.5), ("Weibull", 1.0, 1.0)])
def test_gaps_have_mean_one_and_the_cv_of_their_family(family: str, shape: float, cv: float) -> None:
    rng = random.Random(0)
    gaps = [_gap(family, shape, rng) for _ in range(200_000)]
    assert statistics.fmean(gaps) == pytest.approx(1.0, rel=0.02)
    assert statistics.pstdev(gaps) == pytest.approx(cv, rel=0.03)


@pytest.mark.parametrize(("family", "shape"), [("Gamma", 0.1), ("Weibull", 0.5), ("Gamma", 9.0)])
def test_the_rate_is_exact_from_the_first_second(family: str, shape: float) -> None:
    """Begun at a gap's start instead of inside one, a bursty client would send far too much in a short window."""
    counts = [sum(1 for _ in _arrivals([Window(0, 5, 2.0, family, shape)], 1.0, random.Random(k))) for k in range(4000)]
    error = statistics.stdev(counts) / math.sqrt(len(counts))
    assert statistics.fmean(counts) == pytest.approx(10.0, abs=4 * error)


def test_a_gap_goes_on_over_windows() -> None:
    """Equal gaps (a large shape): the rest of a gap is waited for at the next window's rate, silence in between."""
    windows = [Window(0, 10, 1.0, "Gamma", 1e4), Window(20, 30, 2.0, "Gamma", 1e4)]
    times = list(_arrivals(windows, 1.0, random.Random(0)))
    clock = [t if t <= 10 else 10 + 2 * (t - 20) for t in times]  # expected requests
    assert all(gap == pytest.approx(1.0, abs=0.05) for gap in (b - a for a, b in itertools.pairwise(clock)))
    assert not any(10 < t < 20 for t in times)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window_end_s": None}, r"window_end_s is null"),
        ({"rate": 0.0}, r"workload\.rate is 0.0"),
        ({"window_start_s": 1300.0, "window_end_s": 1400.0}, r"no client sends between 1300 s and 1400 s"),
        ({"rate": 1e6}, r"more than 5000000"),
        ({"path": None}, r"workload\.path is None: give the folder"),
    ],
)
def test_settings_that_mean_nothing(pool: Path, given: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"path": str(pool), "window_end_s": 1200.0} | given
    with pytest.raises(ValueError, match=message):
        build_workload(ServeGenWorkload(**settings), RECORDED, vocab_size=500, seed=1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,1.0,1.0,Gamma,1.0\n", r":1: column 'start': expected 6 fields"),
        ("0,x,1.0,Gamma,1.0,1.0\n", r":1: column 'rate'"),
        ("0,1.0,1.0,Pareto,1.0,1.0\n", r":1: column 'distribution': expected Gamma or Weibull"),
        ("0,1.0,1.0,Gamma,0,1.0\n", r":1: column 'shape'"),
        ("0,1.0,1.0,Gamma,1.0,1.0\n", "1 windows: expected at least 2"),
        ("600,0,0,,0,0\n0,0,0,,0,0\n", r":2: column 'start': expected a start after 600"),
    ],
)
def test_malformed_arrivals(lines: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        _windows(SourceText("chunk-0-trace.csv", lines, ""))


@pytest.mark.parametrize("text", ["{100: ", "[1]", "{'a': 1}", "{100: -1}", "{1: 0.0}", "{1: __import__('os')}"])
def test_malformed_lengths(tmp_path: Path, text: str) -> None:
    client(tmp_path, 0, ["2.0,1.0,Gamma,1.0,0.5", SILENT], {"0": (text, "{10: 1.0}")})
    with pytest.raises(TraceError, match="window 0: expected a dict of probabilities by length"):
        build(tmp_path)


def test_a_folder_without_clients(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no client with both"):
        build(tmp_path)


def test_the_real_pool(traces: Path) -> None:
    w = build(
        traces / "servegen" / "data" / "language" / "m-small", window_start_s=50400.0, window_end_s=50460.0, rate=50.0
    )
    assert len(w) == pytest.approx(3000, rel=0.2)
    assert "22 of 43 clients" in w.notes[0]
