"""ShareGPT conversations as a table of lengths, made once with a model's tokenizer.

The file is a JSON list of ``{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}``. A row
is a conversation's first question and the answer to it, the pair that serving benchmarks usually take from this set.
"""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

from workloads.prompts_file import Tokenizer
from workloads.traces.rows import TraceError, read_text

COLUMNS = ("prompt_tokens", "output_tokens")


def write_length_table(conversations: Path, tokenizer: Tokenizer, table: Path) -> tuple[int, int]:
    """Write ``table`` (csv) and return how many rows it has and how many conversations have no such pair.

    Raises:
        TraceError: the file is not what it should be, or none of its conversations has one.
    """
    source = read_text(str(conversations), "ShareGPT file (JSON)")
    try:
        entries = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source.path}: not JSON: {error}") from None
    if not isinstance(entries, list):
        raise TraceError(f"{source.path}: expected a JSON list of conversations, got {source.text[:40]!r}")
    pairs = [pair for entry in entries if (pair := _first_exchange(entry)) is not None]
    if not pairs:
        raise TraceError(f"{source.path}: none of its {len(entries)} conversations has a question and an answer")
    with table.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows((len(tokenizer.encode(prompt)), len(tokenizer.encode(answer))) for prompt, answer in pairs)
    return len(pairs), len(entries) - len(pairs)


def _first_exchange(entry: object) -> tuple[str, str] | None:
    """Texts of the first turn of a person that is answered next; None if there is none."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        return None
    said = [(t.get("from"), t.get("value")) for t in turns if isinstance(t, dict)]
    for (asker, prompt), (answerer, answer) in itertools.pairwise(said):
        if asker in ("human", "user") and answerer in ("gpt", "chatgpt", "assistant"):
            return (
                (prompt, answer) if isinstance(prompt, str) and isinstance(answer, str) and prompt and answer else None
            )
    return None
