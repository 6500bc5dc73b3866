"""The steady window: on series computed by hand, and on simulated queues whose state is known."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from harness.metrics import compute_tables
from harness.metrics.arrival_rate import BINS, dispersion, planned_swing, rate_swing, rate_trend
from harness.metrics.observations import observe
from harness.metrics.planned_arrivals import planned_arrivals, wave
from harness.metrics.steady import SteadyState, change_point, growth, in_flight, mser, steady_window
from harness.record import Outcome, RequestRecord, RunRecord, TokenChunk
from workloads.arrivals import Diurnal, Gamma, OnOff, Ramp
from workloads.config import make_arrival

S = 1_000_000_000


def record(sent_s, first_s, done_s, prompt_tokens: int = 10) -> RunRecord:
    """A run of requests with two tokens each: the first, and one at the end."""
    requests = [
        RequestRecord(
            f"q{i}",
            prompt_tokens=prompt_tokens,
            max_new_tokens=2,
            t_sched_ns=round(s * S),
            t_submit_ns=round(s * S),
            t_done_ns=round(d * S),
            chunks=[TokenChunk(round(f * S), (1,)), TokenChunk(round(d * S), (2,))],
            outcome=Outcome.OK_LENGTH,
        )
        for i, (s, f, d) in enumerate(zip(sent_s, first_s, done_s, strict=True))
    ]
    end = round(max(done_s) * S)
    return RunRecord({"run_id": "r", "engine": "ours"}, requests, t_start_ns=0, t_end_ns=end)


def queue(rng: np.random.Generator, n: int, load: float, servers: int = 64, service_s: float = 3.2) -> RunRecord:
    """First come, first served by ``servers`` places; ``load`` 1 is all that they can serve."""
    sent = np.cumsum(rng.exponential(service_s / servers / load, n))
    free, first, done = np.zeros(servers), np.empty(n), np.empty(n)
    for i, service in enumerate(rng.gamma(4, service_s / 4, n)):
        place = free.argmin()
        begin = max(sent[i], free[place])
        free[place] = begin + service
        first[i], done[i] = begin + 0.03 + rng.gamma(3, 0.01), begin + service + 0.1
    return record(sent, first, done)


def test_mser_cuts_the_warm_up_by_hand() -> None:
    # Batches of five: 100, 10, 10, … The error is 0 once the first batch is gone, and argmin takes the first zero.
    assert mser(np.array([100.0] * 5 + [10.0] * 45)) == 5
    assert mser(np.array([10.0] * 50)) == 0
    assert mser(np.array([10.0] * 15)) is None  # three batches are too few
    assert mser(np.arange(100.0)) is None  # it never settles: the best cut is beyond the half


def test_mser_by_its_definition() -> None:
    rng = np.random.default_rng(5)
    series = np.concatenate((rng.normal(5, 1, 20), rng.normal(0, 1, 180)))
    means = series.reshape(-1, 5).mean(axis=1)
    errors = [means[d:].var() / len(means[d:]) for d in range(len(means) - 5)]
    assert mser(series) == 5 * int(np.argmin(errors)) == 20


def test_requests_in_flight_by_hand() -> None:
    o = observe(record([0, 1, 2], [0.1, 1.1, 2.1], [2, 3, 2.5]))
    assert in_flight(o, 0, 4 * S, bins=4).tolist() == [1, 2, 1.5, 0]
    assert in_flight(o, 0.5 * S, 1.5 * S, bins=2).tolist() == [1, 2]


def test_a_change_counts_if_it_is_more_than_chance_and_more_than_a_fifth() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 1, BINS)
    assert change_point(20 + noise) is None
    assert change_point(20 + noise + np.repeat([0, 10], BINS // 2)) == BINS // 2
    assert change_point(20 + 0.1 * noise + np.repeat([0, 3], BINS // 2)) is None  # significant, but 15 %
    assert change_point(np.full(BINS, 7.0)) is None


@pytest.mark.parametrize(
    "n, load, state, least",
    [
        (256, 0.3, SteadyState.STEADY, 18),
        (256, 0.6, SteadyState.STEADY, 18),
        (1000, 0.8, SteadyState.STEADY, 18),
        (256, 1.3, SteadyState.SATURATED, 18),
        (1000, 1.3, SteadyState.SATURATED, 19),
        (1000, 2.0, SteadyState.SATURATED, 19),
        (64, 1.1, SteadyState.TOO_SHORT, 18),
    ],
)
def test_simulated_queues(n: int, load: float, state: SteadyState, least: int) -> None:
    found = Counter(steady_window(observe(queue(np.random.default_rng(s), n, load))).state for s in range(20))
    assert found[state] >= least, found


def test_a_load_that_changes_half_way_is_not_averaged() -> None:
    rng = np.random.default_rng(1)
    sent = np.concatenate((np.arange(0, 50, 0.5), np.arange(50, 100, 0.1)))
    first = sent + rng.gamma(9, 0.01, len(sent))
    run = compute_tables(record(sent, first, first + 2))["runs"].iloc[0]
    assert run.steady_state in ("non_stationary", "saturated", "steady")
    if run.steady_state == "steady":  # then one of the two halves, never both
        assert run.steady_end_s <= 52 or run.steady_start_s >= 48  # to a bin


@pytest.mark.parametrize("n", [1600, 2400, 4000])
@pytest.mark.parametrize("seed", range(4))
def test_what_still_fills_is_not_called_steady(n: int, seed: int) -> None:
    """200 a second that stay 0.8 to 7.8 s each, first tokens at once: the number in flight climbs for 7.8 s."""
    rng = np.random.default_rng(seed)
    sent = np.arange(n) / 200
    run = compute_tables(record(sent, sent + 0.05, sent + rng.uniform(0.8, 7.8, n)))["runs"].iloc[0]
    assert run.steady_state == ("steady" if n == 4000 else "too_short"), run.steady_reason
    if n == 4000:
        assert run.steady_start_s > 7.0
        assert run.steady_request_s == pytest.approx(200, rel=0.03)
    else:
        assert run.steady_reason


def test_a_window_in_which_fewer_end_than_are_sent_is_too_short() -> None:
    """Lives that grow slowly, by a tenth over the run: below what a change of the mean counts for."""
    rng = np.random.default_rng(0)
    sent = np.arange(8000) / 200
    life = rng.uniform(1.0, 3.0, 8000) + 0.06 * sent
    o = observe(record(sent, sent + 0.05, sent + life))
    found = steady_window(o)
    assert found.state == "too_short"
    assert "still grows: 200 requests/s were sent and 18" in (found.reason or "")
    change = growth(o, 5 * S, 40 * S)
    assert change.sent == 7000
    assert change.sent - change.ended == pytest.approx(200 * 0.06 * 35, rel=0.2)


def test_a_rate_that_only_grows_has_no_window() -> None:
    rng = np.random.default_rng(1)
    sent = np.cumsum(1 / np.linspace(1, 10, 500))
    first = sent + rng.gamma(9, 0.01, len(sent))
    run = compute_tables(record(sent, first, first + 2))["runs"].iloc[0]
    assert run.steady_state in ("saturated", "non_stationary")
    named = ("steady_state", "steady_reason")
    assert run[[c for c in run.index if c.startswith("steady_") and c not in named]].isna().all()
    assert run.gen_tok_s > 0  # the whole run's rate stays


@pytest.mark.parametrize(
    "process, n, life_s", [(Ramp(2, 40, 9), 200, 2.0), (Ramp(1, 10, 90), 495, 2.0), (Ramp(30, 5, 40), 650, 1.0)]
)
def test_poisson_arrivals_whose_rate_moves_all_the_time_are_not_called_steady(process, n, life_s) -> None:
    """Answered at once, so no queue: only what is sent moves. Two of twenty may look even by chance."""
    found = Counter()
    for seed in range(20):
        rng, sent = np.random.default_rng(seed), np.array(process.due_times(n, random.Random(seed), None))
        window = steady_window(observe(record(sent, sent + 0.05, sent + life_s * rng.uniform(0.8, 1.2, n))))
        found[window.state] += 1
        assert (window.reason is None) == (window.state == SteadyState.STEADY)
    assert found[SteadyState.STEADY] <= 2, found


@pytest.mark.parametrize(
    "process",
    [Gamma(20.0), Gamma(20.0, cv=2.0), Gamma(20.0, cv=3.0), OnOff(40.0, 2.0, 2.0), OnOff(40.0, 1.0, 1.0)],
    ids=["poisson", "cv 2", "cv 3", "on/off", "fast on/off"],
)
def test_arrivals_that_come_in_bursts_but_at_one_rate_are_steady(process) -> None:
    found = Counter()
    for seed in range(20):
        rng, sent = np.random.default_rng(seed), np.array(process.due_times(600, random.Random(seed), None))
        found[steady_window(observe(record(sent, sent + 0.05, sent + rng.uniform(1.6, 2.4, 600)))).state] += 1
    assert found[SteadyState.STEADY] >= 18, found


@pytest.mark.parametrize(
    "process, n",
    [
        (Diurnal(10.0, 0.5, 100.0, peak_s=50.0), 1000),
        (Diurnal(10.0, 0.5, 100.0, peak_s=0.0), 1000),
        (Diurnal(10.0, 0.8, 60.0, peak_s=30.0), 600),
        (OnOff(18.0, 33.0, 33.0, off_rate=2.0), 1260),
    ],
    ids=["peak", "lull", "one day", "high, low, high"],
)
def test_a_rate_that_rises_and_falls_again_is_not_called_steady(process, n) -> None:
    """The mean moment of these arrivals is the middle of the run: no trend, as many at the end as at the start."""
    found: Counter[SteadyState] = Counter()
    swings = 0
    for seed in range(20):
        rng, sent = np.random.default_rng(seed), np.array(process.due_times(n, random.Random(seed), None))
        o = observe(record(sent, sent + 0.05, sent + rng.uniform(1.6, 2.4, n)))
        window = steady_window(o)
        found[window.state] += 1
        swings += rate_swing(o, 0, sent[-1] * S) is not None
        # What is left of it, if anything, is a part that stands still by itself.
        assert window.seconds is None or window.seconds < 0.6 * sent[-1]
    assert swings == 20
    assert found[SteadyState.STEADY] <= 3, found


SHIPPED = {"kind": "diurnal", "rate": 2.0, "amplitude": 0.8, "period_s": 60.0, "peak_s": 30.0}


def planned_run(arrival: dict[str, object], n: int, seed: int, life_s: float = 1.0) -> RunRecord:
    """Answered at once, as a workload of that arrival process records itself."""
    rng, process = np.random.default_rng(seed), make_arrival(arrival)
    sent = np.array(process.due_times(n, random.Random(seed), None))
    run = record(sent, sent + 0.05, sent + life_s * rng.uniform(0.8, 1.2, n))
    run.environment["workload.spec"] = {"arrival": arrival}
    return run


@pytest.mark.parametrize("n", [60, 120])
def test_a_day_too_short_to_show_its_swing_is_judged_by_its_plan(n: int) -> None:
    """Of 120 requests one run in six looks steady by what it shows."""
    runs = [planned_run(SHIPPED, n, seed) for seed in range(30)]
    assert any(steady_window(observe(r)).state == "steady" for r in runs)
    found = [compute_tables(r)["runs"].iloc[0] for r in runs]
    assert not any(row.steady_state == "steady" for row in found)
    assert sum("were planned in part" in row.steady_reason for row in found) >= 3


@pytest.mark.parametrize(
    "arrival, n",
    [
        ({"kind": "constant", "rate": 2.0}, 120),
        ({"kind": "poisson", "rate": 2.0}, 120),
        (SHIPPED | {"amplitude": 0.05}, 120),
        (SHIPPED | {"period_s": 3.0}, 240),  # many days a stretch: bursts
        ({"kind": "on_off", "on_rate": 40.0, "on_s": 2.0, "off_s": 2.0, "off_rate": 0.0}, 600),
    ],
    ids=["constant", "poisson", "small swing", "many days", "on/off"],
)
def test_a_plan_that_stands_still_has_a_window(arrival, n) -> None:
    found = Counter(compute_tables(planned_run(arrival, n, seed))["runs"].iloc[0].steady_state for seed in range(12))
    assert found["steady"] >= 11, found


def test_the_plan_of_a_part_decides_about_it() -> None:
    """A ramp of 20 s, then 10/s: the flat part is judged as what it is, not as a part of a run that moves."""
    ramp = {"kind": "ramp", "start_rate": 2.0, "end_rate": 10.0, "ramp_s": 20.0}
    plan = Ramp(2.0, 10.0, 20.0).expected
    assert planned_swing(plan, 20 * S, 60 * S) is None
    assert planned_swing(plan, 0, 60 * S) == (
        "3.5 requests/s were planned in part 1 of its 8 and 10/s in part 4"  # of 7.5 s; the mean of 2 and 5
    )
    states = [(steady_window(observe(r)).state, compute_tables(r)["runs"].iloc[0].steady_state) for r in ramped(ramp)]
    assert sum(b == "steady" for _, b in states) > sum(a == "steady" for a, _ in states)


def ramped(arrival: dict[str, object]) -> list[RunRecord]:
    return [planned_run(arrival, 600, seed, life_s=0.2) for seed in range(20)]


def test_a_plan_that_the_requests_did_not_follow_is_none() -> None:
    run = planned_run(SHIPPED, 120, 0)
    assert planned_arrivals(run, observe(run)) is not None
    run.environment["workload.spec"] = {"arrival": SHIPPED | {"rate": 4.0}}  # replayed at half its rate
    assert planned_arrivals(run, observe(run)) is None
    for spec in (None, {}, {"arrival": None}, {"arrival": {"kind": "poisson", "rate": 2.0}}, {"arrival": {}}):
        run.environment["workload.spec"] = spec
        assert planned_arrivals(run, observe(run)) is None
    unsent = RunRecord({"run_id": "r", "engine": "ours"}, environment={"workload.spec": {"arrival": SHIPPED}})
    assert planned_arrivals(unsent, observe(unsent)) is None


@pytest.mark.parametrize("period_s, steady", [(5.0, True), (10.0, True), (20.0, False), (25.0, False), (30.0, False)])
def test_bursts_are_judged_alike_whatever_the_seed(period_s: float, steady: bool) -> None:
    """100 s in stretches of 12 s: bursts shorter than one are the load itself, longer ones are another load each."""
    arrival = {"kind": "on_off", "on_rate": 20.0, "on_s": period_s / 2, "off_s": period_s / 2}
    runs = [planned_run(arrival, 1000, seed, life_s=3.0) for seed in range(10)]
    found = Counter(steady_window(o, planned_arrivals(run, o)).state == "steady" for run in runs if (o := observe(run)))
    assert found[steady] >= (9 if steady else 10), found


@pytest.mark.parametrize("phase", [0.0, 0.25, 0.5, 0.75])
def test_a_planned_swing_does_not_depend_on_its_phase(phase: float) -> None:
    """Stretches of 10 s: on and off for 5 s each is gone from the averages; for 8 s each it is not, though the counts
    of the stretches differ by no more than the pieces in them."""
    short, long = OnOff(20.0, 5.0, 5.0).expected, OnOff(20.0, 8.0, 8.0).expected
    assert planned_swing(short, 10 * phase * S, (10 * phase + 80) * S) is None
    assert "around second" in (planned_swing(long, 16 * phase * S, (16 * phase + 80) * S) or "")


def test_the_planned_wave_by_hand() -> None:
    """On and off for 10 s each, averages over 10 s: at the middle of a burst the triangle, of area 10, loses both its
    tails of 1/8 (half of 5 s times half the height), so 3/4 of the rate; in the middle of a pause the other 1/4."""
    (low, low_s), (high, high_s) = wave(OnOff(20.0, 10.0, 10.0).expected, 0.0, 80.0, 10.0)
    assert (low, high) == pytest.approx((5.0, 15.0), rel=0.01)
    assert low_s % 20 == pytest.approx(15.0, abs=0.5)
    assert high_s % 20 == pytest.approx(5.0, abs=0.5)
    # A rate that climbs by 0.1/s each second, at the ends of what the averages reach: 10 s inside, give or take a step.
    (low, low_s), (high, high_s) = wave(lambda t: t * t / 20, 0.0, 80.0, 10.0)
    assert (low_s, high_s) == pytest.approx((10.0, 70.0), abs=10 / 32)
    assert (low, high) == pytest.approx((low_s / 10, high_s / 10))


@pytest.mark.parametrize(
    "changed",
    [
        {"rate": None},
        {"rate": "fast"},
        {"rate": [2.0]},
        {"rate": -1.0},
        {"rate": 10**400},
        {"phase_s": 3.0},
        {"rate": "???"},
    ],
)
def test_an_arrival_of_another_version_is_no_plan(changed: dict[str, object]) -> None:
    run = planned_run(SHIPPED, 120, 0)
    run.environment["workload.spec"] = {"arrival": SHIPPED | changed}
    assert planned_arrivals(run, observe(run)) is None
    run.environment["workload.spec"] = {"arrival": {k: v for k, v in SHIPPED.items() if k != "rate"}}
    assert planned_arrivals(run, observe(run)) is None
    assert compute_tables(run)["runs"].iloc[0].steady_state is not None


def test_a_swing_by_hand() -> None:
    """80 s: one arrival a second, in the middle 20 s three. Eight stretches of 10, 10, 10, 30, 30, 10, 10, 10; nothing
    within them, so the variance inside is the mean count of a piece, 120 / 64."""
    sent = np.concatenate((np.arange(30.0), 30 + np.arange(60) / 3, np.arange(50.0, 80.0))) + 0.01
    o = observe(record(sent, sent + 0.1, sent + 1))
    assert rate_trend(o, 0, 80 * S) is None
    assert rate_swing(o, 0, 80 * S) == "1 requests/s were sent in part 1 of its 8 and 3/s in part 4"
    # The counts' variance is 8 x 0.75 x 0.25 x 400 / 7 = 85.7, 5.71 times that of the pieces: 3.85 deviations.
    assert rate_swing(o, 0, 80 * S, deviations=3.8)
    assert rate_swing(o, 0, 80 * S, deviations=3.9) is None
    assert rate_swing(o, 0, 80 * S, least=0.7) is None  # 20 of 30
    assert rate_swing(o, 0, 30 * S) is None


def test_a_trend_by_hand() -> None:
    """60 arrivals, one a second, then 60 at twice that rate: 40 and 80 in the halves of 90 s; three quarters of them
    evenly spread show none."""
    sent = np.concatenate((np.arange(60.0), 60 + np.arange(60) / 2))
    o = observe(record(sent, sent + 0.1, sent + 1))
    assert dispersion(o) == 1
    assert rate_trend(o, 0, 90 * S) == ("1 requests/s were sent in the first half of it and 1.67/s in the second")
    assert rate_trend(o, 0, 60 * S) is None
    assert rate_trend(o, 0, 0.5 * S) is None


def test_a_burst_and_a_handful_have_no_steady_state() -> None:
    assert steady_window(observe(record(np.zeros(80), np.arange(80) + 1.0, np.arange(80) + 5.0))).state == "burst"
    few = steady_window(observe(record(np.arange(20.0), np.arange(20) + 0.1, np.arange(20) + 0.5)))
    assert (few.state, few.seconds) == ("too_short", None)
    assert steady_window(observe(RunRecord({"run_id": "r", "engine": "ours"}))).state == "too_short"


def test_rates_inside_the_window_by_hand() -> None:
    # One request a second with two tokens and 10 prompt tokens, each over half a second later; TTFT always 0.1 s.
    sent = np.arange(100.0)
    run = compute_tables(record(sent, sent + 0.1, sent + 0.5))["runs"].iloc[0]
    # From the first request sent after 95 % of the lives, which are half a second.
    assert (run.steady_state, run.steady_start_s, run.steady_end_s) == ("steady", 1.0, 99.0)
    assert run.steady_n == 98  # the last is sent at the end of the window
    assert run.steady_gen_tok_s == pytest.approx(2.0)
    assert run.steady_prompt_tok_s == pytest.approx(10.0)
    assert run.steady_request_s == pytest.approx(1.0)
    assert run.gen_tok_s == pytest.approx(200 / 99.5)
    assert (run.steady_ttft_p50_ms, run.steady_itl_p99_ms) == (pytest.approx(100), pytest.approx(400))
