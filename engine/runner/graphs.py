"""CUDA graphs of steps, captured before serving.

A captured step has room for a number of decode rows and, if it is a mixed one, for a number of prefill tokens in a few
rows; a step is replayed on the smallest one it fits, padded with rows that touch only the trash block. All share one
static input buffer (a step's inputs are one copy) and one memory pool, and are captured from the largest down so that
the smaller ones find its memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.attention import AttentionMetadata, GroupTables
from engine.runner.batch import StepShape
from engine.scheduler import ScheduledRow

MIXED_PREFILLS = 8
"""Prefill rows of a captured mixed step."""
MIXED_TOKENS = (64, 128, 256, 512, 1024)
"""Prefill tokens of the captured mixed steps. Larger steps keep the device busy longer than their launches take."""
MIXED_DECODES = (0, 16, 32, 64, 128, 192, 256)
"""Decode rows beside them."""


def bucket_sizes(max_rows: int) -> list[int]:
    """Rows of the captured decode steps: 1, 2, 4, then by 8 to 256, then by 64, and ``max_rows`` itself."""
    sizes = [n for n in (1, 2, 4, *range(8, 257, 8), *range(320, max_rows + 1, 64)) if n < max_rows]
    return [*sizes, max_rows]


class StepRunner(Protocol):
    """What capturing needs of a runner."""

    device: torch.device
    windows: list[int | None]

    def upload(
        self, shape: StepShape, rows: Sequence[ScheduledRow], target: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]: ...

    def group_tables(self, views: dict[str, torch.Tensor]) -> tuple[GroupTables, ...]: ...

    def forward(
        self, shape: StepShape, views: dict[str, torch.Tensor], metadata: AttentionMetadata
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A recorded step over the static buffer ``inputs``; ``logits`` [samples, vocabulary] is overwritten by each
    replay."""

    shape: StepShape
    inputs: torch.Tensor
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


class StepGraphs:
    """All captured steps of a runner.

    Args:
        runner: whose forward pass is captured.
        max_rows: most rows of a step.
        max_tokens: most query tokens of a step.
        width: pages of the static block tables; steps with a longer request are launched instead.
        page_size: tokens a page.
        mixed, decode: whether to capture steps with prefills and decode steps.
    """

    def __init__(
        self,
        runner: StepRunner,
        max_rows: int,
        max_tokens: int,
        width: int,
        page_size: int,
        mixed: bool,
        decode: bool,
    ) -> None:
        self.width = width
        self._max_kv = width * page_size
        self._runner = runner
        self._decodes = bucket_sizes(min(max_rows, max_tokens)) if decode else []
        self._mixed_tokens = [n for n in MIXED_TOKENS if n <= max_tokens] if mixed else []
        self._mixed_decodes = [n for n in MIXED_DECODES if n + MIXED_PREFILLS <= max_rows]
        shapes = [self._shape(decodes, 0) for decodes in self._decodes]
        shapes += [self._shape(decodes, tokens) for tokens in self._mixed_tokens for decodes in self._mixed_decodes]
        shapes.sort(key=lambda shape: (shape.tokens, shape.rows), reverse=True)
        inputs = torch.zeros(max((shape.size for shape in shapes), default=0), dtype=torch.int32, device=runner.device)
        pool = torch.cuda.graph_pool_handle()
        self._steps = {(s.decodes, s.prefill_tokens): self._capture(s, inputs, pool) for s in shapes}

    def _shape(self, decodes: int, tokens: int) -> StepShape:
        prefills = MIXED_PREFILLS if tokens else 0
        return StepShape(decodes, prefills, tokens, decodes + prefills, self.width, len(self._runner.windows))

    def _capture(self, shape: StepShape, inputs: torch.Tensor, pool: Any) -> CapturedStep:
        runner = self._runner
        views = runner.upload(shape, (), inputs)  # padding rows only

        def forward() -> torch.Tensor:
            metadata = AttentionMetadata(
                num_decode=shape.decodes,
                kv_lengths=views["kv_lengths"],
                groups=runner.group_tables(views),
                cu_query=views["cu_query"] if shape.prefills else None,
                cu_kv=views["cu_kv"] if shape.prefills else None,
                max_query=shape.prefill_tokens,
                max_kv=self._max_kv,
            )
            return runner.forward(shape, views, metadata)

        stream = torch.cuda.Stream(runner.device)
        stream.wait_stream(torch.cuda.current_stream(runner.device))
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream(runner.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            logits = forward()
        return CapturedStep(shape, inputs, graph, logits)

    def find(self, shape: StepShape) -> CapturedStep | None:
        """The smallest captured step with room for a step of this shape; None if there is none."""
        if shape.width > self.width or shape.prefills > MIXED_PREFILLS:
            return None
        tokens = _at_least(self._mixed_tokens, shape.prefill_tokens) if shape.prefills else 0
        decodes = _at_least(self._mixed_decodes if shape.prefills else self._decodes, shape.decodes)
        return None if tokens is None or decodes is None else self._steps[decodes, tokens]


def _at_least(sizes: list[int], size: int) -> int | None:
    """The smallest of ascending ``sizes`` that is not below ``size``."""
    index = bisect.bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None
