"""No engine: tokens on a known schedule. What the tables say beside it is the harness's own error."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from harness.backends.base import TokenSink
from harness.backends.generation import GenerationSettings
from harness.backends.settings import check_settings
from harness.record import ConfigValue, Outcome
from workloads.workload import ScheduledRequest

PERIOD = 8
"""After so many requests the schedule's latencies repeat."""


@dataclass(frozen=True)
class NullSettings:
    """The schedule, relative to the moment a request is submitted; all times in ms.

    Request k (in order of submission) has its first delivery after ``ttft_ms + (k mod 8) * ttft_step_ms`` and the
    following ones every ``itl_ms + (k mod 8) * itl_step_ms``.

    Attributes:
        ttft_ms: first delivery of every eighth request.
        ttft_step_ms: how much later that of the next one is.
        itl_ms: between two deliveries of every eighth request.
        itl_step_ms: how much more of the next one.
        tokens_per_delivery: tokens in each delivery; the last one holds what is left.
    """

    ttft_ms: float = 50.0
    ttft_step_ms: float = 5.0
    itl_ms: float = 20.0
    itl_step_ms: float = 1.0
    tokens_per_delivery: int = 1

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "ttft_step_ms", "itl_ms", "itl_step_ms"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"engine.{name} is {getattr(self, name)}: give at least 0 ms")
        if self.tokens_per_delivery < 1:
            raise ValueError(f"engine.tokens_per_delivery is {self.tokens_per_delivery}: give at least 1")

    def first_ms(self, k: int) -> float:
        """Submission to the first delivery of the k-th request."""
        return self.ttft_ms + k % PERIOD * self.ttft_step_ms

    def gap_ms(self, k: int) -> float:
        """Between two deliveries of the k-th request."""
        return self.itl_ms + k % PERIOD * self.itl_step_ms


@dataclass(slots=True)
class _Answer:
    """A request being answered: when its next delivery is due, and how many tokens it still gets."""

    request_id: str
    gap_ns: int
    left: int


class NullBackend:
    """Delivers from a thread of its own, as an engine's consumer does, and stamps what it does when it does it.

    A late wake-up delays the deliveries it should have made and none after them.
    """

    name = "null"
    needs_weights = False

    def __init__(self, settings: NullSettings, given: Mapping[str, Any] | None = None) -> None:
        self._settings = settings
        self._given = given or {}
        self._sink: TokenSink | None = None
        self._due: list[tuple[int, int, _Answer]] = []  # heap of (due time, tie-breaker, answer)
        self._submitted = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._worker: threading.Thread | None = None
        self._deliveries = 0

    @classmethod
    def create(cls, settings: Mapping[str, Any], generation: GenerationSettings, tokenizer: Any | None) -> NullBackend:
        """Raises ValueError for a setting it does not have or cannot use."""
        return cls(cls.configure(settings, generation), settings)

    @classmethod
    def configure(cls, settings: Mapping[str, Any], generation: GenerationSettings) -> NullSettings:
        """Its settings; raises ValueError as :meth:`create`."""
        check_settings(cls.name, settings, NullSettings.__dataclass_fields__)
        return NullSettings(**settings)

    def warm_up(self, requests: Sequence[ScheduledRequest]) -> None:
        """Nothing to warm."""

    def prepare(self, requests: Sequence[ScheduledRequest]) -> None:
        """Nothing to prepare."""

    def start(self, sink: TokenSink) -> None:
        self._sink = sink
        self._submitted = self._deliveries = 0
        if self._worker is not None:  # of the run before: it has nothing left to deliver
            return
        self._worker = threading.Thread(target=self._deliver, name="null-deliveries", daemon=True)
        self._worker.start()

    def submit(self, request: ScheduledRequest) -> None:
        now = time.perf_counter_ns()
        k = self._submitted
        self._submitted += 1
        answer = _Answer(request.request_id, round(self._settings.gap_ms(k) * 1e6), request.max_new_tokens)
        due = now + round(self._settings.first_ms(k) * 1e6)
        assert self._sink is not None
        self._sink.on_admit(request.request_id, now)  # before its end, which may be due at once
        with self._changed:
            soonest = not self._due or due < self._due[0][0]
            heapq.heappush(self._due, (due, k, answer))
            if soonest:
                self._changed.notify()

    def close_input(self) -> None:
        """Nothing waits for more input."""

    def stop(self) -> None:
        """End the deliveries; requests still open end as UNFINISHED. Safe to call again."""
        if self._worker is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._worker.join()
        self._worker = None
        assert self._sink is not None
        for _, _, answer in sorted(self._due):
            self._sink.on_end(answer.request_id, Outcome.UNFINISHED, time.perf_counter_ns())

    def config(self) -> list[ConfigValue]:
        """The schedule."""
        return [
            ConfigValue(f.name, getattr(self._settings, f.name), "user" if f.name in self._given else "default")
            for f in fields(self._settings)
        ]

    def steps(self) -> list[dict[str, Any]]:
        """None: there is no engine."""
        return []

    def counters(self) -> dict[str, float | int | None]:
        return {"deliveries": self._deliveries}

    def memory(self) -> dict[str, int | None]:
        return {}

    def _deliver(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (left := self._left_s()) > 0:
                    self._changed.wait(None if left == float("inf") else left)
                if self._stopping:
                    return
                due, k, answer = heapq.heappop(self._due)
            self._next(due, k, answer)

    def _left_s(self) -> float:
        return (self._due[0][0] - time.perf_counter_ns()) / 1e9 if self._due else float("inf")

    def _next(self, due: int, k: int, answer: _Answer) -> None:
        assert self._sink is not None
        n = min(answer.left, self._settings.tokens_per_delivery)
        answer.left -= n
        self._deliveries += 1
        now = time.perf_counter_ns()
        self._sink.on_hidden_tokens(answer.request_id, n, now)  # tokens of no vocabulary: nothing to compare
        if answer.left == 0:
            self._sink.on_end(answer.request_id, Outcome.OK_LENGTH, now, output_counted_by="counts")
            return
        with self._changed:
            heapq.heappush(self._due, (due + answer.gap_ns, k, answer))
