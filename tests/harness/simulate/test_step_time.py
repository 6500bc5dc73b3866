"""Costs of steps by hand, their fit, and the model's file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.report.read import read_results
from harness.simulate import ModelError, StepTimeModel, fit_steps
from harness.simulate.fit import Observed
from harness.simulate.nnls import nonnegative_least_squares
from harness.simulate.step_time import KINDS, Cost, Kind, Spread, Work


def test_a_cost_by_hand() -> None:
    cost = Cost(1.0, (0.0, 10.0), (0.1, 0.02), row_ms=0.5, key_ms=0.001, pair_ms=0.0001)
    assert cost.fitted_ms(Work(4, 2, 100, 0)) == pytest.approx(1.0 + 0.4 + 1.0 + 0.1)
    assert cost.fitted_ms(Work(30, 1, 0, 1000)) == pytest.approx(1.0 + 1.0 + 20 * 0.02 + 0.5 + 0.1)


def test_draws_ahead_are_the_draws() -> None:
    costs = [Cost(1.0, ratios=(0.5, 1.0, 1.5)), Cost(1.0, ratios=(0.1, 0.2)), Cost(1.0, ratios=(7.0,))]
    one, other = Spread(np.random.default_rng(3)), Spread(np.random.default_rng(3))
    single = [[one.draw(cost, cost.mean_ratio) for cost in costs] for _ in range(5000)]
    ahead = list(zip(*other.peek(costs, 2000), strict=True))
    other.skip(3 * 1500)
    assert [tuple(row) for row in single[:2000]] == ahead
    assert other.draw(costs[0], 1.0) == single[1500][0]
    assert Spread(None).draw(costs[0], costs[0].mean_ratio) == 1.0


def test_the_file_gives_back_the_model(by_hand: SimpleNamespace) -> None:
    assert StepTimeModel.from_json(by_hand.true_model.to_json()) == by_hand.true_model
    for text in ("{}", "no json", by_hand.true_model.to_json().replace('"format": 1', '"format": 9')):
        with pytest.raises(ModelError, match="fit"):
            StepTimeModel.from_json(text)


def test_an_unmeasured_kind_is_the_other_start_or_an_error(by_hand: SimpleNamespace) -> None:
    full = by_hand.true_model
    only = Kind(False, True)
    model = StepTimeModel({only: full.host[only]}, {only: full.device[only]}, full.between, 0.0)
    assert model.kind_for(Kind(False, False)) == only
    with pytest.raises(ModelError, match="no step with prompt tokens"):
        model.kind_for(Kind(True, False))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_least_squares_meet_the_conditions_of_an_optimum(seed: int) -> None:
    """Karush-Kuhn-Tucker: no negative weight; no descent where a weight is 0, none at all where it is not."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(30, 5))
    b = a @ np.array([1.0, 0.0, 2.0, 0.0, 0.5]) + rng.normal(size=30)
    x = nonnegative_least_squares(a, b)
    gradient = a.T @ (b - a @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-6


def test_a_fit_finds_the_costs_that_made_the_log(measured_dir: Path, by_hand: SimpleNamespace) -> None:
    """The folder's steps were made with known costs: the fit predicts other steps as they do."""
    model = fit_steps(read_results(measured_dir), ["run0", "run1"])
    true = by_hand.true_model
    assert set(model.device) == {Kind(False, False), Kind(True, False)}
    for kind, work in ((KINDS[0], Work(6, 6, 500, 0)), (KINDS[2], Work(102, 3, 220, 5050))):
        expected = true.host[kind].fitted_ms(work) + true.device[kind].fitted_ms(work)
        found = model.host[kind].fitted_ms(work) * model.host[kind].mean_ratio
        found += model.device[kind].fitted_ms(work) * model.device[kind].mean_ratio
        assert found == pytest.approx(expected, rel=0.03)
    assert model.between.fitted_ms(Work(0, 3, 0, 0)) == pytest.approx(0.1, rel=0.05)
    assert model.delivery_ms == pytest.approx(0.3, rel=0.05)
    assert all(r.steps >= 5 for r in model.residuals)
    decode = next(r for r in model.residuals if r.part == "device" and r.kind == "decode, launched")
    assert 0 < decode.median_error < 0.06  # the spread that was drawn, no less


def test_overlapped_steps_own_the_device_from_the_end_of_the_one_before(
    measured_dir: Path,
) -> None:
    frame = read_results(measured_dir).of_run("steps", "run0").head(3).copy()
    frame["t_s"] = [0.000, 0.002, 0.006]
    frame["schedule_ms"] = [1.0, 1.0, 1.0]
    frame["step_ms"] = [5.0, 8.0, 9.0]  # ends at 5, 10 and 15 ms
    frame["decode_rows"] = [1, 1, 1]
    seen = Observed.read(frame, overlapped=True)
    assert seen.device == pytest.approx([4.0, 5.0, 5.0])
    assert seen.between[0] == pytest.approx(1.0)  # from 5 ms, when the first was collected, to 6 ms
    assert np.isnan(seen.between[1:]).all()


def test_no_step_log_is_said(measured_dir: Path) -> None:
    results = read_results(measured_dir)
    with pytest.raises(ModelError, match="no step log"):
        fit_steps(results, [])
