"""What verdicts are worth: simulated sweeps with the noise of real runs (``results/reference/noise``)."""

from __future__ import annotations

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
NAMES = ("run_id", "model", "workload", "arm")


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


QUIET = Noise.of(CPU_ROWS[CPU_ROWS.groupby("arm")["gen_tok_s"].transform("std") < 0.05])
ALL, H200 = Noise.of(CPU_ROWS), Noise.of(H200_ROWS)


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
    assert len(ALL.metrics) >= 8
    assert (len(QUIET.logs), len(ALL.logs)) == (6, 12)
    assert 0.01 < QUIET.spread() < 0.03 < ALL.spread() < 0.08
    measured = pd.read_csv(REFERENCE / "cpu" / "quickstart" / "runs.csv")
    logs = np.log(measured[ALL.metrics])
    residuals = (logs - logs.groupby(measured["arm"]).transform("mean")) * np.sqrt(3 / 2)
    assert sorted(map(tuple, residuals.round(6).to_numpy() + 0.0)) == sorted(map(tuple, ALL.logs.round(6)))


def test_the_noise_of_an_h200_is_that_of_all_its_runs_whatever_the_spread() -> None:
    """No mean of an arm or of its requests is left, and every model, workload and engine is there three times."""
    assert len(H200.metrics) >= 8
    assert len(H200.logs) == 54
    assert 0.015 < H200.spread() < 0.03
    by_arm = H200_ROWS.groupby(["model", "workload", "arm"])[H200.metrics]
    assert set(by_arm.size()) == {3}
    assert by_arm.mean().abs().to_numpy().max() < 1e-5
    assert H200_ROWS["run_id"].is_unique


@pytest.mark.parametrize(
    "noise, aa", [(QUIET, False), (QUIET, True), (ALL, False), (H200, False)], ids=["quiet", "quiet+aa", "all", "h200"]
)
def test_equal_arms_are_indistinguishable_in_every_metric(noise: Noise, aa: bool) -> None:
    sweeps = simulate(noise, 1.0, aa)
    silent = [all(f.verdict == "indistinguishable" for f in sweep) for sweep in sweeps]
    assert all(len(sweep) == len(noise.metrics) for sweep in sweeps)
    assert np.mean(silent) >= 0.95
    assert all((f.noise_floor is not None) == aa for sweep in sweeps for f in sweep)


@pytest.mark.parametrize(
    "noise, aa, speed, verdict",
    [(QUIET, True, 1.05, "better"), (QUIET, False, 1 / 1.05, "worse"), (H200, True, 1.05, "better")],
    ids=["quiet+aa", "quiet", "h200+aa"],
)
def test_five_percent_are_found(noise: Noise, aa: bool, speed: float, verdict: str) -> None:
    assert np.mean([v == verdict for v in verdicts(simulate(noise, speed, aa))]) >= 0.8


def test_in_much_noise_five_percent_are_rather_missed_than_misjudged() -> None:
    found = verdicts(simulate(ALL, 1.05, aa=False))
    assert "worse" not in found
    assert "indistinguishable" in found
    assert np.mean([v == "better" for v in verdicts(simulate(ALL, 1.3, aa=False))]) >= 0.8


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    found = [f for sweep in simulate(QUIET, 1.05, aa=False) if (f := finding_of(sweep, "", "B", "gen_tok_s"))]
    held = [f.ratio_low < 1.05 < f.ratio_high for f in found if f.ratio_low and f.ratio_high]
    assert len(held) == SWEEPS
    assert 0.90 <= np.mean(held) <= 0.99
