"""From what a run observed (:class:`harness.record.RunRecord`) to the tables of :mod:`harness.tables`.

One definition a metric: its name, unit, formula and null rule are a column of ``harness.tables``; the function that
computes it is registered under that name in :mod:`harness.metrics.registry`.
"""

from __future__ import annotations

from harness.metrics.compute import compute_tables, run_values
from harness.metrics.registry import REQUEST_METRICS, RUN_METRICS

__all__ = ["REQUEST_METRICS", "RUN_METRICS", "compute_tables", "run_values"]
