"""The step log of a simulation, in columns: a step takes no object, a hundred equal ones no loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.observations import FloatArray

COLUMNS = (
    "t_s",
    "prefill",
    "decode_rows",
    "prefill_rows",
    "prefill_tokens",
    "padded_rows",
    "table_pages",
    "kv_tokens",
    "prefill_pairs",
    "running",
    "waiting",
    "free_blocks",
    "allocated_blocks",
    "evicted_blocks",
    "unused_slots",
    "preempted",
    "admission_held",
    "graph",
    "schedule_ms",
    "offloaded",
    "restored",
    "beyond",
    "step_ms",
)
"""Columns of a step, most of them as in the table ``steps``; ``beyond``: whether it was larger than any measured."""

_AT = {name: i for i, name in enumerate(COLUMNS)}
_FLAGS = ("admission_held", "graph")
_REALS = ("t_s", "schedule_ms", "step_ms")
_CHUNK = 8192


class StepLog:
    """Collected steps in their order."""

    def __init__(self) -> None:
        self._chunks: list[FloatArray] = []
        self._rows: list[Sequence[float]] = []

    def add(self, row: Sequence[float]) -> None:
        """One step, values in the order of :data:`COLUMNS`."""
        self._rows.append(row)
        if len(self._rows) == _CHUNK:
            self._flush()

    def add_many(self, rows: FloatArray) -> None:
        """[steps, columns] steps."""
        self._flush()
        self._chunks.append(rows)

    def _flush(self) -> None:
        if self._rows:
            self._chunks.append(np.array(self._rows, dtype=np.float64))
            self._rows = []

    def array(self) -> FloatArray:
        """[steps, columns] of all steps."""
        self._flush()
        self._chunks = [np.concatenate(self._chunks)] if self._chunks else [np.empty((0, len(COLUMNS)))]
        return self._chunks[0]

    def column(self, name: str) -> FloatArray:
        """[steps] one column."""
        column: FloatArray = self.array()[:, _AT[name]]
        return column

    def frame(self) -> pd.DataFrame:
        """As columns of the table ``steps`` (times still in s)."""
        values = self.array()
        columns: dict[str, Any] = {}
        for name in COLUMNS:
            if name in ("prefill", "beyond"):
                continue
            column = values[:, _AT[name]]
            columns[name] = column if name in _REALS else column > 0 if name in _FLAGS else column.astype(np.int64)
        kinds = np.array(["decode", "prefill", "mixed"], dtype=object)
        prefill, decode = values[:, _AT["prefill"]] > 0, values[:, _AT["decode_rows"]] > 0
        columns["kind"] = kinds[np.where(prefill, np.where(decode, 2, 1), 0)]
        return pd.DataFrame(columns)
