from __future__ import annotations

import random
import statistics

import pytest

from workloads.arrivals import ARRIVALS, AsRecorded, Burst, ClosedLoop, Constant, Poisson
from workloads.config import make_arrival


def test_burst_is_due_at_once_and_draws_nothing() -> None:
    rng = random.Random(0)
    before = rng.getstate()
    assert Burst().due_times(3, rng, None) == [0.0, 0.0, 0.0]
    assert rng.getstate() == before


def test_constant_has_no_drift() -> None:
    times = Constant(rate=200).due_times(2000, random.Random(0), None)
    assert all(abs(t - k / 200) < 1e-12 for k, t in enumerate(times))
    assert times[-1] == pytest.approx(9.995, abs=1e-12)


def test_poisson_gaps_have_mean_and_cv_of_an_exponential() -> None:
    times = Poisson(rate=50).due_times(100_000, random.Random(3), None)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.02)
    assert statistics.pstdev(gaps) / mean == pytest.approx(1, rel=0.02)
    assert min(gaps) >= 0


def test_closed_loop_caps_requests_in_flight() -> None:
    process = ClosedLoop(concurrency=4)
    assert process.concurrency == 4
    assert process.due_times(5, random.Random(0), None) == [0.0] * 5


def test_open_loops_have_no_cap() -> None:
    assert [p.concurrency for p in (Burst(), Constant(1), Poisson(1), AsRecorded())] == [None] * 4


def test_as_recorded_needs_recorded_times() -> None:
    assert AsRecorded().due_times(2, random.Random(0), [0.5, 1.0]) == [0.5, 1.0]
    with pytest.raises(ValueError, match="as_recorded needs a workload with times"):
        AsRecorded().due_times(2, random.Random(0), None)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_rate_must_be_positive_and_finite(rate: float) -> None:
    with pytest.raises(ValueError, match=r"arrival\.rate"):
        Poisson(rate)


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'poisson'"):
        make_arrival({"kind": "poison", "rate": 1})


def test_missing_and_unknown_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"arrival\.rate"):
        make_arrival({"kind": "poisson"})
    with pytest.raises(ValueError, match="Did you mean 'rate'"):
        make_arrival({"kind": "poisson", "rat": 2})


def test_every_registered_process_builds_from_its_kind() -> None:
    settings: dict[str, dict[str, float]] = {
        "constant": {"rate": 2.0},
        "poisson": {"rate": 2.0},
        "gamma": {"rate": 2.0},
        "ramp": {"start_rate": 1.0, "end_rate": 2.0, "ramp_s": 10.0},
        "on_off": {"on_rate": 2.0, "on_s": 1.0, "off_s": 1.0},
        "diurnal": {"rate": 2.0},
        "closed_loop": {"concurrency": 2},
    }
    for kind, cls in ARRIVALS.items():
        assert type(make_arrival({"kind": kind, **settings.get(kind, {})})) is cls
