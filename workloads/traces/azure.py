"""Azure LLM inference traces (AzurePublicDataset, 2023 and 2024): csv with TIMESTAMP,ContextTokens,GeneratedTokens."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

from workloads.traces.rows import Trace, TraceError, TraceRow, count, ordered, read_text, table

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):?([0-5]\d))?")


def read_azure(path: str | None) -> Trace:
    """Read an Azure csv; column order is free and further columns are ignored. TraceError names line and column."""
    source = read_text(path, "Azure trace (csv)")
    rows = [
        TraceRow(
            t_ns=stamp_ns(fields["TIMESTAMP"], source.path, line),
            prompt_tokens=count(fields["ContextTokens"], source.path, line, "ContextTokens"),
            output_tokens=count(fields["GeneratedTokens"], source.path, line, "GeneratedTokens"),
            line=line,
        )
        for line, fields in table(source, COLUMNS)
    ]
    return ordered(source, rows)


def stamp_ns(text: str, path: str, line: int) -> int:
    """Nanoseconds since 1970 of ``YYYY-MM-DD hh:mm:ss[.fraction][zone]``; no zone is read as UTC.

    The fraction is read as digits, not as a float: the traces have seven, and datetime keeps six.
    """
    match = _STAMP.fullmatch(text.strip())
    expected = "a time like 2023-11-16 18:15:46.6805900"
    if match is None:
        raise TraceError.at(path, line, "TIMESTAMP", expected, text)
    day, clock, fraction, _, sign, hours, minutes = match.groups()
    zone = UTC
    try:
        if sign is not None:
            offset = timedelta(hours=int(hours), minutes=int(minutes))
            zone = timezone(offset if sign == "+" else -offset)
        moment = datetime.fromisoformat(f"{day} {clock}").replace(tzinfo=zone)
    except ValueError:
        raise TraceError.at(path, line, "TIMESTAMP", expected, text) from None
    seconds = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    return seconds * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))
