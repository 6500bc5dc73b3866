"""The bench runs and its judgement is right; its figures are for a quiet machine and decide no test."""

from __future__ import annotations

import pytest

from harness import bench
from harness.bench import Figure


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


@pytest.mark.parametrize(
    ("part", "arguments", "n"), [("storing", (10, 20), 4), ("schedule", (0.2,), 7), ("arrivals", (20, 1000.0), 2)]
)
def test_each_part_measures_something(part, arguments, n):
    figures = getattr(bench, part)(*arguments)
    assert len(figures) == n
    assert all(f.value >= 0 for f in figures)
    assert sum(f.limit is not None for f in figures) >= 1
    assert bench.http_client(50)[0].value > 0
