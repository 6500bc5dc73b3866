"""Costs of steps by hand, their fit, and the model's file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runner.batch import StepShape
from engine.runner.buckets import StepBuckets
from harness.report.read import Results, read_results
from harness.simulate import ModelError, StepTimeModel, fit_steps
from harness.simulate.client_times import delivery_ms, wake_ms
from harness.simulate.fit import Observed, beyond, cost_of, regress
from harness.simulate.nnls import nonnegative_least_squares
from harness.simulate.setup import attention_of, setting
from harness.simulate.step_time import KINDS, Cost, Kind, Spread, Work
from harness.simulate.validation import stalls


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
    for text in ("{}", "no json", by_hand.true_model.to_json().replace('"format": 3', '"format": 9')):
        with pytest.raises(ModelError, match="fit"):
            StepTimeModel.from_json(text)


def test_an_unmeasured_kind_is_the_other_start_or_an_error(by_hand: SimpleNamespace) -> None:
    full = by_hand.true_model
    only = Kind(False, True)
    model = StepTimeModel({only: full.host[only]}, {only: full.device[only]}, full.between, 0.0)
    assert model.kind_for(Kind(False, False)) == only
    with pytest.raises(ModelError, match="too few steps with prompt tokens"):
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
    seen = Observed.read(frame, overlapped=True, max_rows=8)
    assert seen.device == pytest.approx([4.0, 5.0, 5.0])
    assert seen.between[0] == pytest.approx(1.0)  # from 5 ms, when the first was collected, to 6 ms
    assert np.isnan(seen.between[1:]).all()


def on_a_gpu(folder: Path, by_hand: SimpleNamespace) -> Results:
    """The folder's runs as of an engine that plans a step ahead on a GPU, whose own clock told the true device costs:
    decode steps replayed, every other step with prompt tokens launched in 40 ms, done 2 ms after its last launch."""
    results = read_results(folder)
    steps, config = results.tables["steps"], results.tables["config"]
    config.loc[config["field"] == "use_async_batching", "value"] = "true"
    rng = np.random.default_rng(0)
    prefill, odd = (steps["prefill_rows"] > 0).to_numpy(), (steps["step"] % 2 == 1).to_numpy()
    launched = prefill & odd
    rows = zip(
        steps["decode_rows"] + steps["prefill_tokens"],
        steps["decode_rows"] + steps["prefill_rows"],
        steps["kv_tokens"],
        steps["prefill_pairs"],
        strict=True,
    )
    true = next(iter(by_hand.true_model.device.values()))
    gpu = np.array([true.fitted_ms(Work(*map(int, row))) for row in rows]) * rng.uniform(0.97, 1.03, len(steps))
    steps["graph"] = ~launched
    steps["schedule_ms"] = np.where(launched, 40.0, 1.0)
    steps["gpu_ms"] = np.where(launched, 39.0, gpu)
    steps["step_ms"] = np.where(launched, 42.0, 1.0 + gpu)
    steps["t_s"] = np.arange(len(steps)) * 0.2  # far apart: nothing hides behind the step before
    return results


def test_the_clock_of_the_device_tells_work_from_launches(measured_dir: Path, by_hand: SimpleNamespace) -> None:
    """A launched step that only waited for its launches teaches nothing about the device: its cost is that of replayed
    steps of the same work."""
    results = on_a_gpu(measured_dir, by_hand)
    seen = Observed.read(results.of_run("steps", "run0"), overlapped=True, max_rows=8)
    assert seen.timed.all()
    assert 3 < seen.launch_bound.sum() < seen.prefill.sum()
    assert not seen.blocked.any()
    model = fit_steps(results, ["run0", "run1"])
    assert model.launch_tail_ms == pytest.approx(2.0, abs=0.01)
    work, true = Work(102, 3, 220, 5050), next(iter(by_hand.true_model.device.values()))
    for kind in (Kind(True, False), Kind(True, True)):
        found = model.device[kind].fitted_ms(work) * model.device[kind].mean_ratio
        assert found == pytest.approx(true.fitted_ms(work), rel=0.03)
    assert model.host[Kind(True, False)].fitted_ms(work) == pytest.approx(40.0, rel=0.01)
    assert model.host[Kind(True, True)].fitted_ms(work) == pytest.approx(1.0, rel=0.01)
    assert Kind(False, False) in model.device  # never measured: the work of one kind, the start of another
    assert next(r for r in model.residuals if r.kind == "decode, launched").steps == 0


def test_a_launch_that_waited_for_the_device_and_a_stall_do_not_count_as_work(
    measured_dir: Path, by_hand: SimpleNamespace
) -> None:
    results = on_a_gpu(measured_dir, by_hand)
    steps = results.tables["steps"]
    launched = steps.index[~steps["graph"].astype(bool) & (steps["run_id"] == "run0")]
    steps.loc[launched[-1], ["schedule_ms", "gpu_ms", "step_ms"]] = 9000.0, 8999.0, 9002.0  # something was compiled
    steps.loc[launched[1], ["schedule_ms", "gpu_ms", "step_ms"]] = 90.0, 45.0, 140.0  # its queue was full
    assert Observed.read(results.of_run("steps", "run0"), overlapped=True, max_rows=8).blocked.sum() == 1
    model = fit_steps(results, ["run0", "run1"])
    host = model.host[Kind(True, False)]
    assert host.fitted_ms(Work(102, 3, 220, 5050)) * max(host.ratios) == pytest.approx(40.0, rel=0.02)
    assert any("took 9000 ms, which no work explains" in note for note in stalls(results, "run0", model))
    assert stalls(results, "run1", model) == []


def test_when_a_step_is_done_by_hand(by_hand: SimpleNamespace) -> None:
    """Begun at 10 ms, launched at 30, free from 12 on, 5 ms of work. Replayed: from its launch on. Launched: its work
    is done long before the last launch, whose 2 ms follow. With 50 ms of work the launches are hidden."""
    model = replace(by_hand.true_model, launch_tail_ms=2.0)
    replayed, launched = Kind(True, True), Kind(True, False)
    assert model.done_ms(replayed, 12.0, 10.0, 30.0, 5.0) == 35.0
    assert model.done_ms(launched, 12.0, 10.0, 30.0, 5.0) == 32.0
    assert model.done_ms(launched, 12.0, 10.0, 30.0, 50.0) == 62.0
    assert by_hand.true_model.done_ms(launched, 12.0, 10.0, 30.0, 5.0) == 35.0  # on a CPU one follows the other


def test_the_larger_half_of_the_sizes_tells_what_lies_beyond() -> None:
    """Slopes 3 and 1 with the bend at 4, largest 8: from 4 to 8 it grew by 1 a token."""
    knots, slopes = np.array([0.0, 4.0, 8.0]), np.array([3.0, 1.0, 99.0])
    assert beyond(knots, slopes, 8.0) == pytest.approx(1.0)
    assert beyond(knots, slopes, 6.0) == pytest.approx((3 * 1 + 1 * 2) / 3)


def test_room_for_more_decode_rows_costs_what_it_was_measured_to_cost() -> None:
    """Replayed steps of 128 and 256 tokens, 2 ms and 0.01 a token; with room for 64 decode rows 1.2 ms more."""
    rng = np.random.default_rng(0)
    n = 400
    tokens, places = rng.choice([128.0, 256.0], n), rng.choice([16.0, 64.0], n)
    yes, zero = np.ones(n, dtype=bool), np.zeros(n)
    ms = (2 + 0.01 * tokens + 1.2 * (places >= 64)) * rng.uniform(0.99, 1.01, n)
    seen = Observed(yes, yes, tokens, zero + 5, zero + 1, places, zero, zero, zero + 1, ms, zero, yes, ms)
    cost, residual = cost_of(Kind(True, True), seen, regress("device", seen, seen.device, yes))
    assert cost.places == (64,)
    assert cost.place_ms[0] == pytest.approx(1.2, rel=0.02)
    assert cost.fitted_ms(Work(256, 5, 0, 0, 64)) * cost.mean_ratio == pytest.approx(5.76, rel=0.01)
    assert cost.fitted_ms(Work(256, 5, 0, 0, 16)) * cost.mean_ratio == pytest.approx(4.56, rel=0.01)
    assert residual.median_error < 0.01


def test_the_host_plans_a_row_with_prompt_tokens_for_longer() -> None:
    """Half a ms, 0.01 a row, and 0.3 for each row with prompt tokens; the device's part does not know those rows."""
    rng = np.random.default_rng(0)
    n = 400
    rows, prefills = rng.integers(8, 64, n).astype(float), rng.integers(1, 8, n).astype(float)
    yes, zero = np.ones(n, dtype=bool), np.zeros(n)
    ms = (0.5 + 0.01 * rows + 0.3 * prefills) * rng.uniform(0.99, 1.01, n)
    seen = Observed(yes, yes, rows, rows, prefills, zero, zero, zero, ms, ms, zero, yes, ms)
    kind = Kind(True, True)
    cost, residual = cost_of(kind, seen, regress("host", seen, seen.host, yes, constant=True))
    assert (cost.base_ms, cost.row_ms, cost.prefill_ms) == pytest.approx((0.5, 0.01, 0.3), rel=0.03)
    assert cost.fitted_ms(Work(0, 20, 0, 0, prefills=4)) == pytest.approx(1.9, rel=0.01)
    assert residual.median_error < 0.01
    of_device, _ = cost_of(kind, seen, regress("device", seen, seen.device, yes))
    assert of_device.prefill_ms == 0


def test_behind_a_step_without_a_token_the_devices_own_clock_tells(measured_dir: Path) -> None:
    """Nobody waits for such a step, so the next one's tokens come when both are done."""
    frame = read_results(measured_dir).of_run("steps", "run0").head(3).copy()
    frame["graph"], frame["schedule_ms"] = True, 1.0
    frame["t_s"], frame["step_ms"], frame["gpu_ms"] = [0.0, 0.0015, 0.010], [1.0, 8.0, 6.0], [np.nan, 3.0, 5.9]
    seen = Observed.read(frame, overlapped=False, max_rows=64)
    assert list(seen.timed) == [False, True, True]
    assert seen.device[1] == pytest.approx(3.0)  # not the 7 ms from its launch to its tokens
    assert seen.device[2] == pytest.approx(5.0)  # its events hold its launch: the host tells better


def test_the_room_of_a_replayed_step_is_that_of_the_captured_one(measured_dir: Path) -> None:
    frame = read_results(measured_dir).of_run("steps", "run0").head(4).copy()
    frame["graph"] = [True, True, True, False]
    frame["prefill_rows"], frame["prefill_tokens"] = [1, 1, 0, 1], [100, 100, 0, 100]
    frame["decode_rows"], frame["padded_rows"] = [20, 10, 24, 20], [8, 18, 0, 0]
    seen = Observed.read(frame, overlapped=True, max_rows=1024)
    buckets = StepBuckets.plan(
        max_rows=1024,
        max_tokens=8192,
        table_pages=32,
        page_size=256,
        groups=1,
        mixed=True,
        decode=True,
        any_lengths=True,
    )
    captured = [buckets.find(StepShape(rows, 1, 100, rows + 1, 3, 1)) for rows in (20, 10)]
    assert [shape.decodes for shape in captured if shape is not None] == [64, 16]
    assert list(seen.places) == [64, 16, 0, 0]


def test_delivery_grows_with_the_rows_of_a_step(measured_dir: Path) -> None:
    """First tokens 0.2 ms after the end of their step and 0.05 a row of it; one in ten comes 5 ms late."""
    results = read_results(measured_dir)
    steps, requests = results.of_run("steps", "run0"), results.tables["requests"]
    rows = (steps["decode_rows"] + steps["prefill_rows"]).to_numpy(dtype=float)
    mine = requests.index[requests["run_id"] == "run0"]
    by_rows = np.argsort(rows, kind="stable")
    chosen = by_rows[np.linspace(0, len(rows) - 1, len(mine)).astype(int)]
    assert rows[chosen].max() > 2 * rows[chosen].min()
    late = np.where(np.arange(len(mine)) % 10 == 5, 5.0, 0.0)
    ends = steps["t_s"].to_numpy(dtype=float) + steps["step_ms"].to_numpy(dtype=float) / 1000
    # Far apart, so that a late token is not taken for one of the next step.
    apart = np.arange(len(steps)) * 0.1
    results.tables["steps"].loc[steps.index, "t_s"] = steps["t_s"].to_numpy(dtype=float) + apart
    requests.loc[mine, "t_first_s"] = (ends + apart)[chosen] + (0.2 + 0.05 * rows[chosen] + late) / 1000
    constant, by_row = delivery_ms(results, ["run0"])
    assert by_row == pytest.approx(0.05, rel=0.05)
    assert constant == pytest.approx(0.2, abs=0.02)
    requests.loc[mine, "t_first_s"] = (ends + apart)[int(by_rows[0])] + 0.0003
    assert delivery_ms(results, ["run0"]) == (pytest.approx(0.3, abs=0.001), 0.0)  # one size of step says no more


def test_waking_is_what_an_idle_engine_takes_beyond_sending(measured_dir: Path) -> None:
    """Sent at 10 ms while nobody was there, begun at 10.6: 0.1 for sending, 0.5 for waking. The second step was begun
    for a request that was sent while the first ran: it tells nothing."""
    results = read_results(measured_dir)
    steps = results.of_run("steps", "run0").head(3).copy()
    steps["decode_rows"], steps["prefill_rows"] = [0, 0, 3], [1, 1, 0]
    steps["t_s"], steps["step_ms"] = [0.0106, 0.0206, 0.0300], [10.0, 5.0, 5.0]
    requests = results.of_run("requests", "run0").head(2).copy()
    requests["t_submit_s"] = [0.010, 0.015]
    results = replace(results, tables={**results.tables, "steps": steps, "requests": requests})
    assert wake_ms(results, ["run0"], 0.1) == pytest.approx(0.5)
    assert wake_ms(results, [], 0.1) == 0.0


def test_no_step_log_is_said(measured_dir: Path) -> None:
    results = read_results(measured_dir)
    with pytest.raises(ModelError, match="no step log"):
        fit_steps(results, [])


STAGES = Path(__file__).parents[3] / "results" / "reference" / "h200" / "stages" / "qwen3-4b"


def test_steps_of_a_gpu_one_after_the_other_tell_the_devices_time() -> None:
    """Replayed: from the launch to the tokens, for the events hold the launch. Launched: what the events say."""
    runs = read_results(STAGES / "prefix_sharing")
    run_id = runs.runs["run_id"].iloc[0]
    steps = runs.of_run("steps", run_id)
    graph = steps["graph"].astype(bool).to_numpy()
    launched = steps.assign(graph=False)
    assert graph.all()
    assert steps["gpu_ms"].notna().all()
    replayed, by_kernel = (Observed.read(table, False, 1024) for table in (steps, launched))
    tail = (steps["step_ms"] - steps["schedule_ms"]).to_numpy(float)
    assert replayed.timed.all()
    assert replayed.device == pytest.approx(tail, abs=0.5)
    assert by_kernel.timed.all()
    assert by_kernel.device == pytest.approx(steps["gpu_ms"].to_numpy(float))
    assert (by_kernel.device > replayed.device - 0.5).all()


def test_the_same_device_is_found_whether_its_steps_were_launched_or_replayed() -> None:
    """Three experiments with prompts of 640 to 4,096 tokens and the same kernels; in the first, and in it alone, some
    of the steps with prompts were launched. Within 10 %, and of a plausible speed."""
    found, kinds = [], []
    for name in ("attention_backend", "prefix_sharing", "decode_fast_path"):
        results = read_results(STAGES / name)
        ids = [str(run_id) for run_id in results.runs["run_id"]]
        model = fit_steps(results, [run_id for run_id in ids if attention_of(results, run_id) == "triton"])
        assert max(r.median_error for r in model.residuals if r.part == "device") < 0.03
        kinds.append({str(r.kind) for r in model.residuals if r.part == "device" and r.steps})
        for kind in model.device:
            found.append(model.device[kind].fitted_ms(Work(2048, 20, 20_000, 2048 * 1000, 32)))
    assert ["prefill, launched" in measured for measured in kinds] == [True, False, False]
    assert max(found) < 1.1 * min(found)
    assert 28 < min(found) < 40  # 14.7 TFLOP in products alone, of a device that does 400 to 600 a second


def test_prompts_longer_than_any_measured_are_told(by_hand: SimpleNamespace) -> None:
    model = replace(by_hand.true_model, longest_prompt=1024)
    assert model.unseen_prompts([1, 1024]) is None
    said = model.unseen_prompts([100, 1025, 4096, 9])
    assert said is not None
    assert said.startswith("50% of the prompts are longer (4,096 tokens at most) than any that was measured (1,024)")
    assert str(model.unseen_prompts([1] * 999 + [2000])).startswith("less than 1%")
    assert replace(model, longest_prompt=None).unseen_prompts([5000]) is None
    assert StepTimeModel.from_json(model.to_json()).longest_prompt == 1024


def test_steps_of_another_attention_backend_are_left_out() -> None:
    results = read_results(STAGES / "attention_backend")
    ids = [str(run_id) for run_id in results.runs["run_id"]]
    planned = [run_id for run_id in ids if setting(results, run_id, "attention_backend", None) == "triton"]
    model = fit_steps(results, [planned[0], *ids])
    assert len(planned) == 5
    assert set(model.source["runs"]) == set(planned)
    assert model.notes[0] == "5 runs with other attention than triton are left out of the fit"


def test_what_the_tables_do_not_hold_is_said() -> None:
    results = read_results(STAGES / "prefix_sharing")
    run_id = str(results.runs["run_id"].iloc[0])
    assert fit_steps(results, [run_id]).notes == ()
    tables = dict(results.tables)
    tables["steps"] = tables["steps"].assign(graph=pd.NA, gpu_ms=np.nan)
    tables["requests"] = tables["requests"].iloc[:0]
    said = fit_steps(replace(results, tables=tables), [run_id]).notes
    assert [any(word in note for note in said) for word in ("count as launched", "times of the device", "requests is")]
    assert len(said) == 3
    for length in (-1.0, np.inf):
        tables["steps"] = tables["steps"].assign(step_ms=length)
        with pytest.raises(ModelError, match="negative or infinite length"):
            fit_steps(replace(results, tables=tables), [run_id])
    tables["steps"] = tables["steps"].assign(step_ms=1.0, kv_tokens=pd.NA)
    with pytest.raises(ModelError, match=r"no step in .* has all of its times"):
        fit_steps(replace(results, tables=tables), [run_id])
