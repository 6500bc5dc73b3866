"""Columns of lengths from a csv with a header.

That is how data sets whose texts are no workload by themselves come in (ShareGPT, own logs): ``cb-workload lengths``
turns a ShareGPT file into such a table, once, with a model's tokenizer.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from workloads.traces.rows import TraceError, count, left_out, read_text, table


@dataclass(frozen=True)
class LengthRows:
    """Usable rows of a table.

    Attributes:
        lengths: [rows] one entry a column asked for, each at least 1.
        weights: [rows] cumulative.
        notes: what was left out.
    """

    path: str
    lengths: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    sha256: str
    notes: tuple[str, ...]


def read_lengths(path: str | None, columns: tuple[str, ...], weight_column: str | None) -> LengthRows:
    """Read ``columns`` of a csv; rows with a length or weight of 0 are left out. TraceError names line and column."""
    source = read_text(path, "table of lengths (csv)")
    wanted = [*columns, weight_column] if weight_column is not None else list(columns)
    lengths: list[tuple[int, ...]] = []
    weights: list[float] = []
    rows = 0
    for line, fields in table(source, wanted):
        rows += 1
        row = tuple(count(fields[name], source.path, line, name) for name in columns)
        weight = 1.0 if weight_column is None else _weight(fields[weight_column], source.path, line, weight_column)
        if min(row) > 0 and weight > 0:
            lengths.append(row)
            weights.append(weight)
    if not lengths:
        raise TraceError(f"{source.path}: none of its {rows} rows has lengths of at least 1 token")
    notes = tuple(left_out(source.path, rows - len(lengths), rows, "no token, or no weight"))
    return LengthRows(source.path, tuple(lengths), tuple(itertools.accumulate(weights)), source.sha256, notes)


def _weight(text: str, path: str, line: int, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise TraceError.at(path, line, column, "a weight from 0", text)
    return value
