"""Files of one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator

from workloads.traces.rows import SourceText, TraceError


def json_objects(source: SourceText) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number, object) of every line that is not empty; TraceError for a line that holds something else."""
    # Not splitlines(): a string may hold U+2028 and its like, which end a line for Python but not for JSON.
    for line, raw in enumerate(source.text.split("\n"), start=1):
        if raw.strip():
            yield line, _json_object(raw, source.path, line)


def _json_object(raw: str, path: str, line: int) -> dict[str, object]:
    """The JSON object of one line; TraceError with the column (character) at which it stops being one."""
    try:
        record = json.loads(raw)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{line}: column {error.colno}: expected a JSON object, got {raw[:60]!r}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets nested without end
        raise TraceError(f"{path}:{line}: column 1: expected a JSON object, got {raw[:60]!r}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{path}:{line}: column 1: expected a JSON object, got {raw[:60]!r}")
    return record
