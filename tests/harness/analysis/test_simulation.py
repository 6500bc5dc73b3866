"""What verdicts are worth: simulated sweeps with the noise of real runs (``results/reference/noise``)."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.analysis.comparison import JUDGED, Candidate, Finding, compare, finding_of
from harness.metrics.metric import HIGHER
from harness.metrics.registry import RUN_METRICS

SWEEPS, BLOCKS = 200, 10
REFERENCE = Path(__file__).parents[3] / "results" / "reference"
CPU_ROWS = pd.read_csv(REFERENCE / "noise" / "residuals.csv")
H200_ROWS = pd.read_csv(REFERENCE / "noise" / "h200.csv")
NAMES = ("sweep", "run_id", "model", "workload", "engine", "arm")
OWN_STARTS = H200_ROWS["sweep"].str.startswith("stages/")
LAUNCHED = (H200_ROWS["engine"] == "static") | (H200_ROWS["arm"] == "ours_base")


@dataclass(frozen=True)
class Noise:
    """``logs``: [runs, metrics] how far runs lie from where their arm is, as logarithms."""

    metrics: list[str]
    logs: np.ndarray

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Noise:
        metrics = [c for c in rows.columns if c not in NAMES]
        return cls(metrics, rows[metrics].to_numpy())

    def spread(self, metric: str = "gen_tok_s") -> float:
        return float(self.logs[:, self.metrics.index(metric)].std())

    @property
    def faster(self) -> np.ndarray:
        """Sign of each metric's change in a faster arm."""
        return np.array([0 if "bytes" in m else 1 if RUN_METRICS[m].better == HIGHER else -1 for m in self.metrics])


CPU = Noise.of(CPU_ROWS)
PEERS = Noise.of(H200_ROWS[~OWN_STARTS])  # three runs of one process
STARTS = Noise.of(H200_ROWS[OWN_STARTS & ~LAUNCHED & (H200_ROWS["engine"] == "ours")])  # each run a process of its own
HOST_BOUND = Noise.of(H200_ROWS[OWN_STARTS & LAUNCHED])


def runs(noise: Noise, speed: float, rng: np.random.Generator) -> pd.DataFrame:
    """An arm of ``BLOCKS`` runs that is ``speed`` times as fast."""
    logs = noise.logs[rng.integers(len(noise.logs), size=BLOCKS)] + np.log(speed) * noise.faster
    frame = pd.DataFrame(np.exp(logs), columns=noise.metrics)
    frame = frame.assign(**{m: pd.NA for m in JUDGED if m not in noise.metrics})
    return frame.assign(status="ok", workload_hash="w", seed=0, repeat=range(BLOCKS), process=pd.NA)


def simulate(noise: Noise, speed: float, aa: bool) -> list[list[Finding]]:
    rng = np.random.default_rng(7)
    sweeps = []
    for _ in range(SWEEPS):
        baseline, again, other = runs(noise, 1, rng), runs(noise, 1, rng), runs(noise, speed, rng)
        arms = [Candidate("B", other)]
        sweeps.append(compare(Candidate("A", baseline), arms, (baseline, again) if aa else None))
    return sweeps


def verdicts(sweeps: list[list[Finding]], metric: str = "gen_tok_s") -> list[str | None]:
    return [f.verdict if (f := finding_of(sweep, "", "B", metric)) else None for sweep in sweeps]


def test_the_noise_is_that_of_real_runs() -> None:
    assert len(CPU.metrics) >= 8
    assert len(CPU.logs) == 12
    assert 0.03 < CPU.spread() < 0.08
    measured = pd.read_csv(REFERENCE / "cpu" / "quickstart" / "runs.csv")
    logs = np.log(measured[CPU.metrics])
    residuals = (logs - logs.groupby(measured["arm"]).transform("mean")) * np.sqrt(3 / 2)
    assert sorted(map(tuple, residuals.round(6).to_numpy() + 0.0)) == sorted(map(tuple, CPU.logs.round(6)))


def test_the_noise_of_an_h200_is_that_of_all_its_runs_whatever_the_spread() -> None:
    """No mean of an arm or of its requests is left, and every run of every sweep that stands in it is there."""
    assert (len(PEERS.logs), len(STARTS.logs), len(HOST_BOUND.logs)) == (54, 270, 40)
    assert 0.01 < STARTS.spread() < 0.03 < 0.1 < HOST_BOUND.spread()
    by_arm = H200_ROWS.groupby(["sweep", "workload", "arm"])[PEERS.metrics]
    assert set(by_arm.size()) == {3, 5}
    assert by_arm.mean().abs().to_numpy().max() < 1e-5
    assert H200_ROWS["run_id"].is_unique
    for sweep in H200_ROWS.loc[OWN_STARTS, "sweep"].unique():
        measured = pd.read_parquet(REFERENCE / "h200" / sweep / "runs.parquet").query("status == 'ok'")
        logs = np.log(measured[PEERS.metrics].astype(float))
        told = H200_ROWS[H200_ROWS["sweep"] == sweep]
        assert set(told["run_id"]) == set(measured["run_id"])
        assert measured["process"].is_unique
        unbiased = logs.groupby(measured["arm"].to_numpy(object)).std(ddof=1)
        assert told.groupby("arm")[PEERS.metrics].std(ddof=0).to_numpy() == pytest.approx(unbiased.to_numpy(), abs=1e-5)


def test_the_tables_are_what_their_script_makes() -> None:
    """After new results: python results/reference/noise/residuals.py."""
    made = runpy.run_path(str(REFERENCE / "noise" / "residuals.py"))
    for rows, name in ((CPU_ROWS, "cpu"), (H200_ROWS, "h200")):
        again = made[name]().reset_index(drop=True)
        pd.testing.assert_frame_equal(again, rows, check_dtype=False, atol=2e-6)


@pytest.mark.parametrize(
    "noise, aa",
    [(STARTS, False), (STARTS, True), (PEERS, False), (CPU, False), (HOST_BOUND, False)],
    ids=["starts", "starts+aa", "peers", "cpu", "host bound"],
)
def test_equal_arms_are_indistinguishable_in_every_metric(noise: Noise, aa: bool) -> None:
    sweeps = simulate(noise, 1.0, aa)
    silent = [all(f.verdict == "indistinguishable" for f in sweep) for sweep in sweeps]
    assert all(len(sweep) == len(noise.metrics) for sweep in sweeps)
    assert np.mean(silent) >= 0.95
    assert all((f.noise_floor is not None) == aa for sweep in sweeps for f in sweep)


@pytest.mark.parametrize(
    "noise, aa, speed, verdict",
    [(STARTS, True, 1.05, "better"), (STARTS, False, 1 / 1.05, "worse"), (PEERS, True, 1.05, "better")],
    ids=["starts+aa", "starts", "peers+aa"],
)
def test_five_percent_are_found(noise: Noise, aa: bool, speed: float, verdict: str) -> None:
    assert np.mean([v == verdict for v in verdicts(simulate(noise, speed, aa))]) >= 0.8


@pytest.mark.parametrize("noise, found_at", [(CPU, 1.3), (HOST_BOUND, 1.7)], ids=["cpu", "host bound"])
def test_in_much_noise_five_percent_are_rather_missed_than_misjudged(noise: Noise, found_at: float) -> None:
    found = verdicts(simulate(noise, 1.05, aa=False))
    assert "worse" not in found
    assert "indistinguishable" in found
    assert np.mean([v == "better" for v in verdicts(simulate(noise, found_at, aa=False))]) >= 0.8


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    found = [f for sweep in simulate(STARTS, 1.05, aa=False) if (f := finding_of(sweep, "", "B", "gen_tok_s"))]
    held = [f.ratio_low < 1.05 < f.ratio_high for f in found if f.ratio_low and f.ratio_high]
    assert len(held) == SWEEPS
    assert 0.90 <= np.mean(held) <= 0.99
