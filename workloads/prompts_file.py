"""Own prompts from a jsonl file: ``{"prompt": "text"}`` or ``{"prompt_ids": [1, 2]}`` a line.

Optional keys of a line: ``max_new_tokens`` and ``due_s`` (seconds after the start, for ``arrival=as_recorded``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

from workloads.config import PromptsFileWorkload
from workloads.content import Content
from workloads.prompts import Prompt
from workloads.replay import cap, check_caps, check_scales, check_window
from workloads.streams import stream
from workloads.traces.json_lines import json_objects
from workloads.traces.rows import MAX_COUNT, TraceError, read_text, seconds

KEYS = ("prompt", "prompt_ids", "max_new_tokens", "due_s")


class Tokenizer(Protocol):
    """The one method used of a transformers tokenizer."""

    def encode(self, text: str) -> list[int]: ...


def prompts_file_content(
    cfg: PromptsFileWorkload, *, vocab_size: int, seed: int, tokenizer: Tokenizer | None
) -> Content:
    """The lines of ``cfg.path`` in order of ``due_s`` if every line has one, else in order of the file."""
    check_scales(time_scale=cfg.time_scale)
    check_caps(
        max_requests=cfg.max_requests,
        max_new_tokens=cfg.max_new_tokens,
        length_cap=cfg.length_cap,
        output_cap=cfg.output_cap,
    )
    check_window(cfg.window_start_s, cfg.window_end_s)
    source = read_text(cfg.path, "prompts file (jsonl)")
    path = source.path
    entries: list[tuple[float | None, Prompt, int]] = []
    for line, record in json_objects(source):
        for key in record:
            if key not in KEYS:
                raise TraceError.at(path, line, key, f"only the keys {', '.join(KEYS)}", key)
        ids = _prompt_ids(record, path, line, vocab_size, tokenizer)
        entries.append((_due_s(record, path, line), Prompt(ids), _max_new_tokens(record, path, line, cfg)))
    if not entries:
        raise TraceError(f"{path}: no prompts: expected at least one line")
    rows, notes = len(entries), []
    due = [each[0] for each in entries if each[0] is not None]
    if timed := len(due) == rows:
        if unsorted := sum(after < before for before, after in itertools.pairwise(due)):
            notes.append(f"{path}: {unsorted} lines stand before an earlier one: sorted by due_s")
        entries = _inside(sorted(entries, key=_due_of), cfg, path)
    elif (cfg.window_start_s, cfg.window_end_s) != (0.0, None):
        raise ValueError(f"{path}: a window needs due_s in every line; {len(due)} of {rows} have it")
    elif due:
        notes.append(f"{path}: due_s is not used: only {len(due)} of {rows} lines have it")
    entries = entries[: cfg.max_requests]
    cut = sum(len(prompt.ids) > (cfg.length_cap or MAX_COUNT) for _, prompt, _ in entries)
    if cut:
        notes.append(f"{path}: {cut} of {len(entries)} prompts are cut to their first {cfg.length_cap} ids")
    return Content(
        prompts=[Prompt(prompt.ids[: cfg.length_cap]) for _, prompt, _ in entries],
        max_new_tokens=[cap(tokens, cfg.output_cap) for _, _, tokens in entries],
        arrival_rng=stream(seed, "arrivals"),
        recorded_s=[(_due_of(each) - cfg.window_start_s) * cfg.time_scale for each in entries] if timed else None,
        facts={"trace_sha256": source.sha256, "trace_rows": rows, "notes": notes},
    )


def _due_of(entry: tuple[float | None, Prompt, int]) -> float:
    if entry[0] is None:
        raise TypeError("a line without due_s among those that have one: the caller is at fault")
    return entry[0]


def _inside(
    entries: Sequence[tuple[float | None, Prompt, int]], cfg: PromptsFileWorkload, path: str
) -> list[tuple[float | None, Prompt, int]]:
    """The entries inside the window, its start included, its end not."""
    end = math.inf if cfg.window_end_s is None else cfg.window_end_s
    inside = [each for each in entries if cfg.window_start_s <= _due_of(each) < end]
    if not inside:
        raise ValueError(
            f"{path}: no lines between {cfg.window_start_s} s and {cfg.window_end_s} s: the file spans "
            f"{_due_of(entries[0]):g} to {_due_of(entries[-1]):g} s"
        )
    return inside


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
    if isinstance(record["due_s"], str):
        raise TraceError.at(path, line, "due_s", "a number of seconds", record["due_s"])
    return seconds(record["due_s"], path, line, "due_s")
