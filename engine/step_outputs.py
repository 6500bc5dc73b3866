"""What a step has for its consumers, handed over as one object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.requests import GenerationOutput, Request


class StepOutputs:
    """Outputs of a step's rows, in their order. The loop notes, in arrays, what may still change; whoever reads them
    makes them, in a thread of their own and as often as they are read.

    Read them only once the requests that came to their end have entered their terminal states.

    Args:
        requests: by row, those with an output.
        num_tokens: [rows] int64, their tokens after the step, prompt included.
        recomputed_tokens, preemptions: [rows] int64, as in `GenerationOutput`.
        over: [rows] bool, whose outputs are terminal.
    """

    __slots__ = ("_counters", "_over", "_requests")

    def __init__(
        self,
        requests: Sequence[Request],
        num_tokens: np.ndarray,
        recomputed_tokens: np.ndarray,
        preemptions: np.ndarray,
        over: np.ndarray,
    ) -> None:
        self._requests = requests
        self._counters = (num_tokens, recomputed_tokens, preemptions)
        self._over = over

    @classmethod
    def none(cls) -> StepOutputs:
        """No outputs."""
        return _NONE

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[GenerationOutput]:
        counters = zip(*(counts.tolist() for counts in self._counters), strict=True)
        rows = zip(self._requests, counters, self._over.tolist(), strict=True)
        # Nothing of a request that is over changes any more.
        return iter([GenerationOutput(request, None if over else then) for request, then, over in rows])


_NOTHING = np.empty(0, dtype=np.int64)
_NONE = StepOutputs((), _NOTHING, _NOTHING, _NOTHING, _NOTHING)

Outputs = StepOutputs | list[GenerationOutput]
"""Outputs handed over together, in order."""
