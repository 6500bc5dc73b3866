"""One wave of static batching: which of its rows have ended, and what was computed for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from harness.backends.base import TokenSink
from harness.backends.failures import Phase
from harness.record import Outcome
from workloads.workload import ScheduledRequest


@dataclass(slots=True)
class _Row:
    """One request of the wave: tokens delivered, and its own end once it has come."""

    request: ScheduledRequest
    tokens: int = 0
    outcome: Outcome | None = None
    end_ns: int | None = None
    reported: bool = False


class Wave:
    """Follows ``generate`` token by token and reports each row's tokens and its own end.

    Where no token can end a row early, the wave's length is known and a row's end is reported as it happens. Where EOS
    can, the padding behind a row is known only when the wave is over: its end is reported then, stamped with its own
    time.

    Args:
        requests: the rows, in order.
        width: prompt positions of every row, padding included.
        eos_ids: ids that end a row; empty = none does.
        sink: where to report; None in a warm-up.
        waiting: requests queued behind this wave, for the step log.
        log: takes one row of the step log a step, before anything of that step is reported.
        cancelled: asked at every step; True ends the wave there.
    """

    def __init__(
        self,
        requests: Sequence[ScheduledRequest],
        width: int,
        eos_ids: frozenset[int],
        sink: TokenSink | None,
        waiting: int,
        log: Callable[[dict[str, Any]], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self.requests = requests
        self.width = width
        self._rows = [_Row(r) for r in requests]
        self._eos_ids = eos_ids
        self._sink = sink
        self._waiting = waiting
        self._log = log
        self._steps = 0
        self._cancelled = cancelled
        self._step_began_ns: int | None = None

    def begin(self) -> None:
        """Note that all rows have a place now and the first forward pass begins."""
        self._step_began_ns = time.perf_counter_ns()
        if self._sink is not None:
            for row in self._rows:
                self._sink.on_admit(row.request.request_id, self._step_began_ns)

    def take(self, tokens: Sequence[int], time_ns: int) -> None:
        """One step's tokens, one a row, usable from ``time_ns`` on."""
        self._log_step(time_ns)
        for row, token in zip(self._rows, tokens, strict=True):
            if row.outcome is not None:
                continue
            row.tokens += 1
            if self._sink is not None:
                self._sink.on_tokens(row.request.request_id, (token,), time_ns)
            if token in self._eos_ids:
                row.outcome, row.end_ns = Outcome.OK_EOS, time_ns
            elif row.tokens >= row.request.max_new_tokens:
                row.outcome, row.end_ns = Outcome.OK_LENGTH, time_ns
            if row.outcome is not None and not self._eos_ids:
                self._report(row, max(r.max_new_tokens for r in self.requests))

    def close(self) -> None:
        """The wave is over: report the ends not reported yet; a row that did not end was cut off by ``cancelled``."""
        now = time.perf_counter_ns()
        for row in self._rows:
            if row.outcome is None:
                row.outcome, row.end_ns = Outcome.UNFINISHED, now
            self._report(row, self._steps)

    def fail(self, classify: Callable[[Phase], Outcome], error: str) -> None:
        """``generate`` raised: rows that had not ended fail with the outcome that ``classify`` gives their phase."""
        now = time.perf_counter_ns()
        for row in self._rows:
            if row.outcome is None:
                row.outcome, row.end_ns = classify("decode" if row.tokens else "prefill"), now
                self._report(row, self._steps, error)
            else:
                self._report(row, self._steps)

    def streamer(self) -> BaseStreamer:
        """What ``generate`` hands its tokens to."""
        return _Streamer(self)

    def stopping_criteria(self) -> StoppingCriteriaList:
        """Ends a row at its own ``max_new_tokens``, and with that the wave when its last row has ended."""
        return StoppingCriteriaList([_RowCaps([r.max_new_tokens for r in self.requests], self.width, self._cancelled)])

    def _report(self, row: _Row, computed: int, error: str | None = None) -> None:
        if row.reported or self._sink is None or row.outcome is None or row.end_ns is None:
            return
        row.reported = True
        self._sink.on_end(
            row.request.request_id,
            row.outcome,
            row.end_ns,
            error,
            padding_prompt_tokens=self.width - len(row.request.prompt_ids),
            padding_output_tokens=computed - row.tokens,
        )

    def _log_step(self, time_ns: int) -> None:
        began = time_ns if self._step_began_ns is None else self._step_began_ns
        first = self._steps == 0
        rows = len(self._rows)
        live = sum(row.outcome is None for row in self._rows)
        self._log(
            {
                "t_ns": began,
                "kind": "prefill" if first else "decode",
                "decode_rows": 0 if first else live,
                "prefill_rows": rows if first else 0,
                "prefill_tokens": sum(len(r.prompt_ids) for r in self.requests) if first else 0,
                "kv_tokens": rows * (self.width + self._steps),
                "running": live,
                "waiting": self._waiting,
                "preempted": 0,
                "step_ms": (time_ns - began) / 1e6,
            }
        )
        self._steps += 1
        self._step_began_ns = time_ns


class _Streamer(BaseStreamer):
    """Passes each step's tokens to the wave; the first call of ``generate`` is the prompt and is dropped."""

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._wave.take(value.tolist(), time.perf_counter_ns())

    def end(self) -> None:
        """Nothing to do: ``generate`` returns right after."""


class _RowCaps(StoppingCriteria):
    """Row r is done after caps[r] new tokens; all are when cancelled."""

    def __init__(self, caps: Sequence[int], width: int, cancelled: Callable[[], bool]) -> None:
        self._caps = torch.tensor(caps)
        self._width = width
        self._cancelled = cancelled

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self._cancelled():
            return torch.ones(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        self._caps = self._caps.to(input_ids.device)
        return self._caps <= input_ids.shape[1] - self._width
