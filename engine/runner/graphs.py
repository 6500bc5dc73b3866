"""CUDA graphs of steps, captured before serving.

A captured step has room for a number of decode rows and, if it has prefills, for a number of query tokens and of
prefill rows; a step is replayed on the smallest one it fits, padded with rows and tokens that touch only the trash
block. All share one static input buffer (a step's inputs are one copy) and one memory pool, and are captured from the
largest down so that the smaller ones find its memory. The logits lie there as well: they are read before the next step
is replayed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.attention import AttentionMetadata
from engine.runner.batch import StepShape
from engine.runner.buckets import StepBuckets
from engine.scheduler import StepRows

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What capturing needs of a runner."""

    device: torch.device

    def upload(self, shape: StepShape, rows: StepRows, target: torch.Tensor | None = None) -> torch.Tensor: ...

    def greedy(self, logits: torch.Tensor, views: dict[str, torch.Tensor]) -> torch.Tensor: ...

    def padding_metadata(self, shape: StepShape, views: dict[str, torch.Tensor]) -> AttentionMetadata: ...

    def forward(
        self, shape: StepShape, views: dict[str, torch.Tensor], metadata: AttentionMetadata
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A recorded step over the static buffer ``inputs``, of which ``sample_slots`` is a part.

    ``logits`` [samples, vocabulary] are overwritten by the next replay of any step. ``greedy`` [samples] int64, the
    token of a row that asks for nothing but the most likely one, is overwritten by the next replay of this one.
    """

    shape: StepShape
    inputs: torch.Tensor
    sample_slots: torch.Tensor
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    greedy: torch.Tensor


class StepGraphs:
    """All captured steps of a runner.

    Args:
        runner: whose forward pass is captured.
        buckets: sizes of the steps.

    Attributes:
        pool_bytes: device memory that their temporary tensors and logits share.
        pool_reused: the part of it that torch counts as free: no tensor owns it, each captured step uses it anew.
    """

    def __init__(self, runner: StepRunner, buckets: StepBuckets) -> None:
        self.buckets, self._runner = buckets, runner
        started = time.perf_counter()
        shapes = buckets.shapes()
        inputs = torch.zeros(max((shape.size for shape in shapes), default=0), dtype=torch.int32, device=runner.device)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(runner.device)  # one for all: cuBLAS keeps a workspace for each it has met
        self._steps: dict[StepShape, CapturedStep] = {}
        for shape in shapes:
            try:
                self._steps[shape] = self._capture(shape, inputs, pool, stream)
            except torch.OutOfMemoryError as error:  # smaller ones may fit; this one is launched
                logger.warning(
                    "a step of %d tokens is not captured, it does not fit into memory (%s): lower max_memory_percent",
                    shape.tokens,
                    str(error).partition("\n")[0],
                )
                torch.cuda.empty_cache()
        self.pool_bytes, self.pool_reused = _pool_bytes(pool)
        logger.info(
            "%d steps captured in %.1f s; they hold %.0f MiB",
            len(self),
            time.perf_counter() - started,
            self.pool_bytes / 2**20,
        )

    def __len__(self) -> int:
        return len(self._steps)

    def _capture(self, shape: StepShape, inputs: torch.Tensor, pool: Any, stream: torch.cuda.Stream) -> CapturedStep:
        runner = self._runner
        views = shape.carve(runner.upload(shape, StepRows.none(), inputs))  # padding rows only

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            logits = runner.forward(shape, views, runner.padding_metadata(shape, views))
            return logits, runner.greedy(logits, views)

        stream.wait_stream(torch.cuda.current_stream(runner.device))
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream(runner.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            logits, greedy = forward()
        return CapturedStep(shape, inputs, views["sample_slots"], graph, _unowned(logits), greedy)

    def find(self, shape: StepShape) -> CapturedStep | None:
        """The smallest captured step with room for a step of this shape; None if there is none."""
        bucket = self.buckets.find(shape)
        return None if bucket is None else self._steps.get(bucket)


class _Region:
    """Device memory of a tensor, without a claim to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as a tensor that does not keep it: once the original is gone, steps captured later use the same
    memory, which the pool keeps mapped as long as there is a graph. One with gaps is given back as it is."""
    if not tensor.is_contiguous():
        return tensor
    return torch.as_tensor(_Region(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def _pool_bytes(pool: Any) -> tuple[int, int]:
    """Device memory reserved by a graph pool, and what of it no tensor owns."""
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
    reserved = sum(s["total_size"] for s in segments)
    return reserved, reserved - sum(s["allocated_size"] for s in segments)
