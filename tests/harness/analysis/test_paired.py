"""Ratios, intervals, corrections and verdicts, against values computed by hand or found in tables."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from harness.analysis.comparison import JUDGED, Candidate, compare, confounded_arms, finding_of, to_frame
from harness.analysis.paired import FEWEST_PAIRS, PairedRatio, holm, paired_ratio
from harness.analysis.student import two_sided_p, two_sided_quantile
from harness.analysis.verdict import Thresholds, Verdict, judge, noise_floor
from harness.tables.comparison import COMPARISON


@pytest.mark.parametrize(
    "degrees, quantile",
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423), (120, 1.9799)],
)
def test_student_is_that_of_the_tables(degrees, quantile):
    assert two_sided_quantile(0.05, degrees) == pytest.approx(quantile, abs=5e-5)
    assert two_sided_p(-quantile, degrees) == pytest.approx(0.05, abs=2e-5)
    assert two_sided_p(math.inf, degrees) == 0
    assert two_sided_p(0.0, degrees) == 1


def test_holm_by_hand():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_ratio_is_the_geometric_mean_of_the_pairs():
    found = paired_ratio([2, 8, 4], [1, 2, 4])  # ratios 2, 4, 1
    assert (found.n, found.smallest, found.largest) == pytest.approx((3, 1, 4))
    assert found.ratio == pytest.approx(2)
    # log2 ratios 1, 2, 0: mean 1, sd 1, t = sqrt(3) with two degrees of freedom
    assert found.p == pytest.approx(two_sided_p(math.sqrt(3), 2))
    assert paired_ratio([3], [2]).low is None
    # an interval of four pairs would hold the middle of their distribution in 7 of 8 cases at most
    assert [paired_ratio([2, 3, 4, 5, 6][:n], [1] * n).low is None for n in (2, 3, 4, 5)] == [True] * 3 + [False]
    assert {c.name: c.null for c in COMPARISON.columns}["ratio_low"] == f"fewer than {FEWEST_PAIRS} pairs"
    with pytest.raises(ValueError, match="finite values above 0"):
        paired_ratio([0, 1], [1, 1])
    with pytest.raises(ValueError, match="pairs are needed, got 0 values"):
        paired_ratio([], [])


def test_the_interval_is_as_wide_as_students():
    rng = np.random.default_rng(0)
    logs = rng.normal(0.1, 0.02, 20)
    found = paired_ratio(np.exp(logs).tolist(), [1.0] * 20)
    half = two_sided_quantile(0.05, 19) * logs.std(ddof=1) / math.sqrt(20)
    assert math.log(found.low) == pytest.approx(logs.mean() - half, abs=0.1 * half)
    assert math.log(found.high) == pytest.approx(logs.mean() + half, abs=0.1 * half)
    assert found == paired_ratio(np.exp(logs).tolist(), [1.0] * 20)


def ratio(value=1.2, low=1.1, high=1.3, p=0.001, n=10):
    return PairedRatio(n, value, low, high, low, high, p)


@pytest.mark.parametrize(
    "given, better, floor, verdict, reason",
    [
        (ratio(), "higher", None, Verdict.BETTER, "p 0.001"),
        (ratio(), "lower", None, Verdict.WORSE, "p 0.001"),
        (ratio(0.8, 0.7, 0.9), "lower", None, Verdict.BETTER, "p 0.001"),
        (ratio(), "higher", 0.25, Verdict.INDISTINGUISHABLE, "inside the A/A noise floor of 25.0%"),
        (ratio(low=0.9), "higher", None, Verdict.INDISTINGUISHABLE, "interval holds 1"),
        (ratio(p=0.2), "higher", None, Verdict.INDISTINGUISHABLE, "p 0.2 after Holm"),
        (ratio(1.005, 1.004, 1.006), "higher", None, Verdict.INDISTINGUISHABLE, "smaller than 1.0%"),
        (ratio(n=4), "higher", None, None, "4 pairs; a verdict needs at least 5"),
    ],
)
def test_verdicts(given, better, floor, verdict, reason):
    (judged,) = judge([given], [better], [floor], Thresholds())
    assert judged.verdict == verdict
    assert reason in judged.reason


def test_many_questions_need_more():
    one = judge([ratio(p=0.02)], ["higher"], [None], Thresholds())
    many = judge([ratio(p=0.02)] * 3, ["higher"] * 3, [None] * 3, Thresholds())
    assert [j.verdict for j in one] == [Verdict.BETTER]
    assert [j.verdict for j in many] == [Verdict.INDISTINGUISHABLE] * 3
    assert many[0].p_holm == pytest.approx(0.06)


def test_the_noise_floor_is_the_farther_end_of_the_interval():
    assert noise_floor(ratio(1.0, 0.8, 1.1), Thresholds()) == pytest.approx(0.25)
    assert noise_floor(ratio(n=4), Thresholds()) is None
    assert noise_floor(None, Thresholds()) is None


@pytest.mark.parametrize("wrong", [{"confidence": 1.0}, {"fewest_pairs": 4}, {"smallest_effect": -0.1}])
def test_thresholds_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Thresholds(**wrong)


def runs(values, **columns):
    frame = pd.DataFrame({m: pd.Series([pd.NA] * len(values), dtype="Float64") for m in JUDGED})
    base = {"status": "ok", "workload_hash": "w", "seed": 0, "repeat": range(len(values)), "process": pd.NA} | columns
    return frame.assign(gen_tok_s=values, **base)


BASE = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0]


def test_a_constant_ratio_needs_no_spread():
    (found,) = compare(Candidate("A", runs(BASE)), [Candidate("B", runs([v * 1.1 for v in BASE]))])
    assert (found.metric, found.pairs, found.verdict) == ("gen_tok_s", 6, "better")
    assert (found.ratio_low, found.ratio_high) == pytest.approx((1.1, 1.1))
    (same,) = compare(Candidate("A", runs(BASE)), [Candidate("B", runs(BASE))])
    assert (same.ratio, same.verdict) == (1.0, "indistinguishable")


def test_only_runs_of_the_same_requests_seed_and_repeat_are_pairs():
    baseline = Candidate("A", runs(BASE))
    (other,) = compare(baseline, [Candidate("B", runs(BASE, workload_hash="v"))])
    assert (other.pairs, other.verdict) == (0, None)
    assert "no two runs of the same requests" in other.reason
    (varied,) = compare(baseline, [Candidate("B", runs(BASE, workload_hash="v"))], pair_by=("seed", "repeat"))
    assert varied.pairs == 6
    (shifted,) = compare(baseline, [Candidate("B", runs(BASE, repeat=range(3, 9)))])
    assert (shifted.pairs, shifted.reason) == (3, "3 pairs; a verdict needs at least 5")
    (twice,) = compare(baseline, [Candidate("B", runs(BASE, repeat=0))])
    assert "more than once" in twice.reason
    (failed,) = compare(baseline, [Candidate("B", runs(BASE, status="failed"))])
    assert (failed.pairs, failed.arm_median, failed.baseline_median) == (0, None, 100.0)
    (zero,) = compare(baseline, [Candidate("B", runs([0.0, *BASE[1:]]))])
    assert zero.reason == "a value of 0 has no ratio"


def test_confounded_and_identical_arms_are_not_judged():
    faster = runs([v * 2 for v in BASE])
    found = compare(
        Candidate("A", runs(BASE)),
        [
            Candidate("B", faster, confounded=("num_blocks",)),
            Candidate("C", faster, identical=True),
            Candidate("D", faster),
        ],
    )
    assert [f.verdict for f in found] == ["confounded", None, "better"]
    assert found[1].reason == "identical after resolution: not compared"
    assert found[1].ratio is None
    assert confounded_arms(found) == {"B": "also differs: num_blocks"}
    assert finding_of(found, "", "D", "gen_tok_s").p_holm == found[2].p  # the others are not asked
    frame = to_frame(found)
    assert list(frame.columns) == list(COMPARISON.dtypes)
    assert [str(frame[c.name].dtype) for c in COMPARISON.columns] == [c.dtype for c in COMPARISON.columns]


def test_runs_of_one_process_are_one_repeat_by_their_median():
    """Two repeats of three runs each: medians 100 and 110 against 50 and 50, so ratios of 2 and 2.2 in two pairs."""
    made = {
        "repeat": [0, 0, 0, 1, 1, 1],
        "process": list("aaabbb"),
        "seed": [0, 1, 2] * 2,
        "workload_hash": list("xyz") * 2,
    }
    baseline = Candidate("A", runs([50.0, 49.0, 90.0, 50.0, 50.0, 10.0], **made))
    arm = Candidate("B", runs([100.0, 900.0, 1.0, 110.0, 111.0, 3.0], **made | {"process": list("cccddd")}))
    (found,) = compare(baseline, [arm])
    assert (found.pairs, found.verdict) == (2, None)
    assert (found.ratio_smallest, found.ratio_largest) == pytest.approx((2.0, 2.2))
    missing = runs([100.0, 900.0, 1.0, 110.0, 111.0, 3.0], **made | {"status": ["ok"] * 5 + ["failed"]})
    (fewer,) = compare(baseline, [Candidate("B", missing)])
    assert fewer.pairs == 1  # the other has not answered the same requests
