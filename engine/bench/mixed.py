"""Launched and replayed steps with prefills, side by side: ``python -m engine.bench.mixed FOLDER`` on a CUDA device.

``FOLDER`` holds a model's ``config.json``; weights are random, in bf16. The engine serves requests that decode; beside
them each step computes new prompts of so many tokens in all, first with every size captured, then without captured
steps. A step is replayed in service only up to the size at which the device hides its launches; the last line says
where that was measured to be.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engine import ContinuousBatchingConfig, init_continuous_batching
from engine.bench.arguments import integers
from engine.core import EngineCore
from engine.requests import Request
from engine.sampling import SamplingParams

WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Steps of one size, medians in ms.

    Attributes:
        tokens: query tokens, decode rows among them.
        padding: query tokens added.
        wall: from one step to the next.
        host: to choose the step, pack its inputs and launch it.
        gpu: on the device, from first work to last; None without one.
    """

    tokens: int
    padding: int
    wall: float
    host: float
    gpu: float | None

    def cells(self) -> str:
        gpu = f"{self.gpu:>9.2f}" if self.gpu is not None else f"{'':>9}"
        return f"{self.wall:>9.2f}{gpu}{self.host:>9.2f}"


class MixedBench:
    """An engine core in which requests decode, and what a step costs that has prefills beside them.

    Args:
        model: causal LM.
        config: the engine's settings; ``max_requests_per_batch`` more than ``decodes``.
        decodes: rows that decode.
        room: tokens each of them may generate.
    """

    def __init__(self, model: Any, config: ContinuousBatchingConfig, decodes: int, room: int) -> None:
        manager = init_continuous_batching(model, GenerationConfig(max_new_tokens=room, do_sample=False), config)
        self.resolved, self._stats, self._decodes = manager.resolved_config, manager.stats, decodes
        self._vocabulary, self._random, self._number = manager.shape.vocab_size, random.Random(0), 0
        self.core = EngineCore(model, manager.shape, self.resolved, manager.stats, lambda outputs, ended: None)
        self.core.warm_up()
        for _ in range(decodes):
            self._add(16, room)
        while any(len(request.tokens) == request.num_prompt for request in self.core.requests.values()):
            self.core.step()

    def _add(self, prompt: int, new_tokens: int) -> None:
        self._number += 1
        ids = self._random.choices(range(self._vocabulary), k=prompt)
        self.core.add(Request.create(str(self._number), ids, new_tokens, frozenset(), SamplingParams()))

    def measure(self, prompts: Sequence[int], steps: int, replayed: bool) -> MixedSteps:
        """Serve ``steps`` steps, each with new prompts of these lengths, after a few that are not counted.

        Raises:
            RuntimeError: a step was another than asked for.
        """
        walls = []
        for _ in range(WARM_STEPS + steps):
            for prompt in prompts:
                self._add(prompt, 1)
            started = time.perf_counter()
            self.core.step()
            walls.append((time.perf_counter() - started) * 1e3)
        self.core.drain()
        records = list(self._stats.log)[-steps:]
        asked = (sum(prompts), self._decodes, replayed)
        for record in records:
            if (record.prefill_tokens, record.decode_rows, record.graph) != asked:
                raise RuntimeError(
                    f"a step of {record.prefill_tokens} prompt tokens and {record.decode_rows} decode rows "
                    f"({'replayed' if record.graph else 'launched'}) where {asked} was asked for: raise num_blocks or "
                    "max_batch_tokens"
                )
        gpu = [record.gpu_ms for record in records if record.gpu_ms is not None]
        return MixedSteps(
            sum(prompts) + self._decodes,
            records[-1].padded_rows,
            statistics.median(walls[WARM_STEPS:]),
            statistics.median(record.schedule_ms for record in records),
            statistics.median(gpu) if gpu else None,
        )


def split(tokens: int, longest: int) -> list[int]:
    """Prompts as equal as can be, none above ``longest``, of so many tokens in all."""
    count = -(-tokens // longest)
    return [tokens // count + (i < tokens % count) for i in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.mixed", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of a model's config.json")
    sizes = [64, 256, 512, 1024, 1500, 2048, 3072, 4096, 6144, 8160]
    parser.add_argument("--tokens", type=integers, default=sizes, help="prompt tokens of a step, by comma")
    parser.add_argument("--prompt", type=int, default=512, help="longest prompt")
    parser.add_argument("--decodes", type=int, default=32, help="rows that decode")
    parser.add_argument("--steps", type=int, default=10, help="steps measured by size")
    parser.add_argument("--page-size", type=int, default=256)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("nothing to measure: there is no CUDA device")
        return 1
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(options.folder), dtype=torch.bfloat16
        ).eval()
    settings = ContinuousBatchingConfig(
        page_size=options.page_size,
        max_requests_per_batch=256,
        max_batch_tokens=max(8192, max(options.tokens) + options.decodes),
        safety_margin=0.0,
        allow_block_sharing=False,
    )
    room = 4 * (WARM_STEPS + options.steps) * len(options.tokens)
    with torch.inference_mode():
        started = time.perf_counter()
        bench = MixedBench(model, settings, options.decodes, room)
        ready, runner = time.perf_counter() - started, bench.core.runner
        limit, captured = runner.replay_limit, len(runner.graphs or ())
        runner.capture(runner.buckets())
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {options.folder.name}, "
            f"{bench.resolved.attention_backend}, page {options.page_size}, {options.decodes} decode rows; ms"
        )
        print(f"{'tokens':>7}{'rows':>6}{'padding':>9}{'launched':>34}{'replayed':>34}")
        print(" " * 22 + 2 * f"{'':>7}{'wall':>9}{'gpu':>9}{'host':>9}")
        replayed = {n: bench.measure(split(n, options.prompt), options.steps, True) for n in options.tokens}
        runner.graphs = None
        for tokens, again in replayed.items():
            prompts = split(tokens, options.prompt)
            once = bench.measure(prompts, options.steps, False)
            print(
                f"{once.tokens:>7}{len(prompts) + options.decodes:>6}{again.padding:>9}{once.cells():>34}"
                f"{again.cells():>34}",
                flush=True,
            )
        bench.core.close()
    print(f"in service {captured} steps are captured, ready in {ready:.1f} s; with prefills: {limit}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
