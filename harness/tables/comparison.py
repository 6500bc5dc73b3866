"""The table that a comparison of runs adds; a result folder is complete without it."""

from __future__ import annotations

from harness.tables.table import Column, Table

_UNPAIRED = "no pairs"
_ONE_PAIR = "fewer than two pairs"
_FEW_PAIRS = "fewer than 5 pairs"

COMPARISON = Table(
    "comparison",
    "One row a metric of an arm against its baseline. Only in sweeps and in what `cb-compare` writes.",
    (
        Column("facet", "string", "", "what the two arms have in common; empty if all runs do"),
        Column("baseline", "string", "", "arm that ratios are taken to"),
        Column("arm", "string", "", "arm that is judged"),
        Column("metric", "string", "", "column of runs that is compared"),
        Column("better", "string", "", "higher or lower: which value of the metric is better"),
        Column(
            "pairs", "Int64", "", "pairs of runs with the same requests, seed and repeat; 0 if arms are not compared"
        ),
        Column(
            "baseline_median", "Float64", "", "median over the baseline's ok runs, in the unit of metric", "never known"
        ),
        Column("arm_median", "Float64", "", "median over the arm's ok runs, in the unit of metric", "never known"),
        Column("ratio", "Float64", "", "geometric mean of arm / baseline over the pairs", _UNPAIRED),
        Column("ratio_smallest", "Float64", "", "smallest ratio of a pair", _UNPAIRED),
        Column("ratio_largest", "Float64", "", "largest ratio of a pair", _UNPAIRED),
        Column(
            "ratio_low",
            "Float64",
            "",
            "lower end of the 95 % interval (expanded percentile bootstrap over the pairs)",
            _FEW_PAIRS,
        ),
        Column("ratio_high", "Float64", "", "upper end of that interval", _FEW_PAIRS),
        Column("p", "Float64", "", "two-sided, paired t test on the log ratios", _ONE_PAIR),
        Column("p_holm", "Float64", "", "p after Holm's correction over arms and metrics of the facet", "not tested"),
        Column(
            "noise_floor", "Float64", "", "largest difference an arm showed to itself (A/A), as a share", "no A/A arm"
        ),
        Column(
            "verdict", "string", "", "better, worse, indistinguishable or confounded", "none can be given: see reason"
        ),
        Column("reason", "string", "", "why this verdict, or why none"),
    ),
)
