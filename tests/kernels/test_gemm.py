"""Tuned linear layers on the host: cuBLASLt's stand-in, times by hand, no device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from engine.kernels import gemm
from engine.kernels.autotune_cache import ChoiceCache
from engine.kernels.cublaslt import WORKSPACE_LIMIT, CublasLt
from engine.kernels.gemm import ANCHORS, MOST_USED, TunedLinear, tuned_linear, why_not_tuned
from engine.kernels.gemm_candidates import LinearCandidates, Problem

BF16 = torch.bfloat16
COLUMNS, DEPTH = 24, 16
ENVIRONMENT: dict[str, str | int | bool] = {"device": "none", "cublaslt": 130100, "torch": "2"}


class Times:
    """Seconds of a call by the algorithm it launches, torch's where it launches none; counts rounds, tells the time."""

    def __init__(self, host: Any, torch_seconds: float, **by_word: float) -> None:
        self.host, self.torch_seconds = host, torch_seconds
        self.by_word = {int(name[1:]): seconds for name, seconds in by_word.items()}
        self.rounds, self.closed, self.now = 0, 0, 0.0
        self.weights: list[int] = []

    def seconds_per_call(self, candidates: Sequence[Sequence[Callable[[], object]]], repeats: int) -> list[float]:
        self.rounds += 1
        self.now += 1.0
        return [self._seconds(calls) for calls in candidates]

    def _seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        before = len(self.host.launched)
        for call in calls[:2]:
            call()
        words = self.host.launched[before:]
        self.weights.append(len(calls))
        return self.by_word[words[0]] if words else self.torch_seconds

    def close(self) -> None:
        self.closed += 1

    def clock(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


def _weights(count: int = 3, biased: bool = False) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(COLUMNS, DEPTH, generator=generator).to(BF16),
            torch.randn(COLUMNS, generator=generator).to(BF16) if biased else None,
        )
        for _ in range(count)
    ]


def _inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, DEPTH, generator=torch.Generator().manual_seed(rows)).to(BF16)


def _tuned(weights: Any, host: Any, times: Times, folder: Path | None = None, **environment: str) -> TunedLinear:
    candidates = LinearCandidates(torch.device("cpu"), BF16, CublasLt(host), False)
    return TunedLinear(weights, candidates, times, ChoiceCache(folder), ENVIRONMENT | environment, times.clock)


@pytest.mark.parametrize("biased", [False, True])
def test_the_fastest_algorithm_serves_what_was_rehearsed(biased: bool, host_lt: Any) -> None:
    host, weights = host_lt(), _weights(biased=biased)
    times = Times(host, 10.0, w1=11.0, w2=8.0, w3=9.0)
    tuned = _tuned(weights, host, times)
    with tuned.learning():
        tuned(_inputs(4), *weights[0])
    assert times.closed == 1
    choice = tuned.choices()[Problem(4, COLUMNS, DEPTH, biased)]
    assert choice.candidate.startswith("cublaslt:02")
    assert (choice.seconds, choice.baseline_seconds) == (8.0, 10.0)
    host.launched.clear()
    rounds = times.rounds
    for weight, bias in weights:
        torch.testing.assert_close(tuned(_inputs(4), weight, bias), linear(_inputs(4), weight, bias), rtol=1e-2, atol=0)
    assert host.launched == [2, 2, 2]
    assert torch.equal(tuned(_inputs(5), *weights[0]), linear(_inputs(5), *weights[0]))  # not rehearsed
    assert host.launched == [2, 2, 2]
    assert times.rounds == rounds
    assert tuned.report().winners == {"cublaslt": 1}


def test_torch_stays_unless_beaten_by_more_than_noise(host_lt: Any) -> None:
    host, weights = host_lt(), _weights()
    tuned = _tuned(weights, host, Times(host, 10.0, w1=9.9, w2=9.85, w3=12.0))
    with tuned.learning():
        tuned(_inputs(4), *weights[0])
    host.launched.clear()
    assert torch.equal(tuned(_inputs(4), *weights[0]), linear(_inputs(4), *weights[0]))
    assert host.launched == []
    assert tuned.report().winners == {"torch": 1}


def test_rows_between_two_anchors_run_on_what_won_at_the_larger(host_lt: Any) -> None:
    host, weights = host_lt(accepts=lambda word, rows: rows != 40 or word != 3), _weights()
    times = Times(host, 10.0, w1=11.0, w2=8.0, w3=9.0)
    tuned = _tuned(weights, host, times)
    assert 24 not in ANCHORS
    with tuned.learning():
        tuned(_inputs(24), *weights[0])
        assert set(tuned.choices()) == {Problem(rows, COLUMNS, DEPTH, False) for rows in (24, 32)}
        assert host.asked == 1  # the library's list, once an anchor
        times.by_word[2] = 20.0
        tuned(_inputs(48), *weights[0])  # word 3 wins there, and does not suit 40 rows
        assert host.asked == 2
        tuned(_inputs(40), *weights[0])
        assert host.asked == 2
    chosen = {problem.rows: choice.candidate[:11] for problem, choice in tuned.choices().items()}
    assert chosen == {24: "cublaslt:02", 32: "cublaslt:02", 48: "cublaslt:03", 40: "torch"}
    assert tuned.report().winners == {"cublaslt": 2, "torch": 1}  # of the rows that were used


def test_anchors_are_tuned_beforehand_the_most_used_first(host_lt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(MOST_USED) == sorted(ANCHORS)
    monkeypatch.setattr(gemm, "TIME_LIMIT", 3.0)
    host, weights = host_lt(), _weights()
    tuned = _tuned(weights, host, Times(host, 10.0, w1=5.0, w2=20.0, w3=20.0))
    with tuned.learning(largest=60):
        assert {problem.rows for problem in tuned.choices()} == {1, 64, 32}
    assert tuned.report().untimed == len(ANCHORS[: ANCHORS.index(64) + 1]) - 3


def test_wrong_and_failing_candidates_are_left_out(host_lt: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host, weights = host_lt(wrong=(2,)), _weights()
    tuned = _tuned(weights, host, Times(host, 10.0, w1=11.0, w2=1.0, w3=5.0))
    with tuned.learning():
        tuned(_inputs(8), *weights[0])
    assert tuned.choices()[Problem(8, COLUMNS, DEPTH, False)].candidate.startswith("cublaslt:03")
    assert "its result is not torch's" in caplog.text
    host = host_lt(workspace=WORKSPACE_LIMIT)
    tuned = _tuned(weights, host, Times(host, 10.0, w1=1.0, w2=1.0, w3=1.0))
    tuned._candidates._scratch = torch.empty(8, dtype=torch.uint8)  # so that every launch is refused
    with tuned.learning():
        tuned(_inputs(8), *weights[0])
    assert tuned.report().winners == {"torch": 1}
    assert "is left out" in caplog.text


def test_a_second_start_measures_nothing_and_chooses_alike(host_lt: Any, tmp_path: Path) -> None:
    weights, reports = _weights(), []
    for word in (2, 3):  # at the second start the times would say something else
        host = host_lt()
        times = Times(host, 10.0, **{f"w{w}": 5.0 if w == word else 20.0 for w in (1, 2, 3)})
        tuned = _tuned(weights, host, times, tmp_path)
        with tuned.learning():
            for rows in (1, 24, 64):
                tuned(_inputs(rows), *weights[0])
        reports.append(tuned.report())
        host.launched.clear()
        tuned(_inputs(24), *weights[0])
        assert host.launched == [2]
    first, second = reports
    assert (first.measured, first.stored) == (3, 0)  # 1, 32, 64
    assert (second.measured, second.stored, second.seconds) == (0, 3, 0.0)
    assert first.digest == second.digest
    assert str(first) == str(second) == f"cublaslt 3 ({first.digest})"


def test_stored_choices_that_the_library_refuses_are_measured_anew(host_lt: Any, tmp_path: Path) -> None:
    weights = _weights()
    host = host_lt()
    tuned = _tuned(weights, host, Times(host, 10.0, w1=5.0, w2=20.0, w3=20.0), tmp_path)
    with tuned.learning():
        tuned(_inputs(8), *weights[0])
    host = host_lt(accepts=lambda word, rows: word != 1)
    tuned = _tuned(weights, host, Times(host, 10.0, w2=7.0, w3=20.0), tmp_path)
    with tuned.learning():
        tuned(_inputs(8), *weights[0])
    assert tuned.choices()[Problem(8, COLUMNS, DEPTH, False)].candidate.startswith("cublaslt:02")
    other = _tuned(weights, host, Times(host, 10.0, w2=20.0, w3=20.0), tmp_path, device="another")
    with other.learning():
        other(_inputs(8), *weights[0])
    assert other.report().winners == {"torch": 1}


def test_measuring_ends_when_its_time_is_over(
    host_lt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gemm, "TIME_LIMIT", 2.0)
    weights, host = _weights(), host_lt()
    times = Times(host, 10.0, w1=5.0, w2=20.0, w3=20.0)  # a second a round, one round a problem
    tuned = _tuned(weights, host, times, tmp_path)
    with tuned.learning():
        for rows in (1, 2, 4, 8):
            tuned(_inputs(rows), *weights[0])
    report = tuned.report()
    assert (report.measured, report.untimed, report.seconds) == (2, 2, 2.0)
    assert report.winners == {"cublaslt": 2, "torch": 2}
    assert "2 products run on torch untuned" in caplog.text
    following = _tuned(weights, host, times, tmp_path)
    with following.learning():
        for rows in (1, 2, 4, 8):
            following(_inputs(rows), *weights[0])
    assert (following.report().stored, following.report().measured, following.report().untimed) == (2, 2, 0)


def test_without_memory_to_try_others_a_product_stays_torchs(
    host_lt: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Short(Times):
        def seconds_per_call(self, candidates: Any, repeats: int) -> list[float]:
            self.now += 1.0
            raise torch.OutOfMemoryError("CUDA out of memory")

    host, weights = host_lt(), _weights()
    tuned = _tuned(weights, host, Short(host, 10.0), tmp_path)
    with tuned.learning():
        assert torch.equal(tuned(_inputs(8), *weights[0]), linear(_inputs(8), *weights[0]))
    report = tuned.report()
    assert (report.measured, report.untimed, report.seconds, report.winners) == (0, 1, 1.0, {"torch": 1})
    assert "no memory to try others" in caplog.text
    assert not list(tmp_path.iterdir())


def test_what_a_product_cannot_take_is_torchs(host_lt: Any) -> None:
    host, weights = host_lt(), _weights()
    tuned = _tuned(weights, host, Times(host, 10.0, w1=1.0, w2=1.0, w3=1.0))
    more = _inputs(ANCHORS[-1] + 1)
    wide = torch.cat((_inputs(4), _inputs(4)), 1)
    odd = (torch.zeros(COLUMNS + 1, DEPTH, dtype=BF16), None)
    with tuned.learning():
        tuned(_inputs(4), *weights[0])
        host.launched.clear()
        assert tuned(more, *weights[0]).shape[0] == more.shape[0]
        assert tuned(_inputs(4), *odd).shape == (4, COLUMNS + 1)  # not the model's
        assert torch.equal(tuned(wide[:, :DEPTH], *weights[0]), linear(_inputs(4), *weights[0]))  # strided
        assert tuned(_inputs(4)[None], *weights[0]).shape == (1, 4, COLUMNS)
    assert host.launched == []
    ragged = _tuned([odd], host, Times(host, 10.0))
    with ragged.learning():
        ragged(_inputs(4), *odd)
    assert ragged.report().measured == 0


def test_weights_rotate_so_that_they_come_from_memory(host_lt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "TIMED_BYTES", 10 * COLUMNS * DEPTH * 2)
    host, weights = host_lt(), _weights(3)
    times = Times(host, 10.0, w1=11.0, w2=8.0, w3=9.0)
    tuned = _tuned(weights, host, times)
    with tuned.learning():
        tuned(_inputs(4), *weights[0])
    assert set(times.weights) == {10}


def test_global_random_state_is_left_alone(host_lt: Any) -> None:
    host, weights = host_lt(), _weights()
    tuned = _tuned(weights, host, Times(host, 10.0, w1=11.0, w2=8.0, w3=9.0))
    state = torch.get_rng_state()
    with tuned.learning():
        tuned(_inputs(4), *weights[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_where_nothing_is_tuned() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert why_not_tuned(cuda, BF16, {}) is None
    assert why_not_tuned(cuda, BF16, {"ENGINE_TUNE": "0"}) == "ENGINE_TUNE=0"
    assert why_not_tuned(cuda, torch.float32, {}) == "torch.float32 products are torch's"
    assert why_not_tuned(cpu, BF16, {}) == "the weights are on cpu"
    assert tuned_linear(_weights()) is None


def test_a_name_that_is_none_is_no_candidate(host_lt: Any) -> None:
    problem = Problem(4, COLUMNS, DEPTH, False)
    candidates = LinearCandidates(torch.device("cpu"), BF16, CublasLt(host_lt()), True)
    own = [n for n in candidates.names(problem._replace(rows=9), None) if not n.startswith("cublaslt")]
    assert {name.partition(":")[0] for name in own} == {"splitk"}
    few = [n for n in candidates.names(problem._replace(rows=2), None) if not n.startswith("cublaslt")]
    assert {name.partition(":")[0] for name in few} == {"skinny"}
    wide = problem._replace(rows=24, depth=264)
    assert candidates.call(wide, "splitk:32,64,128,4,5,2,0") is not None
    for unsuitable in (wide._replace(rows=129), wide._replace(columns=1 << 20)):
        assert candidates.call(unsuitable, "splitk:32,64,128,4,5,2,0") is None
    last = few[-1]
    for name in (
        "cublaslt:xyz",
        "cublaslt:00",
        "skinny:1,2",
        "skinny:a,b,c",
        "splitk:1,2,3",
        "splitk:1,2,3,4,5,6,7",
        "skinny",
        "mystery:1",
        "",
    ):
        assert candidates.call(problem, name) is None
    assert candidates.call(problem, last) is not None
    assert candidates.call(problem._replace(rows=9), last) is None
    assert candidates.call(problem._replace(rows=9), own[-1]) is not None
    without = LinearCandidates(torch.device("cpu"), BF16, None, False)
    assert without.names(problem, None) == []
    assert without.call(problem, last) is None
