"""Arrays to data frames of exactly the columns and dtypes that :mod:`harness.tables` states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.observations import BoolArray, FloatArray, IntArray
from harness.tables import TABLES, SchemaError, check_frame


def floats(values: FloatArray) -> pd.arrays.FloatingArray:
    """Float64 with NaN as null, without a pass over Python objects."""
    return pd.arrays.FloatingArray(np.asarray(values, dtype=np.float64), np.isnan(values))


def nullable_integers(values: IntArray, null: BoolArray) -> pd.arrays.IntegerArray:
    """Int64 with nulls where ``null`` is set."""
    return pd.arrays.IntegerArray(np.asarray(values, dtype=np.int64), null)


def booleans(values: BoolArray) -> pd.arrays.BooleanArray:
    """boolean without nulls."""
    return pd.arrays.BooleanArray(np.asarray(values, dtype=np.bool_), np.zeros(len(values), dtype=np.bool_))


def strings(values: Sequence[str], codes: IntArray) -> Any:
    """``values[codes]`` as a string array: each text is made once, however often it is repeated."""
    return pd.array(list(values), dtype="string").take(codes)


def objects(values: Sequence[Any]) -> np.ndarray:
    """One object a row, also where the objects are arrays of equal length."""
    result = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        result[i] = value
    return result


def frame(table: str, run_id: str, columns: Mapping[str, Any], n: int) -> pd.DataFrame:
    """The frame of ``table`` with ``n`` rows of one run; SchemaError if a column is missing or unknown.

    Args:
        columns: by name; lists are converted to the column's dtype, arrays must have it already. ``run_id`` is added.
    """
    given = {"run_id": strings([run_id], np.zeros(n, dtype=np.int64)), **columns}
    names = list(TABLES[table].dtypes)
    if set(given) != set(names):
        raise SchemaError(
            f"table {table!r}: missing columns {sorted(set(names) - set(given))}, "
            f"unknown columns {sorted(set(given) - set(names))}"
        )
    data: dict[str, Any] = {}
    for c in TABLES[table].columns:
        value = given[c.name]
        data[c.name] = pd.array(value, dtype=c.dtype) if isinstance(value, list) else value
    result = pd.DataFrame(data, copy=False)
    check_frame(table, result)
    return result


def rows_frame(table: str, run_id: str, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The frame of mappings, one a row; a key that is no column is a SchemaError naming the columns there are."""
    names = [n for n in TABLES[table].dtypes if n != "run_id"]
    unknown = sorted({key for row in rows for key in row} - set(names))
    if unknown:
        raise SchemaError(f"table {table!r} has no columns {unknown}; it has {names}")
    return frame(table, run_id, {name: [row.get(name) for row in rows] for name in names}, len(rows))
