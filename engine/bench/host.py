"""Host work of a step: ``python -m engine.bench.host``.

The engine's own scheduler, packing and collecting, with a model that answers at once: what is left is what the host
does beside a GPU. Decode steps at a steady state, by number of running requests, of waiting ones, and by context; none
of it may grow with the last two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import GenerationConfig

from engine import ContinuousBatchingConfig, init_continuous_batching
from engine.attention import AttentionMetadata
from engine.bench.tiny_models import tiny_model
from engine.core import EngineCore
from engine.requests import Request
from engine.sampling import SamplingParams

NEW_TOKENS = 1_000
CASES = ((1, 0, 512), (64, 0, 512), (256, 0, 512), (256, 0, 4096), (256, 10_000, 512), (1024, 0, 512))
"""(running, waiting, context)."""


class _Immediate:
    """Stands for a model: the same logits for every row, and nothing else."""

    def __init__(self, vocab_size: int) -> None:
        self._logits = torch.arange(vocab_size, dtype=torch.float32)

    tuned = None

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, index: torch.Tensor
    ) -> torch.Tensor:
        return self._logits.expand(len(index), -1)

    def close(self) -> None: ...


def open_core(running: int, waiting: int, context: int) -> EngineCore:
    """A core in which ``running`` requests decode at ``context`` tokens and ``waiting`` queue behind them."""
    model: Any = tiny_model("tiny-llama")
    model.config.max_position_embeddings = context + NEW_TOKENS + 1
    page, blocks = 256, running * (-(-(context + NEW_TOKENS) // 256))
    config = ContinuousBatchingConfig(
        page_size=page, num_blocks=blocks, max_batch_tokens=8192, max_requests_per_batch=running, safety_margin=0.0
    )
    manager = init_continuous_batching(model, GenerationConfig(max_new_tokens=NEW_TOKENS), config)
    core = EngineCore(model, manager.shape, manager.resolved_config, manager.stats, lambda outputs: None)
    core.runner.close()
    core.runner.executor = _Immediate(manager.shape.vocab_size)
    for i in range(running + waiting):
        prompt = [(i + k) % 90 for k in range(context)] if i < running else [1] * 8
        core.add(Request.create(f"r{i}", prompt, NEW_TOKENS, frozenset(), SamplingParams(), streaming=True))
    while any(len(r.tokens) == r.num_prompt for r in list(core.requests.values())[:running]):
        core.step()
    return core


def measure(core: EngineCore, steps: int) -> float:
    """Median ms of a step."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.bench.host", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="measured steps a case (default 200)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"{'running':>8} {'waiting':>8} {'context':>8}   ms a step")
    with torch.inference_mode():
        for running, waiting, context in CASES:
            core = open_core(running, waiting, context)
            print(f"{running:>8} {waiting:>8} {context:>8}   {measure(core, options.steps):.3f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
