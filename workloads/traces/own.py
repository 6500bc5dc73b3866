"""Own traces without contents: jsonl with ``due_s`` (seconds after the start), ``prompt_tokens``, ``output_tokens``.

For prompts with contents, see ``workloads.prompts_file``.
"""

from __future__ import annotations

from workloads.traces.json_lines import json_objects
from workloads.traces.rows import Trace, TraceError, TraceRow, count, ordered, read_text, seconds

KEYS = ("due_s", "prompt_tokens", "output_tokens")


def read_own(path: str | None) -> Trace:
    """Read an own trace. TraceError names line and key; keys other than :data:`KEYS` are refused."""
    source = read_text(path, "trace (jsonl)")
    rows = []
    for line, record in json_objects(source):
        if missing := [key for key in KEYS if key not in record]:
            raise TraceError.at(source.path, line, missing[0], "a value", "no such key")
        if extra := sorted(record.keys() - set(KEYS)):
            raise TraceError.at(source.path, line, extra[0], f"only the keys {', '.join(KEYS)}", extra[0])
        due_s = seconds(record["due_s"], source.path, line, "due_s")
        prompt, output = (count(record[key], source.path, line, key) for key in KEYS[1:])
        rows.append(TraceRow(round(due_s * 1e9), prompt, output, line))
    return ordered(source, rows, origin_ns=0)
