"""Own prompts from a jsonl file: ``{"prompt": "text"}`` or ``{"prompt_ids": [1, 2]}`` a line.

Optional keys of a line: ``max_new_tokens`` and ``due_s`` (seconds after the start, for ``arrival=as_recorded``).
"""

from __future__ import annotations

from typing import Protocol

from workloads.config import PromptsFileWorkload
from workloads.content import Content
from workloads.prompts import Prompt
from workloads.streams import stream
from workloads.traces.mooncake import json_object
from workloads.traces.rows import MAX_COUNT, MAX_S, TraceError, read_text

KEYS = ("prompt", "prompt_ids", "max_new_tokens", "due_s")


class Tokenizer(Protocol):
    """The one method used of a transformers tokenizer."""

    def encode(self, text: str) -> list[int]: ...


def prompts_file_content(
    cfg: PromptsFileWorkload, *, vocab_size: int, seed: int, tokenizer: Tokenizer | None
) -> Content:
    """The first ``max_requests`` lines in order of ``due_s`` if every line has one, else in order of the file."""
    if cfg.max_new_tokens < 1 or (cfg.max_requests is not None and cfg.max_requests < 1):
        raise ValueError(
            f"workload.max_new_tokens is {cfg.max_new_tokens}, max_requests {cfg.max_requests}: give at least 1"
        )
    source = read_text(cfg.path, "prompts file (jsonl)")
    path = source.path
    entries: list[tuple[float | None, Prompt, int]] = []
    for line, raw in enumerate(source.text.splitlines(), start=1):
        if not raw.strip():
            continue
        if cfg.max_requests is not None and len(entries) == cfg.max_requests:
            break
        record = json_object(raw, path, line)
        for key in record:
            if key not in KEYS:
                raise TraceError.at(path, line, key, f"only the keys {', '.join(KEYS)}", key)
        ids = _prompt_ids(record, path, line, vocab_size, tokenizer)
        entries.append((_due_s(record, path, line), Prompt(ids), _max_new_tokens(record, path, line, cfg)))
    if not entries:
        raise TraceError(f"{path}: no prompts: expected at least one line")
    recorded = None
    if all(due is not None for due, _, _ in entries):
        entries.sort(key=lambda entry: entry[0] or 0.0)
        recorded = [due for due, _, _ in entries if due is not None]
    return Content(
        prompts=[prompt for _, prompt, _ in entries],
        max_new_tokens=[tokens for _, _, tokens in entries],
        arrival_rng=stream(seed, "arrivals"),
        recorded_s=recorded,
        facts={"trace_sha256": source.sha256, "trace_rows": len(entries)},
    )


def _prompt_ids(
    record: dict[str, object], path: str, line: int, vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    if ("prompt" in record) == ("prompt_ids" in record):
        raise TraceError.at(path, line, "prompt", "either prompt or prompt_ids", sorted(record))
    if "prompt" in record:
        if not isinstance(record["prompt"], str):
            raise TraceError.at(path, line, "prompt", "text", record["prompt"])
        if tokenizer is None:
            raise TraceError.at(
                path, line, "prompt", "prompt_ids, because this model has no tokenizer", record["prompt"]
            )
        ids: object = tokenizer.encode(record["prompt"])
        column = "prompt"
    else:
        ids, column = record["prompt_ids"], "prompt_ids"
    if not isinstance(ids, list) or not ids:
        raise TraceError.at(path, line, column, "at least one token id", record[column])
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise TraceError.at(path, line, column, f"token ids from 0 to {vocab_size - 1}", token)
    return tuple(ids)


def _max_new_tokens(record: dict[str, object], path: str, line: int, cfg: PromptsFileWorkload) -> int:
    value = record.get("max_new_tokens", cfg.max_new_tokens)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise TraceError.at(path, line, "max_new_tokens", f"a whole number from 1 to {MAX_COUNT}", value)
    return value


def _due_s(record: dict[str, object], path: str, line: int) -> float | None:
    if "due_s" not in record:
        return None
    value = record["due_s"]
    # Compared before anything is computed from it: a whole number of JSON may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_S:
        raise TraceError.at(path, line, "due_s", f"seconds from 0 to {MAX_S:g}", value)
    return float(value)
