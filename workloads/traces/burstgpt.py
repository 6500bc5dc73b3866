"""BurstGPT traces: csv with times in seconds and token counts, in both schemas that were released.

Releases 1.1 (``BurstGPT_1.csv``, ``BurstGPT_2.csv``) have Timestamp, Model, Request tokens, Response tokens, Total
tokens and Log Type; release 2.0 (``BurstGPT_3.csv``) also Session ID and Elapsed time. Columns are found by name, so
one reader serves both. Rows whose Response tokens are 0 are requests that failed in production.
"""

from __future__ import annotations

from workloads.traces.rows import Trace, TraceRow, count, ordered, read_text, seconds, table

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(path: str | None) -> Trace:
    """Read a BurstGPT csv. TraceError names line and column.

    Sessions are not rebuilt: the files do not say how much of the turns before a prompt repeats.
    """
    source = read_text(path, "BurstGPT trace (csv)")
    rows = [
        TraceRow(
            t_ns=round(seconds(fields["Timestamp"], source.path, line, "Timestamp") * 1e9),
            prompt_tokens=count(fields["Request tokens"], source.path, line, "Request tokens"),
            output_tokens=count(fields["Response tokens"], source.path, line, "Response tokens"),
            line=line,
        )
        for line, fields in table(source, COLUMNS)
    ]
    return ordered(source, rows)
