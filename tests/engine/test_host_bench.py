"""The host benchmark drives the real scheduler, packing, collecting and routing."""

from __future__ import annotations

import time

import pytest
import torch

from engine.bench.host import PARTS, Bench, Case, Stopwatch


def test_a_steady_state_of_decode_steps() -> None:
    with torch.inference_mode():
        bench = Bench.open(Case(running=4, waiting=3, context=32))
        before = bench.core.stats.steps
        step, parts = bench.measure(5)
    assert bench.core.stats.steps == before + 5
    last = bench.core.stats.log[-1]
    assert (last.kind, last.decode_rows, last.running, last.waiting) == ("decode", 4, 4, 3)
    assert set(parts) == set(PARTS)
    assert all(0 < spent < step for spent in parts.values()), "every part was passed through"


def test_a_call_inside_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outer: 0 to 10 s; inner, within it: 2 to 5 s and 6 to 7 s."""
    clock = iter([0.0, 2.0, 5.0, 6.0, 7.0, 10.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    watch = Stopwatch()
    inner = watch.timed("inner", lambda: None)
    watch.timed("outer", lambda: (inner(), inner()))()
    assert watch.lap() == {"inner": 4.0, "outer": 6.0}
    assert watch.lap() == {}
