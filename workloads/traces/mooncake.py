"""Mooncake traces (FAST'25): jsonl with timestamp (ms), input_length, output_length, hash_ids of 512-token blocks."""

from __future__ import annotations

import json
import math

from workloads.traces.rows import Trace, TraceError, TraceRow, count, ordered, read_text

BLOCK_TOKENS = 512
MAX_MS = 1e13
"""Latest timestamp: times since 1970 fit, and so do their nanoseconds into 64 bits."""


def read_mooncake(path: str | None) -> Trace:
    """Read a Mooncake jsonl file. TraceError names line and column."""
    source = read_text(path, "Mooncake trace (jsonl)")
    lines = enumerate(source.text.splitlines(), start=1)
    rows = [_row(raw, source.path, line) for line, raw in lines if raw.strip()]
    return ordered(source, rows, block_tokens=BLOCK_TOKENS)


def _row(raw: str, path: str, line: int) -> TraceRow:
    record = json_object(raw, path, line)
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in record:
            raise TraceError.at(path, line, name, "a value", "no such key")
    stamp = record["timestamp"]
    # Compared before anything is computed from it: a whole number of JSON may be too large for a float.
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not abs(stamp) <= MAX_MS:
        raise TraceError.at(path, line, "timestamp", f"milliseconds, at most {MAX_MS:g}", stamp)
    prompt_tokens = count(record["input_length"], path, line, "input_length")
    output_tokens = count(record["output_length"], path, line, "output_length")
    hash_ids = record["hash_ids"]
    if not isinstance(hash_ids, list) or not all(isinstance(h, int) and not isinstance(h, bool) for h in hash_ids):
        raise TraceError.at(path, line, "hash_ids", "a list of whole numbers", hash_ids)
    blocks = math.ceil(prompt_tokens / BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise TraceError.at(
            path, line, "hash_ids", f"{blocks} ids for {prompt_tokens} tokens in blocks of {BLOCK_TOKENS}", hash_ids
        )
    return TraceRow(round(stamp * 1_000_000), prompt_tokens, output_tokens, line, tuple(hash_ids))


def json_object(raw: str, path: str, line: int) -> dict[str, object]:
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
