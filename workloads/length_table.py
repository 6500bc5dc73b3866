"""Pairs of prompt and output length from a table (``workloads.length_rows``), drawn together as they occurred."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from workloads.config import LengthTableWorkload
from workloads.content import Content
from workloads.length_rows import LengthRows, read_lengths
from workloads.prompts import allowed_ids, random_prompts
from workloads.replay import cap, check_caps, check_scales, scaled
from workloads.streams import stream


def length_table_content(
    cfg: LengthTableWorkload, *, vocab_size: int, seed: int, special_ids: Collection[int]
) -> Content:
    """``cfg.requests`` rows drawn with repetition; a prompt's length and its answer's come from one row."""
    rows = read_table_of(cfg)
    pairs: Sequence[tuple[int, ...]] = stream(seed, "length_rows").choices(
        rows.lengths, cum_weights=rows.weights, k=cfg.requests
    )
    lengths = [cap(scaled(prompt, cfg), cfg.length_cap) for prompt, _ in pairs]
    return Content(
        prompts=random_prompts(lengths, allowed_ids(vocab_size, special_ids), seed),
        max_new_tokens=[cap(cap(scaled(output, cfg), cfg.length_cap), cfg.output_cap) for _, output in pairs],
        arrival_rng=stream(seed, "arrivals"),
        facts={"table_sha256": rows.sha256, "table_rows": len(rows.lengths), "notes": list(rows.notes)},
    )


def read_table_of(cfg: LengthTableWorkload) -> LengthRows:
    """The table that ``cfg`` names; ValueError for settings that mean nothing."""
    check_scales(length_scale=cfg.length_scale)
    check_caps(requests=cfg.requests, length_cap=cfg.length_cap, output_cap=cfg.output_cap)
    return read_lengths(cfg.path, (cfg.prompt_column, cfg.output_column), cfg.weight_column)
