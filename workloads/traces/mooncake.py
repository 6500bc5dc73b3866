"""Mooncake traces (FAST'25): jsonl with timestamp (ms), input_length, output_length, hash_ids of 512-token blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from workloads.traces.json_lines import json_objects
from workloads.traces.rows import Trace, TraceError, TraceRow, count, ordered, read_text

BLOCK_TOKENS = 512
MAX_MS = 1e13
"""Latest timestamp: times since 1970 fit, and so do their nanoseconds into 64 bits."""


def read_mooncake(path: str | None) -> Trace:
    """Read a Mooncake jsonl file. TraceError names line and column."""
    source = read_text(path, "Mooncake trace (jsonl)")
    rows = [_row(record, source.path, line) for line, record in json_objects(source)]
    return ordered(source, rows, block_tokens=BLOCK_TOKENS)


def _row(record: Mapping[str, object], path: str, line: int) -> TraceRow:
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
