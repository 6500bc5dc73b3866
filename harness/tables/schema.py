"""All tables by name, the one way to read a column, and the check of a frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.tables.comparison import COMPARISON
from harness.tables.findings import DIVERGENCES, GC_PAUSES, TAILS
from harness.tables.machine import CALIBRATION, MEMORY_LEDGER, TELEMETRY
from harness.tables.requests import ITL, PHASES, REQUESTS, TOKENS
from harness.tables.runs import RUNS
from harness.tables.settings import CONFIG, COUNTERS, ENVIRONMENT
from harness.tables.steps import STEPS
from harness.tables.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

_IN_EVERY_RESULT = (
    RUNS,
    REQUESTS,
    ITL,
    TOKENS,
    STEPS,
    DIVERGENCES,
    GC_PAUSES,
    TAILS,
    CONFIG,
    ENVIRONMENT,
    COUNTERS,
    MEMORY_LEDGER,
    CALIBRATION,
    TELEMETRY,
    PHASES,
)
TABLES: dict[str, Table] = {table.name: table for table in _IN_EVERY_RESULT}
"""What a result folder must hold, by name."""
LATER = frozenset((PHASES.name,))
"""Those that older results do not have; without it there was nothing to put in."""
BESIDE: dict[str, Table] = {COMPARISON.name: COMPARISON}
"""Tables that a comparison of runs adds; a result folder is complete without them."""


class SchemaError(ValueError):
    """A frame that is not what :data:`TABLES` says."""


def column(table: str, name: str) -> Column:
    """The column ``name`` of ``table``; KeyError naming both if there is none."""
    for c in TABLES[table].columns:
        if c.name == name:
            return c
    raise KeyError(f"table {table!r} has no column {name!r}")


def check_frame(table: str, frame: pd.DataFrame) -> None:
    """Raise SchemaError unless ``frame`` has exactly the columns of ``table``, in order and with their dtypes."""
    wanted = TABLES[table].dtypes
    given = [str(name) for name in frame.columns]
    if given != list(wanted):
        missing = [n for n in wanted if n not in given]
        unknown = [n for n in given if n not in wanted]
        raise SchemaError(
            f"table {table!r}: missing columns {missing}, unknown columns {unknown}; "
            f"the columns must be those of harness.tables in their order"
        )
    for name, dtype in wanted.items():
        if str(frame[name].dtype) != dtype:
            raise SchemaError(f"table {table!r}: column {name!r} is {frame[name].dtype}, must be {dtype}")
