"""The bench runs and its judgement is right; its figures are for a quiet machine and decide no test."""

from __future__ import annotations

import pytest

from harness import bench
from harness.bench import Figure
from harness.record import RequestRecord, RunRecord


def test_a_missed_limit_is_said_and_is_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(bench, "storing", lambda *a: [Figure("slow", 3.0, "s", 2.0), Figure("info", 9.0, "s")])
    for name in ("schedule", "arrivals", "http_client"):
        monkeypatch.setattr(bench, name, lambda *a: [Figure("fine", 1.0, "ms", 2.0)])
    assert bench.main([]) == 1
    said = capsys.readouterr().out
    assert "at most 2: MISSED" in said
    assert said.count(": ok") == 3
    monkeypatch.setattr(bench, "storing", lambda *a: [Figure("at the limit", 2.0, "s", 2.0)])
    assert bench.main([]) == 0


def test_a_passing_stall_is_no_drift_but_is_seen(monkeypatch):
    """1,000 arrivals a ms apart, each 0.1 ms late but for 20 in the middle, which were 50 ms late."""

    def stalled(workload, *_):
        lag_ns = [50_000_000 if 500 <= k < 520 else 100_000 for k in range(len(workload))]
        sent = [RequestRecord(f"r{k}", 1, 1, t_sched_ns=k, t_submit_ns=k + lag) for k, lag in enumerate(lag_ns)]
        return RunRecord({"run_id": "r", "engine": "null"}, sent, t_start_ns=0, t_end_ns=1)

    monkeypatch.setattr(bench, "run_null", stalled)
    figures = bench.arrivals(1000, 1000.0)
    assert [f.value for f in figures] == pytest.approx([0.1, 0.1, 0.1, 50.0, 50.0])
    assert [f.missed for f in figures] == [False, False, False, True, False]
    assert "arrival 500" in figures[-1].name


@pytest.mark.parametrize(
    ("part", "arguments", "n"), [("storing", (10, 20), 4), ("schedule", (0.2,), 7), ("arrivals", (20, 1000.0), 5)]
)
def test_each_part_measures_something(part, arguments, n):
    figures = getattr(bench, part)(*arguments)
    assert len(figures) == n
    assert all(f.value >= 0 for f in figures)
    assert sum(f.limit is not None for f in figures) >= 1
    assert bench.http_client(50)[0].value > 0
