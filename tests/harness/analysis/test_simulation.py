"""What verdicts are worth: simulated sweeps with the noise of real runs (``results/reference/noise``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.analysis.comparison import JUDGED, Candidate, Finding, compare, finding_of
from harness.metrics.metric import HIGHER
from harness.metrics.registry import RUN_METRICS

SWEEPS, BLOCKS = 200, 10
REFERENCE = Path(__file__).parents[3] / "results" / "reference"
NOISE = pd.read_csv(REFERENCE / "noise" / "residuals.csv")
METRICS = [c for c in NOISE.columns if c != "arm"]
_SPREAD = NOISE.groupby("arm")["gen_tok_s"].transform("std")
QUIET, ALL = NOISE[_SPREAD < 0.05][METRICS].to_numpy(), NOISE[METRICS].to_numpy()
FASTER = np.array([0 if "bytes" in m else 1 if RUN_METRICS[m].better == HIGHER else -1 for m in METRICS])


def runs(noise: np.ndarray, speed: float, rng: np.random.Generator) -> pd.DataFrame:
    """An arm of ``BLOCKS`` runs that is ``speed`` times as fast."""
    logs = noise[rng.integers(len(noise), size=BLOCKS)] + np.log(speed) * FASTER
    frame = pd.DataFrame(np.exp(logs), columns=METRICS)
    frame = frame.assign(**{m: pd.NA for m in JUDGED if m not in METRICS})
    return frame.assign(status="ok", workload_hash="w", seed=0, repeat=range(BLOCKS), process=pd.NA)


def simulate(noise: np.ndarray, speed: float, aa: bool) -> list[list[Finding]]:
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
    assert len(METRICS) >= 8
    assert (len(QUIET), len(ALL)) == (6, 12)
    assert 0.01 < QUIET[:, 0].std() < 0.03 < ALL[:, 0].std() < 0.08
    measured = pd.read_csv(REFERENCE / "cpu" / "quickstart" / "runs.csv")
    logs = np.log(measured[METRICS])
    residuals = (logs - logs.groupby(measured["arm"]).transform("mean")) * np.sqrt(3 / 2)
    assert sorted(map(tuple, residuals.round(6).to_numpy() + 0.0)) == sorted(
        map(tuple, NOISE[METRICS].round(6).to_numpy())
    )


@pytest.mark.parametrize("noise, aa", [(QUIET, False), (QUIET, True), (ALL, False)], ids=["quiet", "quiet+aa", "all"])
def test_equal_arms_are_indistinguishable_in_every_metric(noise: np.ndarray, aa: bool) -> None:
    sweeps = simulate(noise, 1.0, aa)
    silent = [all(f.verdict == "indistinguishable" for f in sweep) for sweep in sweeps]
    assert all(len(sweep) == len(METRICS) for sweep in sweeps)
    assert np.mean(silent) >= 0.95
    assert all((f.noise_floor is not None) == aa for sweep in sweeps for f in sweep)


@pytest.mark.parametrize("aa, speed, verdict", [(True, 1.05, "better"), (False, 1 / 1.05, "worse")])
def test_five_percent_are_found(aa: bool, speed: float, verdict: str) -> None:
    assert np.mean([v == verdict for v in verdicts(simulate(QUIET, speed, aa))]) >= 0.8


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
