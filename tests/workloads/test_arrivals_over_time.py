"""Gamma arrivals, rates that change over time, and think times: against values computed by hand."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.arrivals import ClosedLoop, Diurnal, Gamma, OnOff, Ramp, RateProfile


def gaps_of(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise([0.0, *times])]


@pytest.mark.parametrize(("burstiness", "cv"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_b05_gamma_gaps_have_the_rate_and_the_cv_asked_for(burstiness: float, cv: float) -> None:
    """Mean gap 1 / rate whatever the burstiness b, CV = 1 / sqrt(b), within 2 % at n = 400,000."""
    assert cv == 1 / math.sqrt(burstiness)
    gaps = gaps_of(Gamma(rate=200, cv=cv).due_times(400_000, random.Random(11), None))
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 200, rel=0.02)
    assert statistics.pstdev(gaps) / mean == pytest.approx(cv, rel=0.02)
    assert min(gaps) >= 0


def test_a_seed_is_one_sequence() -> None:
    for process in (Gamma(3.0), Ramp(0.0, 4.0, 10.0), OnOff(5.0, 1.0, 2.0), Diurnal(2.0, period_s=30.0)):
        a, b, c = (process.due_times(50, random.Random(seed), None) for seed in (1, 1, 2))
        assert a == b != c
        assert a == sorted(a)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        # 1/s to 3/s in 10 s: 1*4 + 0.2*16/2 after 4 s; 20 after the ramp, then 3/s
        (Ramp(1.0, 3.0, 10.0), {0.0: 0.0, 4.0: 5.6, 10.0: 20.0, 12.0: 26.0}),
        (Ramp(3.0, 1.0, 10.0), {4.0: 10.4, 10.0: 20.0, 12.0: 22.0}),
        (Ramp(0.0, 2.0, 4.0), {2.0: 1.0, 4.0: 4.0, 5.0: 6.0}),
        (Ramp(2.0, 2.0, 4.0), {2.0: 4.0, 5.0: 10.0}),
        # 6/s for 2 s, silent for 4 s
        (OnOff(6.0, 2.0, 4.0), {1.0: 6.0, 7.0: 18.0, 8.0: 24.0}),
        # 6/s for 2 s, then 1/s for 4 s: 16 a period
        (OnOff(6.0, 2.0, 4.0, off_rate=1.0), {2.0: 12.0, 5.0: 15.0, 6.0: 16.0, 13.0: 38.0}),
        # the sine of a quarter period is 1: 2 * (15 + 0.5 * 60 / 2 pi)
        (Diurnal(2.0, 0.5, 60.0), {15.0: 30 + 30 / math.pi, 60.0: 120.0, 90.0: 180.0}),
        (Diurnal(2.0, 1.0, 60.0, peak_s=30.0), {30.0: 60.0, 60.0: 120.0}),
    ],
)
def test_expected_requests_by_hand(profile: RateProfile, expected: dict[float, float]) -> None:
    for t, requests in expected.items():
        assert profile.expected(t) == pytest.approx(requests)
        assert profile.seconds_at(requests) == pytest.approx(t, abs=1e-3)  # a cosine is flat in its silence


def test_nothing_is_due_in_a_pause() -> None:
    times = OnOff(6.0, 2.0, 4.0).due_times(5000, random.Random(0), None)
    assert max(t % 6.0 for t in times) <= 2.0 + 1e-9
    assert times[-1] > 1000  # many periods


@given(
    profile=st.one_of(
        st.builds(Ramp, st.floats(0, 50), st.floats(0.01, 50), st.floats(0.1, 1e4)),
        st.builds(OnOff, st.floats(0.01, 50), st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0, 20)),
        st.builds(Diurnal, st.floats(0.01, 50), st.floats(0, 1), st.floats(1, 1e5), st.floats(-1e4, 1e5)),
    ),
    requests=st.floats(1e-3, 1e5),
)
@settings(deadline=None)
def test_seconds_at_is_the_inverse_of_expected(profile: RateProfile, requests: float) -> None:
    assert profile.expected(profile.seconds_at(requests)) == pytest.approx(requests, rel=1e-6, abs=1e-6)


def test_counts_follow_the_profile() -> None:
    """A ramp from 10/s to 30/s in 100 s: 750 of the 2,000 requests fall into its first half."""
    profile = Ramp(10.0, 30.0, 100.0)
    times = profile.due_times(2000, random.Random(5), None)
    first = sum(t <= 50 for t in times)
    assert profile.expected(50.0) == pytest.approx(750)
    assert first == pytest.approx(750, abs=4 * math.sqrt(750))  # four deviations of a Poisson count


def test_think_times_of_a_closed_loop() -> None:
    assert ClosedLoop(2).think_times(3, random.Random(0)) == [0.0] * 3
    assert ClosedLoop(2, think_s=1.5, think_cv=0.0).think_times(3, random.Random(0)) == [1.5] * 3
    drawn = ClosedLoop(2, think_s=1.5, think_cv=0.5).think_times(50_000, random.Random(0))
    assert statistics.fmean(drawn) == pytest.approx(1.5, rel=0.02)
    assert statistics.pstdev(drawn) == pytest.approx(0.75, rel=0.02)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gamma(1.0, cv=0.0), r"arrival\.cv is 0.0: .*arrival=constant"),
        (lambda: Gamma(0.0), r"arrival\.rate"),
        (lambda: Ramp(-1.0, 1.0, 1.0), r"arrival\.start_rate .* from 0"),
        (lambda: Ramp(1.0, 0.0, 1.0), r"arrival\.end_rate .* above 0"),
        (lambda: Ramp(1.0, 1.0, 0.0), r"arrival\.ramp_s"),
        (lambda: OnOff(0.0, 1.0, 1.0), r"arrival\.on_rate"),
        (lambda: OnOff(1.0, 1.0, float("inf")), r"arrival\.off_s"),
        (lambda: OnOff(1.0, 1.0, 1.0, -1.0), r"arrival\.off_rate"),
        (lambda: Diurnal(1.0, 1.5), r"arrival\.amplitude is 1.5"),
        (lambda: Diurnal(1.0, period_s=0.0), r"arrival\.period_s"),
        (lambda: Diurnal(1.0, peak_s=float("nan")), r"arrival\.peak_s"),
        (lambda: ClosedLoop(1, think_s=-1.0), r"arrival\.think_s"),
        (lambda: ClosedLoop(1, think_cv=-1.0), r"arrival\.think_cv"),
    ],
)
def test_settings_that_mean_nothing(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
