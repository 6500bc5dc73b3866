"""CUDA graphs of decode steps, captured before serving.

One graph per bucket of rows, from the largest down so that all share one memory pool, over static inputs: a step packs
its inputs into the bucket's views of one static buffer and replays.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.attention import AttentionMetadata
from engine.runner.batch import StepShape

if TYPE_CHECKING:
    from engine.runner.runner import ModelRunner


def bucket_sizes(max_rows: int) -> list[int]:
    """Rows of the captured steps: 1, 2, 4, then by 8 to 256, then by 64, and ``max_rows`` itself."""
    sizes = [n for n in (1, 2, 4, *range(8, 257, 8), *range(320, max_rows + 1, 64)) if n < max_rows]
    return [*sizes, max_rows]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A recorded decode step of ``shape.rows`` rows over the static buffer ``inputs``, which all captured steps share;
    ``logits`` [rows, vocabulary] is overwritten by each replay."""

    shape: StepShape
    inputs: torch.Tensor
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


class DecodeGraphs:
    """All captured decode steps of a runner.

    Args:
        runner: whose forward pass is captured.
        max_rows: largest bucket.
        width: pages of the static block tables; steps with a longer request are not replayed.
    """

    def __init__(self, runner: ModelRunner, max_rows: int, width: int) -> None:
        self.width = width
        self._runner = runner
        self._sizes = bucket_sizes(max_rows)
        largest = self._shape(self._sizes[-1])
        inputs = torch.zeros(largest.size, dtype=torch.int32, device=runner.device)
        self._steps: dict[int, CapturedStep] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._steps[size] = self._capture(self._shape(size), inputs, pool)

    def _shape(self, rows: int) -> StepShape:
        return StepShape(rows, rows, 0, rows, self.width, len(self._runner.windows))

    def _capture(self, shape: StepShape, inputs: torch.Tensor, pool: Any) -> CapturedStep:
        runner = self._runner
        views = runner.upload(shape, (), 0, inputs)  # padding rows only

        def forward() -> torch.Tensor:
            metadata = AttentionMetadata(shape.rows, views["kv_lengths"], runner.group_tables(views))
            index = torch.arange(shape.rows, device=runner.device)
            return runner.forward(views, metadata, index, shape.rows)

        stream = torch.cuda.Stream(runner.device)
        stream.wait_stream(torch.cuda.current_stream(runner.device))
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream(runner.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            logits = forward()
        return CapturedStep(shape, inputs, graph, logits)

    def at_least(self, rows: int) -> CapturedStep | None:
        """The smallest captured step with room for ``rows`` rows."""
        index = bisect.bisect_left(self._sizes, rows)
        return None if index == len(self._sizes) else self._steps[self._sizes[index]]
