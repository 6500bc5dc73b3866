"""What a table and a column are, and what columns of several tables have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column: ``dtype`` is a pandas dtype name (nullable ones for counts), ``unit`` "" if it has none.

    ``null`` says when the value is unknown; "" if it is always there.
    """

    name: str
    dtype: str
    unit: str
    definition: str
    null: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: ``one_row`` says what a row is, ``columns`` stand in the order of the file."""

    name: str
    one_row: str
    columns: tuple[Column, ...]

    @property
    def dtypes(self) -> dict[str, str]:
        """pandas dtype names by column, in the order of the columns."""
        return {c.name: c.dtype for c in self.columns}


RUN_ID = Column("run_id", "string", "", "the run this row belongs to (key of the runs table)")
REQUEST_ID = Column(
    "request_id", "string", "", "the request this row belongs to (key of the requests table with run_id)"
)

# Why a value is null.
UNSENT = "run not started"
HIDDEN = "not reported by the backend"
UNTOLD = "not told by the engine"
NO_STEP_LOG = "no step log"
NO_GAP = "no gap observed"
NO_GPU = "no GPU, or not sampled"
NO_SLO = "no SLO was decided before the run, or it has no such limit"
