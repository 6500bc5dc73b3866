"""The tidy tables: every column with its type, unit, definition and null rule, once.

``results/README.md`` is generated from this package (``python -m harness.tables``), the writers check their frames
against it, and the report takes its labels from it. One row is one thing; units are in the names; null = unknown.
"""

from __future__ import annotations

from harness.tables.runs import MIN_P99_SAMPLES
from harness.tables.schema import BESIDE, LATER, TABLES, SchemaError, check_frame, column
from harness.tables.table import Column, Table

__all__ = [
    "BESIDE",
    "LATER",
    "MIN_P99_SAMPLES",
    "TABLES",
    "Column",
    "SchemaError",
    "Table",
    "check_frame",
    "column",
]
