"""The two anchor workloads every engine is compared on: same lengths, ids and arrival times for the same seed.

Both draw everything from one ``random.Random(seed)`` in a fixed order (prompt by prompt its length then its ids; then
the output lengths; then the arrival gaps), so the order of the lines below is part of their definition.
"""

from __future__ import annotations

import math
import random

from workloads.config import NanoWorkload, StagedWorkload
from workloads.content import Content
from workloads.lengths import check_bounds
from workloads.prompts import Prompt


def nano_content(cfg: NanoWorkload, *, vocab_size: int, seed: int) -> Content:
    """Uniform prompt and output lengths in [low, high] (the benchmark of nano-vllm)."""
    check_bounds(cfg.low, cfg.high)
    rng = random.Random(seed)
    prompts = [_ids(rng, rng.randint(cfg.low, cfg.high), cfg.vocab, vocab_size) for _ in range(_requests(cfg))]
    outputs = [rng.randint(cfg.low, cfg.high) for _ in prompts]
    return Content(prompts, outputs, arrival_rng=rng)


def staged_content(cfg: StagedWorkload, *, vocab_size: int, seed: int) -> Content:
    """Log-uniform lengths in [low, high]; outputs are half as long, at least 16. Meant for ``arrival=poisson``."""
    check_bounds(cfg.low, cfg.high)
    rng = random.Random(seed)
    low, high = math.log(cfg.low), math.log(cfg.high)

    def length() -> int:
        return int(math.exp(rng.uniform(low, high)))

    prompts = [_ids(rng, length(), cfg.vocab, vocab_size) for _ in range(_requests(cfg))]
    outputs = [max(16, length() // 2) for _ in prompts]
    return Content(prompts, outputs, arrival_rng=rng)


def _ids(rng: random.Random, length: int, vocab: int, model_vocab: int) -> Prompt:
    """Ids below the anchor's vocabulary; a model with a smaller one gets them modulo its size."""
    return Prompt(tuple(rng.randrange(0, vocab) % model_vocab for _ in range(length)))


def _requests(cfg: NanoWorkload | StagedWorkload) -> int:
    if cfg.requests < 1 or cfg.vocab < 1:
        raise ValueError(f"workload.requests is {cfg.requests}, workload.vocab {cfg.vocab}: give at least 1 each")
    return cfg.requests
