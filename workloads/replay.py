"""From a recorded trace to requests: window, sampling, time and length scaling, shared prefixes from hash ids."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from workloads.config import LengthTableWorkload, ReplaySettings, TraceWorkload
from workloads.content import Content
from workloads.names import unknown_name
from workloads.prompts import Prompt, allowed_ids, draw, random_prompts
from workloads.streams import stream
from workloads.traces import Trace, TraceRow, read_trace


def trace_content(cfg: TraceWorkload, *, vocab_size: int, seed: int, special_ids: Collection[int]) -> Content:
    """The chosen rows of ``cfg.path`` as requests; recorded times start at the window's start."""
    check(cfg)
    return replayed(read_trace(cfg.path, cfg.format), cfg, vocab_size, seed, special_ids)


def replayed(trace: Trace, cfg: ReplaySettings, vocab_size: int, seed: int, special_ids: Collection[int]) -> Content:
    """The rows of ``trace`` that ``cfg`` chooses, scaled and capped, with random prompts of their lengths.

    Raises:
        ValueError: there is none.
    """
    rows = choose(trace.rows, cfg)
    if not rows:
        raise ValueError(
            f"{trace.path}: no rows {_window_words(cfg)}: "
            f"the trace spans 0 to {max(r.t_ns for r in trace.rows) / 1e9:.1f} s"
        )
    ids = allowed_ids(vocab_size, special_ids)
    if trace.block_tokens is None:
        prompts = random_prompts([cap(scaled(r.prompt_tokens, cfg), cfg.length_cap) for r in rows], ids, seed)
    else:
        prompts = block_prompts(rows, trace.block_tokens, cfg, ids, seed)
    start_ns = round(cfg.window_start_s * 1e9)
    return Content(
        prompts=prompts,
        max_new_tokens=[cap(cap(scaled(r.output_tokens, cfg), cfg.length_cap), cfg.output_cap) for r in rows],
        arrival_rng=stream(seed, "arrivals"),
        recorded_s=[(r.t_ns - start_ns) / 1e9 * cfg.time_scale for r in rows],
        facts=trace.facts | {"block_hit_fraction": block_hit_fraction(rows)},
    )


def _window_words(cfg: ReplaySettings) -> str:
    if cfg.window_end_s is None:
        return f"from {cfg.window_start_s:g} s on"
    return f"between {cfg.window_start_s:g} s and {cfg.window_end_s:g} s"


def check(cfg: ReplaySettings) -> None:
    """ValueError for settings that mean nothing."""
    if cfg.sampling not in ("first", "spread"):
        raise unknown_name("workload.sampling", cfg.sampling, ("first", "spread"))
    check_scales(time_scale=cfg.time_scale, length_scale=cfg.length_scale)
    check_caps(max_requests=cfg.max_requests, length_cap=cfg.length_cap, output_cap=cfg.output_cap)
    check_window(cfg.window_start_s, cfg.window_end_s)


def check_scales(**scales: float) -> None:
    """ValueError for a scale, named as in the config, that is not above 0."""
    for name, value in scales.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"workload.{name} is {value}: give a number above 0")


def check_caps(**caps: int | None) -> None:
    """ValueError for a limit, named as in the config, below 1."""
    for name, value in caps.items():
        if value is not None and value < 1:
            raise ValueError(f"workload.{name} is {value}: give at least 1, or null for no limit")


def check_window(start_s: float, end_s: float | None) -> None:
    """ValueError for a window that holds no time."""
    if not 0 <= start_s < (math.inf if end_s is None else end_s):
        raise ValueError(f"the window is {start_s} to {end_s} s: give 0 <= window_start_s < window_end_s")


def choose(rows: Sequence[TraceRow], cfg: ReplaySettings) -> list[TraceRow]:
    """Rows inside the window (start included, end not), thinned to ``max_requests``."""
    end_ns = math.inf if cfg.window_end_s is None else cfg.window_end_s * 1e9
    inside = [r for r in rows if cfg.window_start_s * 1e9 <= r.t_ns < end_ns]
    if cfg.max_requests is None or len(inside) <= cfg.max_requests:
        return inside
    if cfg.sampling == "first":
        return inside[: cfg.max_requests]
    return [inside[k * len(inside) // cfg.max_requests] for k in range(cfg.max_requests)]


def scaled(tokens: int, cfg: ReplaySettings | LengthTableWorkload) -> int:
    """``tokens`` times length_scale, rounded, at least 1."""
    return max(1, round(tokens * cfg.length_scale))


def cap(tokens: int, limit: int | None) -> int:
    """``tokens``, no more than ``limit`` if there is one."""
    return tokens if limit is None else min(tokens, limit)


def block_prompts(
    rows: Sequence[TraceRow], block_tokens: int, cfg: ReplaySettings, ids: Sequence[int], seed: int
) -> list[Prompt]:
    """Prompts made of blocks: the same hash id is the same run of ids wherever it occurs.

    Lengths are scaled block by block (block size rounded, at least 1; the last, partial block in proportion), so that
    prompts that shared k whole blocks share k scaled blocks. The group of a prompt is its first hash id; its shared
    prefix is what all members of the group have in common.
    """
    size = max(1, round(block_tokens * cfg.length_scale))
    blocks: dict[int, tuple[int, ...]] = {}
    contents: list[tuple[int, ...]] = []
    for row in rows:
        whole, rest = divmod(row.prompt_tokens, block_tokens)
        length = cap(whole * size + math.ceil(rest * size / block_tokens), cfg.length_cap)
        tokens: list[int] = []
        for h in _hash_ids(row)[: math.ceil(length / size)]:
            if h not in blocks:
                blocks[h] = draw(stream(seed, f"block:{h}"), ids, size)
            tokens += blocks[h]
        contents.append(tuple(tokens[:length]))
    members: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault(_hash_ids(row)[0], []).append(index)
    prompts = [Prompt(content) for content in contents]
    for group, indices in members.items():
        if len(indices) > 1:
            shared = common_prefix([contents[i] for i in indices])
            for i in indices:
                prompts[i] = Prompt(contents[i], group, shared)
    return prompts


def _hash_ids(row: TraceRow) -> tuple[int, ...]:
    if row.hash_ids is None:
        raise TypeError(f"line {row.line} has no hash ids, but its trace has blocks: the reader is at fault")
    return row.hash_ids


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> int:
    """Number of leading ids that all sequences have in common."""
    low, high = min(sequences), max(sequences)  # the two that differ first, in order of content
    return next((k for k, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def block_hit_fraction(rows: Sequence[TraceRow]) -> float | None:
    """Share of blocks an unlimited prefix cache would have seen before; None for a trace without blocks."""
    seen: set[int] = set()
    hits = total = 0
    for row in rows:
        for h in row.hash_ids or ():
            total += 1
            hits += h in seen
            seen.add(h)
    return hits / total if total else None
