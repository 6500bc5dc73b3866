"""Choosing by measurement among ways to compute the same thing.

All candidates are timed a few times, the best of them and the baseline again, in turn, so that a clock that changes
between two of them does not decide. Another way than the baseline is chosen only if it wins by more than `MARGIN`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MARGIN = 0.02
"""Part of the baseline's time that a winner must save; below it, what is measured is noise."""
FINALISTS = 4
SCREENING, FINAL = 3, 11
"""Repeats of the two rounds."""

Measure = Callable[[Sequence[str], int], Sequence[float]]
"""Median seconds of each named candidate over a number of repeats taken in turn."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for one problem.

    Attributes:
        candidate: its name; the baseline's if nothing beat it.
        seconds, baseline_seconds: of a call, from the same round.
    """

    candidate: str
    seconds: float
    baseline_seconds: float


def choose(baseline: str, contenders: Sequence[str], measure: Measure) -> Choice:
    """The fastest of the candidates, or the baseline unless it is beaten by more than `MARGIN`.

    Args:
        baseline: what is used where nothing is tuned.
        contenders: the others; may be empty.
        measure: times candidates.
    """
    finalists = list(contenders)
    if len(finalists) > FINALISTS:
        times = dict(zip(finalists, measure(finalists, SCREENING), strict=True))
        finalists = sorted(finalists, key=lambda name: times[name])[:FINALISTS]
    seconds = dict(zip((baseline, *finalists), measure((baseline, *finalists), FINAL), strict=True))
    winner = min(seconds, key=lambda name: seconds[name])
    if seconds[winner] >= (1 - MARGIN) * seconds[baseline]:
        winner = baseline
    return Choice(winner, seconds[winner], seconds[baseline])


class GraphTimer:
    """Times short device operations by replaying CUDA graphs of them, so that launching takes no part in it.

    Args:
        device: a CUDA device. The stream used is the timer's own; calls must not depend on work still under way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # Of the last round, for their memory pool: one that no graph uses any more cannot be recorded into again.
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def seconds_per_call(self, candidates: Sequence[Sequence[Callable[[], object]]], repeats: int) -> list[float]:
        """Median seconds of a call of each candidate.

        Args:
            candidates: for each, calls that do the same on buffers of their own (a single buffer would be read from the
                L2 cache). Each has been called before: nothing is compiled or loaded any more.
            repeats: replays of each, taken in turn.
        """
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            graphs: list[torch.cuda.CUDAGraph] = []
            for calls in candidates:
                graphs.append(self._record(calls, [*self._graphs, *graphs]))
            for graph in graphs:  # uploads it
                graph.replay()
            marks = []
            for _ in range(repeats):
                for graph in graphs:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    graph.replay()
                    end.record()
                    marks.append((begin, end))
            self._stream.synchronize()
            self._graphs = graphs
        times = [begin.elapsed_time(end) * 1e-3 for begin, end in marks]
        return [statistics.median(times[index :: len(graphs)]) / len(calls) for index, calls in enumerate(candidates)]

    def close(self) -> None:
        """Let go of the memory that timed calls wrote to; the next round finds other."""
        self._graphs = []

    def _record(
        self, calls: Sequence[Callable[[], object]], others: Sequence[torch.cuda.CUDAGraph]
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(), which empties the allocator's caches: some thousand graphs are recorded.
        graph.capture_begin(pool=others[0].pool() if others else None, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        return graph
