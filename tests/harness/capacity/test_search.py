"""The search on a made-up engine whose capacity is known, loads at any rate, and what binds."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.capacity.binding import binding_constraint, busy_share, littles_law
from harness.capacity.load import Load
from harness.capacity.page import latency_over_rate
from harness.capacity.plan import short_words
from harness.capacity.search import NothingMeets, Point, Trials, find_capacity, run_at, search
from harness.capacity.words import seed_rows
from harness.record import RunRecord
from harness.simulate.step_time import Cost
from harness.slo import Slo
from workloads import build_workload
from workloads.arrivals import Burst, ClosedLoop, Constant, Gamma, Poisson
from workloads.config import LengthConfig, SessionsWorkload, SyntheticWorkload
from workloads.workload import Workload


def known(capacity: dict[int, float]) -> Any:
    def run(rate: float, seed: int) -> Point:
        values = {"slo_broken": None if rate <= capacity[seed] else "ttft_p95_ms 900 > 500"}
        return Point(rate, seed, values, rate <= capacity[seed], RunRecord({}))

    return run


@pytest.mark.parametrize("start", [1.0, 0.01, 900.0, 37.0])
def test_bisection_finds_a_known_capacity(start: float) -> None:
    found = search(known({0: 37.0, 1: 40.0, 2: 43.0}), (0, 1, 2), start)
    for rate, true in zip(found.by_seed, (37.0, 40.0, 43.0), strict=True):
        assert true / 1.021 < rate <= true
    assert found.low is not None
    assert found.high is not None
    assert found.low < 37.0 < found.rate <= 40.0 < found.high  # t for two degrees of freedom is 4.3
    assert all(p.met for p in found.kept)
    assert not any(p.met for p in found.broken)
    assert len(found.points) < 60


def test_one_seed_has_no_interval() -> None:
    found = search(known({5: 3.0}), (5,), 1.0)
    assert (found.low, found.high) == (None, None)


def test_an_slo_that_nobody_meets_and_one_that_limits_nothing() -> None:
    with pytest.raises(NothingMeets, match=r"no rate keeps the SLO: .* ttft_p95_ms 900 > 500"):
        search(known({0: 0.0}), (0,), 1.0)
    with pytest.raises(
        ValueError, match="even when all 0 requests of a trial come at once: plan with a longer workload"
    ):
        search(known({0: 1e9}), (0,), 1.0)


def synthetic(arrival: Any, requests: int = 60) -> Workload:
    lengths = LengthConfig("uniform", low=8, high=40)
    settings = SyntheticWorkload(requests=requests, prompt_tokens=lengths, output_tokens=LengthConfig("fixed", value=8))
    return build_workload(settings, arrival, vocab_size=500, seed=0)


def test_conversations_are_drawn_anew_as_many_as_a_trial_takes() -> None:
    """Six of two to five turns are 18 requests: at once they break no limit, however high the rate."""
    turns, tokens = LengthConfig("uniform", low=2, high=5), LengthConfig("uniform", low=8, high=40)
    settings = SessionsWorkload(sessions=6, turns=turns, new_tokens=tokens, output_tokens=tokens)
    load = Load.of(build_workload(settings, Poisson(1.0), vocab_size=500, seed=0))
    assert len(load.workload) < 30
    short, long = load.trial(100, 1), load.trial(400, 1)
    assert (len(short.requests), len(long.requests)) == (100, 400)
    assert len(short.gaps) == sum(r.follows is None for r in short.requests) > 20
    assert {r.prompt_ids for r in load.trial(100, 2).requests} != {r.prompt_ids for r in short.requests}
    sent = long.at(20.0).requests
    openings = [r.due_s for r in sent if r.follows is None]
    assert len(sent) / openings[-1] == pytest.approx(20.0, rel=0.1)


def test_a_rate_changes_nothing_but_the_times() -> None:
    load = Load.of(synthetic(Poisson(3.0)))
    trial, other = load.trial(100, 1), load.trial(100, 2)
    slow, fast = trial.at(2.0), trial.at(8.0)
    assert [r.prompt_ids for r in slow.requests] == [r.prompt_ids for r in fast.requests]
    assert [r.due_s for r in slow.requests] == pytest.approx([4 * r.due_s for r in fast.requests])
    assert len(fast) == 100
    span = fast.requests[-1].due_s - fast.requests[0].due_s
    assert 99 / span == pytest.approx(8.0)
    assert [r.prompt_ids for r in other.at(8.0).requests] != [r.prompt_ids for r in fast.requests]


def test_bursts_become_poisson_and_recorded_gaps_are_kept(by_hand: SimpleNamespace) -> None:
    gaps = np.diff([r.due_s for r in Load.of(synthetic(Burst())).trial(400, 0).at(1.0).requests])
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1.0, abs=0.15)
    recorded = by_hand.workload(*[(t, 5, 5) for t in (0.0, 0.1, 0.2, 5.0, 5.1, 5.2)])
    trial = Load.of(recorded).trial(6, 0)
    times = [r.due_s for r in trial.at(1.0).requests]
    assert sorted(np.diff([0.0, *times]))[-1] == pytest.approx(4.8 / (5.2 / 5))
    assert {r.request_id for r in trial.requests} == {f"r{i}" for i in range(6)}
    with pytest.raises(ValueError, match="closed loop"):
        Load.of(synthetic(ClosedLoop(3)))


def test_the_capacity_of_a_server_by_hand(by_hand: SimpleNamespace) -> None:
    """Prompts of one token and one new token: a step of 10 ms serves up to 8 requests, so 800/s at the most."""
    workload = by_hand.workload(*[(i / 10, 1, 1) for i in range(400)])
    model = by_hand.model(Cost(0.0), Cost(10.0), Cost(0.0))
    found = find_capacity(
        Load.of(workload), by_hand.setup(), model, Slo(ttft_p95_ms=40), requests=400, seeds=(0,), start=10.0
    )
    assert 700 < found.rate < 850
    binding = binding_constraint(found.broken[0])
    assert binding.name == "max_requests"
    assert "8 places" in binding.reason


def bound(by_hand: SimpleNamespace, slo: Slo, rate: float, model: Any, *requests: int, **changes: Any) -> str:
    prompt, new = requests
    workload = by_hand.workload(*[(i / 10, prompt, new) for i in range(120)])
    point = run_at(Load.of(workload).trial(120, 0), rate, 0, by_hand.setup(**changes), model, slo)
    assert not point.met
    return binding_constraint(point).name


def test_what_binds_by_case(by_hand: SimpleNamespace) -> None:
    long = {"max_requests_per_batch": 64, "max_batch_tokens": 64}
    slow = by_hand.model(Cost(0.0), Cost(10.0), Cost(0.0))
    quick = by_hand.model(Cost(0.0), Cost(1.0), Cost(0.0))
    assert bound(by_hand, Slo(ttft_p95_ms=50), 200.0, quick, 20, 60, num_blocks=60, **long) == "kv_memory"
    assert bound(by_hand, Slo(ttft_p95_ms=5), 1.0, slow, 4, 2, **long) == "ttft"
    assert bound(by_hand, Slo(itl_p99_ms=5), 1.0, slow, 4, 3, **long) == "itl"
    prompts = by_hand.model(Cost(0.0), Cost(0.0, (0.0,), (1.0,)), Cost(0.0))
    assert bound(by_hand, Slo(ttft_p95_ms=400), 60.0, prompts, 30, 1, num_blocks=2000, **long) == "compute"


def test_littles_law_holds_and_the_share_of_busy_time(by_hand: SimpleNamespace) -> None:
    workload = by_hand.workload(*[(i / 10, 8, 10) for i in range(100)])
    model = by_hand.model(Cost(0.0), Cost(2.0), Cost(0.0))
    point = run_at(Load.of(workload).trial(100, 0), 20.0, 0, by_hand.setup(), model, None)
    law = littles_law(point)
    assert law.predicted == pytest.approx(20 * 0.021, rel=0.1)  # ten steps of 2 ms, and what is left of one before
    assert abs(law.difference) < 0.05
    assert busy_share(point) == pytest.approx(20 * 0.020, rel=0.15)


SLOW = Slo("loose", ttft_p95_ms=60_000)


@pytest.mark.parametrize("requests", [60, 150])
def test_a_rate_above_the_models_maximum_is_never_carried(by_hand: SimpleNamespace, requests: int) -> None:
    """Eight places, answers of 50 tokens, steps of 10 ms: 16/s at the most, though nobody waits a minute for a place
    while a trial of that length lasts."""
    workload = Load.of(synthetic_of(50))
    model = by_hand.model(Cost(0.0), Cost(10.0), Cost(0.0))
    setup = by_hand.setup(num_blocks=2000)
    found = find_capacity(workload, setup, model, SLOW, requests=requests, seeds=(1,), start=14.0)
    carried = [p for p in found.points if p.met]
    assert all(p.rate < 16 * 1.06 for p in carried)
    if requests == 150:
        assert found.rate > 13
    above = run_at(workload.trial(found.requests, 1), 24.0, 1, setup, model, SLOW)
    assert above.values["slo_met"]
    assert above.falls_behind
    assert not above.met
    assert above.judged is not None
    assert above.judged.offered_tok_s is not None
    assert above.judged.generated_tok_s is not None
    assert above.judged.generated_tok_s == pytest.approx(800, rel=0.05)
    assert above.judged.generated_tok_s < 0.9 * above.judged.offered_tok_s


def synthetic_of(tokens: int, arrival: Any = Poisson(3.0)) -> Workload:  # noqa: B008 (frozen)
    lengths = LengthConfig("uniform", low=1, high=3)
    answers = LengthConfig("fixed", value=tokens)
    settings = SyntheticWorkload(requests=60, prompt_tokens=lengths, output_tokens=answers)
    return build_workload(settings, arrival, vocab_size=500, seed=0)


def test_longer_trials_find_the_same_capacity(by_hand: SimpleNamespace) -> None:
    """A decode step takes longer the more rows it has, and a trial of 100 requests ends before the places fill: it
    grows, and twice the requests move the capacity by no more than its interval."""
    load = Load.of(synthetic_of(10))
    model = by_hand.model(Cost(0.0), Cost(1.0, row_ms=3.0), Cost(0.0))  # 333 tokens/s: 33 requests/s at the most
    setup = by_hand.setup(num_blocks=20_000, max_requests_per_batch=256)
    slo = Slo("gaps", itl_p99_ms=80)
    once, twice = (find_capacity(load, setup, model, slo, requests=n, seeds=(0, 1, 2), start=26.0) for n in (100, 200))
    assert once.requests > 100
    assert once.low is not None
    assert once.high is not None
    assert once.low <= twice.rate <= once.high
    assert max(p.rate for p in twice.points if p.met) < 1000 / 30 * 1.05


def test_a_trial_that_may_not_grow_says_so(by_hand: SimpleNamespace) -> None:
    model = by_hand.model(Cost(0.0), Cost(10.0), Cost(0.0))
    setup = by_hand.setup(num_blocks=2000)
    load = Load.of(synthetic_of(50))
    found = find_capacity(load, setup, model, SLOW, requests=40, most=40, seeds=(0,), start=14.0)
    assert found.short
    assert found.requests == 40
    assert "trials ended at 40 requests" in short_words(found)
    assert "raise requests" in short_words(found)


def test_a_longer_trial_of_a_trace_holds_the_shorter_one(by_hand: SimpleNamespace) -> None:
    load = Load.of(by_hand.workload(*[(i / 10, 5, 5) for i in range(200)]))
    for seed in range(5):
        short, longer = ({r.request_id for r in load.trial(n, seed).requests} for n in (50, 120))
        assert len(short) == 50
        assert short < longer


def rising(by_hand: SimpleNamespace) -> tuple[Any, Any]:
    """Steps that are longer the more rows they have: 64 places, 296/s of answers of 6 tokens at the most; the number in
    the system rises to its level over many stays."""
    return (
        by_hand.setup(num_blocks=20_000, max_requests_per_batch=64, max_batch_tokens=128),
        by_hand.model(Cost(0.0), Cost(4.0, row_ms=0.5), Cost(0.0)),
    )


def queueing(by_hand: SimpleNamespace) -> tuple[Any, Any]:
    """Eight places and steps of 10 ms: 133/s of answers of 6 tokens at the most."""
    return by_hand.setup(num_blocks=2000), by_hand.model(Cost(0.0), Cost(10.0), Cost(0.0))


@pytest.mark.parametrize("arrival", [Constant(3.0), Poisson(3.0), Gamma(3.0, 2.0)], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(("engine", "most"), [(rising, 64 / 36 / 6 * 1000), (queueing, 8 / 0.06)])
def test_how_often_a_verdict_is_false(by_hand: SimpleNamespace, engine: Any, most: float, arrival: Any) -> None:
    """20 seeds below and above what the engine can do, with limits that say nothing."""
    setup, model = engine(by_hand)
    load = Load.of(synthetic_of(6, arrival))

    def refused(rate: float, seed: int) -> bool:
        return not Trials(load, setup, model, SLOW, (seed,), 100, 400).run(rate, seed).met

    assert sum(refused(0.85 * most, seed) for seed in range(20)) <= 1
    assert sum(refused(1.25 * most, seed) for seed in range(20)) >= 19


def test_falling_behind_is_seen_twice_and_named(by_hand: SimpleNamespace) -> None:
    setup, model = queueing(by_hand)
    found = find_capacity(Load.of(synthetic_of(6)), setup, model, SLOW, requests=150, seeds=(0, 1), start=120.0)
    assert all(p.only_behind and p.confirmed for p in found.broken)
    assert all(len(p.record.requests) == 2 * found.requests for p in found.broken)
    header, rows = seed_rows(found)
    assert len(rows) == 2
    for row, broken in zip(rows, found.broken, strict=True):
        why = row[header.index("because")]
        assert re.fullmatch(r"falls behind: \S+ requests/s sent, \S+/s (admitted|ended) over \S+ s, as in .*", why)
        assert why.startswith(str(broken.why_not))
    figure, caption = latency_over_rate(found, SLOW)
    crosses = [line for line in figure.axes[0].lines if line.get_label() == "falls behind"]
    assert sorted(crosses[0].get_xdata()) == sorted(p.rate for p in found.points if p.falls_behind)
    assert "crossed" in caption


def test_a_trace_too_short_to_look_twice_says_so(by_hand: SimpleNamespace) -> None:
    setup, model = queueing(by_hand)
    load = Load.of(by_hand.workload(*[(i / 10, 2, 6) for i in range(300)]))
    found = find_capacity(load, setup, model, SLOW, requests=300, seeds=(0,), start=120.0)
    assert found.broken[0].confirmed is False
    assert found.unconfirmed
    assert "in one trial only" in seed_rows(found)[1][0][3]


def test_gpus_are_counted_by_the_lower_of_interval_and_worst_seed() -> None:
    few = search(known({0: 30.0, 1: 33.0, 2: 36.0}), (0, 1, 2), 20.0)
    assert few.low is not None
    assert few.sure == few.low < min(few.by_seed)
    many = search(known({s: 30.0 if s == 0 else 40.0 for s in range(12)}), range(12), 20.0)
    assert many.low is not None
    assert many.sure == min(many.by_seed) < many.low
