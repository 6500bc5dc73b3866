"""Result directories: a complete set of tables or none.

A directory holds a result when ``runs.parquet`` is in it. That file is moved into place last, after every other file
was written completely beside it, so an interrupted write leaves no readable half.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from harness.record import Outcome
from harness.tables import LATER, TABLES, check_frame

MARKER = "runs.parquet"


class NotAResult(ValueError):
    """A directory without a complete set of tables."""


def write_result(directory: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    """Write all tables of the schema into ``directory`` as parquet and csv; an earlier set there is replaced.

    Raises:
        ValueError: a table is missing, or a frame is not what ``harness.tables`` states (nothing is written then).
    """
    if missing := [name for name in TABLES if name not in tables]:
        raise ValueError(f"a result needs every table of harness.tables; missing: {', '.join(missing)}")
    for name, frame in tables.items():
        check_frame(name, frame)
    staging = directory / f".partial-{os.getpid()}"
    staging.mkdir(parents=True)
    try:
        # Formatting numbers as text and compressing them take about as long as each other, and neither needs Python.
        with ThreadPoolExecutor(2) as pool:
            for written in [
                pool.submit(write, staging, name, frame) for name, frame in tables.items() for write in _WRITERS
            ]:
                written.result()
        files = sorted(os.listdir(staging))
        (directory / MARKER).unlink(missing_ok=True)
        for name in sorted(files, key=lambda name: name == MARKER):
            os.replace(staging / name, directory / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def is_result(directory: Path) -> bool:
    """Whether ``directory`` holds a complete set of tables."""
    return (directory / MARKER).is_file()


def read_result(directory: Path, names: Iterable[str] = tuple(TABLES)) -> dict[str, pd.DataFrame]:
    """Read tables of a result directory, with the dtypes of the schema.

    Raises:
        NotAResult: there is no complete set of tables, or it was written by a version with other columns.
    """
    if not is_result(directory):
        raise NotAResult(f"{directory} holds no results: it has no {MARKER} (has the run finished?)")
    tables = {}
    for name in names:
        path = directory / f"{name}.parquet"
        if not path.is_file() and name in LATER:
            tables[name] = empty_table(name)
            continue
        if not path.is_file():
            raise NotAResult(f"{directory} is incomplete: it has no {path.name}")
        tables[name] = _with_schema(name, pd.read_parquet(path), path)
    return tables


def ended_requests(directory: Path) -> tuple[int, int] | None:
    """Requests that had ended in the runs of ``directory``, and all of them; None if there are none."""
    if not is_result(directory):
        return None
    outcomes = read_result(directory, ("requests",))["requests"]["outcome"]
    return (int((outcomes != Outcome.UNFINISHED.value).sum()), len(outcomes)) if len(outcomes) else None


def combine(directories: Sequence[Path]) -> dict[str, pd.DataFrame]:
    """The tables of several result directories, one below the other, in the order given."""
    parts = [read_result(directory) for directory in directories]
    combined = {}
    for name in TABLES:
        frames = [part[name] for part in parts if len(part[name])]
        combined[name] = pd.concat(frames, ignore_index=True) if frames else empty_table(name)
    return combined


def empty_table(name: str) -> pd.DataFrame:
    """The table ``name`` with its columns and dtypes and no rows."""
    return pd.DataFrame({column: pd.Series([], dtype=dtype) for column, dtype in TABLES[name].dtypes.items()})


def conform(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with the columns of table ``name`` in order and with their dtypes; a missing column becomes null.

    Raises:
        ValueError: a column the schema does not know, or a value its dtype cannot hold.
    """
    wanted = TABLES[name].dtypes
    if extra := [c for c in frame.columns if c not in wanted]:
        raise ValueError(f"table {name!r} has columns the schema does not know: {', '.join(extra)}")
    missing = {c: pd.Series(pd.NA, index=frame.index, dtype=d) for c, d in wanted.items() if c not in frame.columns}
    try:
        return frame.assign(**missing)[list(wanted)].astype(wanted)
    except (TypeError, ValueError) as error:
        raise ValueError(f"table {name!r} holds a value its column cannot: {error}") from error


def _with_schema(name: str, frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    try:
        return conform(name, frame)  # what an older version did not know is unknown
    except ValueError as error:
        raise NotAResult(f"{path} was written by another version: {error}; measure again") from error


def _write_parquet(directory: Path, name: str, frame: pd.DataFrame) -> None:
    """``name.parquet``, zstd. No dictionary of measured numbers: hardly two of them are the same."""
    table = _as_arrow(name, frame)
    repeating = [field.name for field in table.schema if not pa.types.is_floating(field.type)]
    path = directory / f"{name}.parquet"
    pa.parquet.write_table(table, path, compression="zstd", use_dictionary=repeating)
    _flush_to_disk(path)


def _write_csv(directory: Path, name: str, frame: pd.DataFrame) -> None:
    """``name.csv``; csv has no lists, so token ids are JSON texts there."""
    table = _as_arrow(name, frame)
    if name == "tokens":
        texts = [json.dumps(ids.tolist()) for ids in frame["token_ids"]]
        at = table.schema.get_field_index("token_ids")
        table = table.set_column(at, "token_ids", pa.array(texts, type=pa.string()))
    path = directory / f"{name}.csv"
    pa.csv.write_csv(table, path)
    _flush_to_disk(path)


_WRITERS = (_write_csv, _write_parquet)


def _as_arrow(name: str, frame: pd.DataFrame) -> pa.Table:
    if name != "tokens":
        return pa.Table.from_pandas(frame, preserve_index=False)
    rows = [np.asarray(ids, dtype=np.int64) for ids in frame["token_ids"]]
    offsets = np.cumsum([0, *map(len, rows)])
    # Stated, because a column without rows (or with empty lists only) has no type of its own.
    lists = pa.LargeListArray.from_arrays(offsets, np.concatenate([np.zeros(0, np.int64), *rows]))
    table = pa.Table.from_pandas(frame.drop(columns="token_ids"), preserve_index=False)
    return table.add_column(frame.columns.get_loc("token_ids"), "token_ids", lists.cast(pa.list_(pa.int64())))


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
