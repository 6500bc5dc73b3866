"""What a runner takes of a GPU's memory, found by running its largest step on padding once it is warmed up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from engine.attention import AttentionMetadata
from engine.ledger import Footprint
from engine.requests import Request
from engine.resolution import ResolvedConfig
from engine.runner.batch import StepShape
from engine.sampling import Sampler, SamplingParams
from engine.scheduler import StepRows

logger = logging.getLogger(__name__)


class Allocator(Protocol):
    """Bytes that tensors have of a device, by its caching allocator."""

    def allocated(self) -> int:
        """Now."""

    def peak(self) -> int:
        """At most since `reset_peak`."""

    def reset_peak(self) -> None: ...


class CudaAllocator:
    """torch's. Resetting its peak resets what ``torch.cuda.max_memory_allocated`` says."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class FootprintMeter:
    """Made before a runner allocates anything, asked when its warm-up is over.

    Args:
        allocator: of the runner's device.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._before = allocator.allocated()

    def peak_of(self, run: Callable[[], object]) -> int:
        """Bytes that were allocated at once during a run beside those that were before it."""
        before = self._allocator.allocated()
        self._allocator.reset_peak()
        run()
        return self._allocator.peak() - before

    def footprint(
        self, cache_bytes: int, activations: int | None, pool_bytes: int | None, pool_reused: int | None
    ) -> Footprint:
        """What is held now, by what it is for.

        Args:
            cache_bytes: keys and values, allocated since the meter was made.
            activations: as `measure_activations` gives them.
            pool_bytes, pool_reused: of the captured steps' pool, and the part of it that does not count as allocated;
                None without any.
        """
        held = self._allocator.allocated() - self._before - cache_bytes
        return Footprint(activations, held - (pool_bytes or 0) + (pool_reused or 0), pool_bytes, pool_reused)


class ProfiledRunner(Protocol):
    """What the largest step needs of a runner."""

    device: torch.device
    config: ResolvedConfig
    windows: list[int | None]

    def upload(self, shape: StepShape, rows: StepRows, target: torch.Tensor | None = None) -> torch.Tensor: ...

    def padding_metadata(self, shape: StepShape, views: dict[str, torch.Tensor]) -> AttentionMetadata: ...

    def forward(
        self, shape: StepShape, views: dict[str, torch.Tensor], metadata: AttentionMetadata
    ) -> torch.Tensor: ...

    def synchronize(self) -> None: ...

    def release_unused(self) -> None: ...


def largest_step(config: ResolvedConfig, groups: int) -> StepShape:
    """A step of ``max_batch_tokens`` in which every row that there can be samples: decode rows and one prompt."""
    rows = min(config.max_requests_per_batch, config.max_batch_tokens)
    tokens = config.max_batch_tokens - (rows - 1)
    return StepShape(rows - 1, 1, tokens, rows, config.table_pages, groups)


def measure_activations(runner: ProfiledRunner, meter: FootprintMeter) -> int | None:
    """Peak of temporary tensors in the largest step, launched on padding and sampled in the most expensive way, without
    its packed inputs; None if it does not fit. What such sampling takes is given back to the device, as few steps need
    it; what the forward pass takes stays at hand.

    It runs in a thread that ends, as the loop does in a thread of its own: cuBLAS keeps a handle, and torch scratch for
    it, by thread, and those of an ended thread go to the next one that needs some. So they exist before serving.
    """
    shape = largest_step(runner.config, len(runner.windows))

    def profile() -> int | None:
        on_device = torch.cuda.device(runner.device) if runner.device.type == "cuda" else nullcontext()
        with torch.inference_mode(), on_device:
            try:
                _run(runner, shape, sampled=True)  # what stays allocated afterwards is none of a step's temporaries
                activations = meter.peak_of(lambda: _run(runner, shape, sampled=True)) - 4 * shape.size
                runner.release_unused()
                _run(runner, shape, sampled=False)
                return activations
            except torch.OutOfMemoryError as error:
                cause = str(error).partition("\n")[0]
        logger.warning(
            "the largest step (%d tokens, %d rows sampled in every way) does not fit into memory (%s): the ledger's "
            "activations stay an estimate, and such a step is made smaller when it comes; lower max_batch_tokens, "
            "max_requests_per_batch or num_blocks",
            shape.tokens,
            shape.samples,
            cause,
        )
        runner.release_unused()
        return None

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="largest-step") as thread:
        return thread.submit(profile).result()


def _run(runner: ProfiledRunner, shape: StepShape, sampled: bool) -> None:
    views = shape.carve(runner.upload(shape, StepRows.none()))
    logits = runner.forward(shape, views, runner.padding_metadata(shape, views))
    if sampled:
        _sample(logits, runner.config)
    runner.synchronize()


def _sample(logits: torch.Tensor, config: ResolvedConfig) -> Any:
    """Choose with a penalty, a filter and, where the engine gives them, log probabilities in every row."""
    top = 1 if config.return_logprobs else 0
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, top_logprobs=top)
    requests = [Request.create(str(slot), [0], 1, frozenset(), params) for slot in range(len(logits))]
    for slot, request in enumerate(requests):
        request.slot = slot
    slots = torch.arange(len(requests), device=logits.device)
    last_token = torch.zeros_like(slots)
    sampler = Sampler(logits.device, config.return_logprobs)
    return sampler.choose(logits, requests, [1] * len(requests), slots, last_token)
