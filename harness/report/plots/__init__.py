"""The pictures of a report: each function draws one :class:`Plot`, a question one panel can answer."""

from __future__ import annotations

from harness.report.plots.figure import Plot, save
from harness.report.plots.gantt import request_gantt
from harness.report.plots.latency_cdf import itl_cdf, ttft_cdf
from harness.report.plots.ledger import ledger_bars
from harness.report.plots.load import latency_vs_rate, pareto
from harness.report.plots.padding import padding_bars
from harness.report.plots.throughput import throughput_bars
from harness.report.plots.time_frame import TimeFrame, time_frame
from harness.report.plots.timeline import step_timeline
from harness.report.plots.variable import metric_vs_variable

__all__ = [
    "Plot",
    "TimeFrame",
    "itl_cdf",
    "latency_vs_rate",
    "ledger_bars",
    "metric_vs_variable",
    "padding_bars",
    "pareto",
    "request_gantt",
    "save",
    "step_timeline",
    "throughput_bars",
    "time_frame",
    "ttft_cdf",
]
