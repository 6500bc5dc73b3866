"""Host work of a step: ``python -m engine.bench.host``.

The engine's own scheduler, packing, collecting and routing, with a model that answers at once: what is left is what the
host does beside a GPU. Decode steps at a steady state, by number of running requests, of waiting ones, and by context;
none of it may grow with the last two. Every request streams (an output a row and step, the dearest case) unless a case
says otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from engine import ContinuousBatchingConfig, garbage, init_continuous_batching
from engine.attention import AttentionMetadata
from engine.bench.tiny_models import tiny_model
from engine.core import EngineCore
from engine.requests import Request
from engine.sampling import SamplingParams

NEW_TOKENS = 1_000


@dataclass(frozen=True, slots=True)
class Case:
    """A steady state: requests that decode, requests behind them, tokens of context, tokens a page."""

    running: int
    waiting: int = 0
    context: int = 512
    page: int = 256
    streaming: bool = True


CASES = (
    Case(1),
    Case(64),
    Case(256),
    Case(256, streaming=False),
    Case(256, page=16),
    Case(256, context=4096),
    Case(256, waiting=10_000),
    Case(1024),
    Case(1024, streaming=False),
)
PARTS = ("schedule", "fill", "launch", "collect", "route", "rest")
"""Of a step: choosing rows; packing inputs; what else stands before the device (torch's calls, the choice of tokens on
the CPU); taking the tokens; handing outputs over; everything else."""


class _Immediate:
    """Stands for a model: the same logits for every row, and nothing else."""

    def __init__(self, vocab_size: int) -> None:
        self._logits = torch.arange(vocab_size, dtype=torch.float32)

    tuned = None

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, index: torch.Tensor
    ) -> torch.Tensor:
        return self._logits.expand(len(index), -1)

    def refresh(self) -> None: ...

    def close(self) -> None: ...


class Stopwatch:
    """Adds up the CPU time that its thread spends in calls, by name; a call inside another is taken off the outer one.
    What other processes take of a shared machine is not in it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inner = 0.0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            started = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                total = time.thread_time() - started
                self.spent[name] = self.spent.get(name, 0.0) + total - self._inner
                self._inner = outer + total

        return watched

    def lap(self) -> dict[str, float]:
        """Seconds by name since the last lap."""
        spent, self.spent = self.spent, {}
        return spent


@dataclass(frozen=True, slots=True)
class Bench:
    """A core at a steady state, and how to drop what it handed over."""

    core: EngineCore
    discard: Callable[[], object]
    watch: Stopwatch

    @classmethod
    def open(cls, case: Case) -> Bench:
        """A core in which the case's requests decode, and others queue behind them."""
        model: Any = tiny_model("tiny-llama")
        model.config.max_position_embeddings = case.context + NEW_TOKENS + 1
        config = ContinuousBatchingConfig(
            page_size=case.page,
            num_blocks=case.running * -(-(case.context + NEW_TOKENS) // case.page),
            max_batch_tokens=8192,
            max_requests_per_batch=case.running,
            safety_margin=0.0,
        )
        manager = init_continuous_batching(model, GenerationConfig(max_new_tokens=NEW_TOKENS), config)
        watch = Stopwatch()
        deliver = watch.timed("route", manager._deliver)
        core = EngineCore(model, manager.shape, manager.resolved_config, manager.stats, deliver)
        core.runner.close()
        core.runner.executor = _Immediate(manager.shape.vocab_size)
        for i in range(case.running + case.waiting):
            prompt = [(i + k) % 90 for k in range(case.context)] if i < case.running else [1] * 8
            core.add(Request.create(f"r{i}", prompt, NEW_TOKENS, frozenset([95]), SamplingParams(), case.streaming))
        while any(len(r.tokens) == r.num_prompt for r in list(core.requests.values())[: case.running]):
            core.step()
        for name, owner, method in (
            ("schedule", core.scheduler, "schedule"),
            ("fill", core.runner.batch, "follow"),
            ("fill", core.runner.batch, "fill"),
            ("launch", core.runner, "launch"),
            ("collect", core, "_collect"),
            ("rest", core, "step"),
        ):
            setattr(owner, method, watch.timed(name, getattr(owner, method)))
        manager.discard_results()
        watch.lap()
        return cls(core, manager.discard_results, watch)

    def measure(self, steps: int) -> tuple[float, dict[str, float]]:
        """Median CPU ms of a step, and of each of its `PARTS`."""
        laps = []
        for _ in range(steps):
            self.core.step()
            self.discard()
            laps.append(self.watch.lap())
        parts = {name: 1e3 * statistics.median(lap.get(name, 0.0) for lap in laps) for name in PARTS}
        return 1e3 * statistics.median(sum(lap.values()) for lap in laps), parts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.bench.host", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="measured steps a case (default 200)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("CPU ms of a step, and by part; medians")
    print(f"{'running':>8}{'waiting':>8}{'context':>8}{'page':>5}{'streaming':>10}{'step':>8}", end="")
    print("".join(f"{name:>10}" for name in PARTS))
    garbage.set_aside()
    with torch.inference_mode():
        for case in CASES:
            step, parts = Bench.open(case).measure(options.steps)
            said = "yes" if case.streaming else "no"
            print(f"{case.running:>8}{case.waiting:>8}{case.context:>8}{case.page:>5}{said:>10}{step:>8.3f}", end="")
            print("".join(f"{parts[name]:>10.3f}" for name in PARTS), flush=True)
    garbage.give_back()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
