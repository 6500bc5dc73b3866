"""What every trace format is read into, and the errors that name file, line and column."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MAX_S = 1e9
"""Latest time in seconds, some 30 years: beyond it nobody waits, and nanoseconds would leave 64 bits."""

MAX_COUNT = 2**31 - 1
"""Most tokens of one request; more is a broken file."""


class TraceError(ValueError):
    """A workload file that cannot be read or does not say what its format asks for."""

    @classmethod
    def at(cls, path: str, line: int, column: str, expected: str, got: object) -> TraceError:
        """One line: where, what was expected, what was found (cut to 60 characters)."""
        shown = repr(got)
        return cls(f"{path}:{line}: column {column!r}: expected {expected}, got {shown[:60]}{'…' * (len(shown) > 60)}")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request.

    Attributes:
        t_ns: nanoseconds after the earliest row of the trace.
        line: line of the file, from 1.
        hash_ids: ids of the prompt's content in blocks of :attr:`Trace.block_tokens`; equal id = equal tokens.
    """

    t_ns: int
    prompt_tokens: int
    output_tokens: int
    line: int
    hash_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trace:
    """A trace in order of time (ties in order of the file).

    Attributes:
        rows: usable rows; those with no prompt or no output token are left out and counted in ``empty_rows``.
        unsorted_rows: rows whose time is before that of the row above them.
        block_tokens: tokens a hash id stands for; None if the format has none.
        sha256: of the file's bytes.
        further_notes: sentences about what else was left out.
    """

    path: str
    rows: tuple[TraceRow, ...]
    empty_rows: int
    unsorted_rows: int
    sha256: str
    block_tokens: int | None = None
    further_notes: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """For ``Workload.spec``."""
        return {
            "trace_sha256": self.sha256,
            "trace_rows": len(self.rows) + self.empty_rows,
            "trace_empty_rows_skipped": self.empty_rows,
            "trace_unsorted_rows": self.unsorted_rows,
            "notes": self.notes,
        }

    @property
    def notes(self) -> list[str]:
        """What was left out or put right, one sentence each."""
        rows = len(self.rows) + self.empty_rows
        notes = [*self.further_notes, *left_out(self.path, self.empty_rows, rows, "no prompt or no output token")]
        if self.unsorted_rows:
            notes.append(f"{self.path}: {self.unsorted_rows} of {rows} rows stand after a later one: sorted by time")
        return notes


@dataclass(frozen=True)
class SourceText:
    """A workload file as it was read: text without byte-order mark, SHA-256 of its bytes."""

    path: str
    text: str
    sha256: str


def read_text(path: str | None, what: str) -> SourceText:
    """Read a whole file; TraceError in one line if there is none or it cannot be read."""
    if not path:
        raise TraceError(f"workload.path is not set: give the {what}, workload.path=…")
    try:
        with open(path, "rb") as file:
            data = file.read()
        return SourceText(path, data.decode("utf-8-sig"), hashlib.sha256(data).hexdigest())
    except OSError as error:
        raise TraceError(f"cannot read {what} {path}: {error.strerror}; set workload.path to a readable file") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"cannot read {what} {path}: not UTF-8 text at byte {error.start}") from None


def left_out(path: str, n: int, of: int, why: str) -> list[str]:
    """The sentence that says that ``n`` of a file's rows are not used; none where all are."""
    return [f"{path}: {n} of {of} rows are left out: {why}"] if n else []


def seconds(value: object, path: str, line: int, column: str) -> float:
    """Seconds from 0 to :data:`MAX_S` from a csv field or a JSON value."""
    given = value
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    # Compared before anything is computed from it: a whole number of JSON may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_S:
        raise TraceError.at(path, line, column, f"seconds from 0 to {MAX_S:g}", given)
    return float(value)


def table(source: SourceText, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Lines of a csv file with a header as (line number, field by column), empty lines left out.

    Column order is free and further columns are ignored.

    Raises:
        TraceError: a column is not in the header, or a line has no field for one.
    """
    lines = csv.reader(io.StringIO(source.text, newline=""))
    try:
        header = [name.strip() for name in next(lines, [])]
        for name in columns:
            if name not in header:
                raise TraceError.at(source.path, 1, name, f"a header with {','.join(columns)}", ",".join(header))
        at = {name: header.index(name) for name in columns}
        for fields in lines:
            if not fields:
                continue
            for name, index in at.items():
                if index >= len(fields):
                    raise TraceError.at(source.path, lines.line_num, name, f"{len(header)} fields", ",".join(fields))
            yield lines.line_num, {name: fields[index] for name, index in at.items()}
    except csv.Error as error:  # a field of more than 128 KiB
        raise TraceError(f"{source.path}:{lines.line_num}: not a csv file: {error}") from None


def count(value: object, path: str, line: int, column: str) -> int:
    """A whole number from 0 to :data:`MAX_COUNT` from a csv field or a JSON value."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) <= 20:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
        return value
    raise TraceError.at(path, line, column, f"a whole number from 0 to {MAX_COUNT}", value)


def ordered(
    source: SourceText, rows: Sequence[TraceRow], block_tokens: int | None = None, origin_ns: int | None = None
) -> Trace:
    """A trace from rows with any time origin: sorted, moved to start at 0, empty ones left out and counted.

    Args:
        origin_ns: the time that becomes 0; None = that of the earliest row.
    """
    if not rows:
        raise TraceError(f"{source.path}: no rows: expected at least one request")
    origin = min(r.t_ns for r in rows) if origin_ns is None else origin_ns
    unsorted = sum(b.t_ns < a.t_ns for a, b in itertools.pairwise(rows))
    moved = sorted(
        (TraceRow(r.t_ns - origin, r.prompt_tokens, r.output_tokens, r.line, r.hash_ids) for r in rows),
        key=lambda r: r.t_ns,
    )
    usable = tuple(r for r in moved if r.prompt_tokens > 0 and r.output_tokens > 0)
    if not usable:
        raise TraceError(
            f"{source.path}: none of its {len(rows)} rows can be used: no prompt or no output token in any"
        )
    return Trace(source.path, usable, len(moved) - len(usable), unsorted, source.sha256, block_tokens)
