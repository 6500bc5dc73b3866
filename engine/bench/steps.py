"""Where a decode step's time goes: ``python -m engine.bench.steps FOLDER`` on a CUDA device.

``FOLDER`` holds a model's ``config.json``; weights are random, in bf16. For each batch the engine itself serves that
many requests; once all decode and their context is the one asked for, steps are timed by the wall clock as they follow
one another in service, then a few of the same kind are profiled and their kernels sorted by what they do. The bound of
the last columns is what the machine allows: every weight and key read once at the copy bandwidth, or every multiply-add
at the matmul rate, both measured in this process.
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
from engine.bench.ceilings import Ceilings
from engine.core import EngineCore
from engine.model_shape import ModelShape
from engine.requests import Request
from engine.sampling import SamplingParams

PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("decode_kernel", "merge_kernel", "prefill_kernel", "flash", "fmha")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "xmma", "splitk", "gemv", "dot_kernel", "matmul", "skinny")),
    ("norm/rope/act", ("_norm_kernel", "_rope_kernel", "_gated_kernel", "_write_kernel", "triton_red_", "triton_poi_")),
    ("sampling", ("argmax", "_chunk_kernel", "_pick_kernel", "reduce_kernel")),
)
"""What a kernel does, by a piece of its name; the first that fits. The rest is "other"."""

OTHER = "other"
COLUMNS = (*(part for part, _ in PARTS), OTHER)


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to."""
    lower = kernel.lower()
    return next((part for part, pieces in PARTS if any(piece in lower for piece in pieces)), OTHER)


@dataclass(frozen=True, slots=True)
class StepSplit:
    """One batch's decode step, times in ms.

    Attributes:
        wall: from one step to the next in service, median.
        host: to choose the step, pack its inputs and launch it; hidden behind the device where steps overlap.
        parts: device time by part.
        kernels: launches a step.
        bound: what the machine allows.
    """

    batch: int
    wall: float
    host: float
    parts: dict[str, float]
    kernels: float
    bound: float

    @property
    def idle(self) -> float:
        """Wall time in which no kernel ran."""
        return self.wall - sum(self.parts.values())

    def line(self) -> str:
        parts = "".join(f"{self.parts[part]:>14.3f}" for part in COLUMNS)
        return (
            f"{self.batch:>6}{self.wall:>9.3f}{parts}{self.idle:>8.3f}{self.host:>8.3f}{self.kernels:>9.0f}"
            f"{self.bound:>8.3f}{self.wall / self.bound:>7.2f}"
        )


def header() -> str:
    parts = "".join(f"{part:>14}" for part in COLUMNS)
    return f"{'batch':>6}{'wall':>9}{parts}{'idle':>8}{'host':>8}{'kernels':>9}{'bound':>8}{'ratio':>7}"


def bound_ms(model: Any, shape: ModelShape, batch: int, context: int, ceilings: Ceilings) -> float:
    """Least time of a decode step: weights of every layer and of the head, then the keys and values, each once."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    tied = head.data_ptr() == embedding.data_ptr()
    weights = sum(p.numel() for p in model.parameters()) - (0 if tied else embedding.numel())
    products = ceilings.floor(weights * shape.dtype.itemsize, 2 * weights * batch)
    seen = sum(min(context, window or context) for window in shape.windows)
    keys = 2 * batch * seen * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    return (products + keys / ceilings.bandwidth) * 1e3


class DecodeBench:
    """An engine core serving random prompts, stopped and measured at a given context.

    Attributes:
        names: device ms a step of the last measurement, by kernel.

    Args:
        model: causal LM on a CUDA device.
        config: the engine's settings.
        ceilings: the machine's.
    """

    def __init__(self, model: Any, config: ContinuousBatchingConfig, ceilings: Ceilings) -> None:
        manager = init_continuous_batching(model, GenerationConfig(max_new_tokens=16, do_sample=False), config)
        self.resolved = manager.resolved_config
        self._model, self._shape, self._stats = model, manager.shape, manager.stats
        self._ceilings = ceilings
        self._core = EngineCore(model, manager.shape, self.resolved, manager.stats, lambda outputs, ended: None)
        self._core.warm_up()
        self._random = random.Random(0)
        self.names: dict[str, float] = {}

    def close(self) -> None:
        self._core.close()

    def measure(self, batch: int, prompt: int, context: int, steps: int) -> StepSplit:
        """Time ``steps`` decode steps around ``context`` and profile eight more."""
        ids = range(self._shape.vocab_size)
        room = context - prompt + 2 * steps + 64
        for i in range(batch):
            prompt_ids = self._random.choices(ids, k=prompt)
            self._core.add(Request.create(f"{batch}-{i}", prompt_ids, room, frozenset(), SamplingParams()))
        live = list(self._core.requests.values())
        while min(len(request.tokens) for request in live) < context - steps // 2:
            self._core.step()
        times = []
        torch.cuda.synchronize()
        self._core.step()
        for _ in range(steps):
            started = time.perf_counter()
            self._core.step()
            times.append((time.perf_counter() - started) * 1e3)
        records = list(self._stats.log)[-steps:]
        if any(record.kind != "decode" or record.decode_rows != batch for record in records):
            raise RuntimeError(f"the measured steps are not decode steps of {batch} rows; raise num_blocks")
        parts, launches = self._profile(8)
        for request in live:
            self._core.cancel(request.request_id)
        self._core.drain()
        return StepSplit(
            batch,
            statistics.median(times),
            statistics.median(record.schedule_ms for record in records),
            parts,
            launches,
            bound_ms(self._model, self._shape, batch, context, self._ceilings),
        )

    def _profile(self, steps: int) -> tuple[dict[str, float], float]:
        """Device ms a step by part, and kernels a step."""
        self._core.drain()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                self._core.step()
            self._core.drain()
            torch.cuda.synchronize()
        kernels = [event for event in profiler.events() if event.device_type == torch.profiler.DeviceType.CUDA]
        spans = [(event.name, event.time_range.start, event.time_range.end) for event in kernels]
        self.names = {name: us / 1e3 / steps for name, us in exclusive_times(spans).items()}
        parts = dict.fromkeys(COLUMNS, 0.0)
        for name, ms in self.names.items():
            parts[part_of(name)] += ms
        return parts, len(spans) / steps


def exclusive_times(spans: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """By name, the time of kernels given as (name, start, end), each counted from the end of those before it: a kernel
    that is set up while its predecessor runs spends that time waiting."""
    times: dict[str, float] = {}
    done = float("-inf")
    for name, start, end in sorted(spans, key=lambda span: span[1:]):
        times[name] = times.get(name, 0.0) + max(end - max(start, done), 0.0)
        done = max(done, end)
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.steps", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of a model's config.json")
    parser.add_argument("--batches", type=integers, default=[1, 8, 32, 64, 128, 256], help="decode rows, by comma")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--context", type=int, default=592, help="context at which steps are measured")
    parser.add_argument("--steps", type=int, default=48, help="steps timed by batch")
    parser.add_argument("--attention", default=None, help="attention backend (default: the engine's choice)")
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--sync", action="store_true", help="without async batching")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also print each batch's N longest kernels")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("nothing to measure: there is no CUDA device")
        return 1
    device = torch.device("cuda")
    ceilings = Ceilings.measured(device)
    torch.cuda.empty_cache()
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(options.folder), dtype=torch.bfloat16
        ).eval()
    settings = ContinuousBatchingConfig(
        page_size=options.page_size,
        max_requests_per_batch=max(options.batches),
        max_batch_tokens=8192,
        safety_margin=0.0,
        allow_block_sharing=False,
        use_async_batching=False if options.sync else None,
        attention_backend=options.attention,
    )
    with torch.inference_mode():
        started = time.perf_counter()
        bench = DecodeBench(model, settings, ceilings)
        torch.cuda.synchronize()
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {ceilings}; "
            f"{options.folder.name}, {bench.resolved.attention_backend}, page "
            f"{options.page_size}, context {options.context}, ready in {time.perf_counter() - started:.1f} s; ms",
            flush=True,
        )
        print(header(), flush=True)
        for batch in options.batches:
            print(bench.measure(batch, options.prompt, options.context, options.steps).line(), flush=True)
            longest = sorted(bench.names.items(), key=lambda item: -item[1])
            for name, ms in longest[: options.kernels]:
                print(f"    {ms:8.3f}  {part_of(name):14} {name[:110]}")
        bench.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
