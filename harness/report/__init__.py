"""Results for people: the console table, the HTML report and its plots, all from the tables on disk."""

from __future__ import annotations

from harness.report.console import print_summary
from harness.report.html import write_report
from harness.report.read import ResultsError

__all__ = ["ResultsError", "print_summary", "write_report"]
