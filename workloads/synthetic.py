"""Synthetic workloads: lengths from distributions, random prompts, optional shared prefixes."""

from __future__ import annotations

from collections.abc import Collection

from workloads.config import SyntheticWorkload, make_lengths
from workloads.content import Content
from workloads.lengths import table_facts
from workloads.prompts import SharedPrefix, allowed_ids, random_prompts
from workloads.streams import stream


def synthetic_content(cfg: SyntheticWorkload, *, vocab_size: int, seed: int, special_ids: Collection[int]) -> Content:
    """``cfg.requests`` requests; prompt lengths, output lengths, ids and arrivals are independent streams."""
    check_synthetic(cfg)
    prompt_tokens = make_lengths(cfg.prompt_tokens, "workload.prompt_tokens")
    output_tokens = make_lengths(cfg.output_tokens, "workload.output_tokens")
    sharing = SharedPrefix(cfg.prefix.fraction, cfg.prefix.tokens, cfg.prefix.groups)
    lengths = prompt_tokens.sample(cfg.requests, stream(seed, "prompt_lengths"))
    return Content(
        prompts=random_prompts(lengths, allowed_ids(vocab_size, special_ids), seed, sharing),
        max_new_tokens=output_tokens.sample(cfg.requests, stream(seed, "output_lengths")),
        arrival_rng=stream(seed, "arrivals"),
        facts=table_facts({"prompt": prompt_tokens, "output": output_tokens}),
    )


def check_synthetic(cfg: SyntheticWorkload) -> None:
    """ValueError for settings that mean nothing; tables of lengths are read."""
    if cfg.requests < 1:
        raise ValueError(f"workload.requests is {cfg.requests}: give at least 1")
    make_lengths(cfg.prompt_tokens, "workload.prompt_tokens")
    make_lengths(cfg.output_tokens, "workload.output_tokens")
    SharedPrefix(cfg.prefix.fraction, cfg.prefix.tokens, cfg.prefix.groups)
