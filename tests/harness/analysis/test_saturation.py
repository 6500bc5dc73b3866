"""The knee of a ramp, worked out by hand for a service of 10 requests/s that needs 1 s an answer."""

from __future__ import annotations

import pytest

from harness.analysis.saturation import Load, find_knee
from harness.report.saturation import in_words


def load(offered, served=None, ttft=100.0, saturated=False, slo=None):
    """101 requests: sent in 100 / offered seconds; served as a service that keeps up unless said otherwise."""
    sending = 100 / offered
    kept_up = 101 / (sending + 1.0)
    return Load(offered, kept_up if served is None else served, 101, sending, ttft, 1000.0, saturated, slo)


def test_the_knee_lies_between_the_last_rate_followed_and_the_first_that_is_not():
    knee = find_knee([load(20, served=9.0, ttft=4000.0), load(5), load(2), load(10, ttft=250.0)])
    assert [j.load.offered for j in knee.loads] == [2, 5, 10, 20]
    assert [j.followed for j in knee.loads] == [True, True, True, False]
    assert (knee.last_followed, knee.first_lost) == (10, 20)
    # kept up, 101 requests sent at 20/s within 5 s and answered within 1 s more are 101 / 6 a second
    assert knee.loads[3].expected == pytest.approx(101 / 6)
    assert knee.capacity == pytest.approx(101 / 11)  # at 10/s: 10 s of sending and 1 s
    assert knee.diverged_from == 20
    assert in_words(knee) == (
        "Throughput follows the load up to 10 requests/s; offered 20, 9 are answered and TTFT p95 goes from 250 to "
        "4,000 ms: the knee lies between the two, capacity is about 9.18 requests/s."
    )


def test_short_runs_are_not_taken_for_saturated_ones():
    # 101 / (1 + 1) is half of the 100 offered, and yet all that a service which keeps up can show
    knee = find_knee([load(2), load(100)])
    assert knee.first_lost is None
    assert "the highest tried: the knee lies above" in in_words(knee)


def test_a_growing_queue_is_lost_even_if_throughput_looks_well():
    knee = find_knee([load(2), load(5, saturated=True), load(10)])
    assert (knee.last_followed, knee.first_lost) == (2, 5)  # a later rate that looks well again does not count


def test_nothing_is_followed():
    knee = find_knee([load(2, served=0.5), load(4, served=0.5)])
    assert knee.last_followed is None
    assert in_words(knee).startswith("Not even 2 requests/s are followed (0.500 were answered): the knee lies below")


def test_ttft_may_leave_its_floor_before_throughput_is_lost():
    knee = find_knee([load(2), load(5, ttft=301.0), load(10, ttft=500.0), load(20, served=9.0, ttft=9000.0)])
    assert knee.diverged_from == 5
    assert "TTFT p95 leaves its floor earlier, at 5 requests/s" in in_words(knee)


@pytest.mark.parametrize(
    "kept, within, said",
    [
        ((True, True, False), 5, "The SLO is kept up to 5 requests/s."),
        ((True, False, True), 2, "The SLO is kept up to 2 requests/s."),
        ((False, False, False), None, "The SLO is kept at no rate tried."),
        ((None, None, None), None, ""),
    ],
)
def test_the_highest_rate_within_the_slo(kept, within, said):
    knee = find_knee([load(rate, slo=k) for rate, k in zip((2, 5, 10), kept, strict=True)])
    assert knee.within_slo == within
    assert in_words(knee, "x").endswith(said or "lies above it.")
    assert in_words(knee, "x").startswith("x: ")


def test_one_rate_is_no_ramp():
    with pytest.raises(ValueError, match="at least two rates"):
        find_knee([load(2), load(2)])
