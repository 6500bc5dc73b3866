"""The sink of a run: fills one :class:`RequestRecord` a request from whatever threads the backend uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.record import Outcome, RequestRecord, TokenChunk
from workloads.workload import ScheduledRequest, Workload

_FACTS = frozenset(("cached_tokens", "recomputed_tokens", "padding_prompt_tokens", "padding_output_tokens"))


class SinkViolation(RuntimeError):
    """A backend broke the sink's contract (unknown request, second end, token after the end)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Live counts: requests sent, requests ended, requests in the workload, tokens delivered."""

    sent: int
    ended: int
    total: int
    tokens: int


class Recorder:
    """Implements :class:`harness.backends.base.TokenSink`; every method is thread-safe and does no I/O.

    A breach of the contract is not raised into the backend's thread, where it could take down the loop that is
    being measured: it is kept in ``violations`` and fails the run afterwards.
    """

    def __init__(self, workload: Workload) -> None:
        self._records = {r.request_id: _empty_record(r) for r in workload.requests}
        if len(self._records) != len(workload):
            raise ValueError("request ids of a workload must be unique: give each request its own request_id")
        self._ended: set[str] = set()
        self._sent = 0
        self._tokens = 0
        self._lock = threading.Lock()
        self._all_ended = threading.Event()
        self._on_end_callbacks: list[Callable[[str], None]] = []
        self.violations: list[str] = []
        if not self._records:
            self._all_ended.set()

    # -- the sender's side ---------------------------------------------------------------------------------------

    def sent(self, request_id: str, t_sched_ns: int, t_submit_ns: int) -> None:
        """Note that the sender is handing over ``request_id`` now (``t_submit_ns``), due at ``t_sched_ns``."""
        record = self._records[request_id]
        record.t_sched_ns = t_sched_ns
        record.t_submit_ns = t_submit_ns
        with self._lock:
            self._sent += 1

    def call_on_end(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(request_id)`` once for each request that ends from now on."""
        self._on_end_callbacks.append(callback)

    def wait_all_ended(self, timeout_s: float | None = None) -> bool:
        """Block until every request of the workload has ended; False if ``timeout_s`` passed first."""
        return self._all_ended.wait(timeout_s)

    @property
    def all_ended(self) -> bool:
        return self._all_ended.is_set()

    # -- TokenSink -----------------------------------------------------------------------------------------------

    def on_admit(self, request_id: str, time_ns: int) -> None:
        record = self._open_record(request_id, "admission")
        if record is not None and record.t_admit_ns is None:  # re-admission after a preemption is not a new queueing
            record.t_admit_ns = time_ns

    def on_tokens(self, request_id: str, token_ids: Sequence[int], time_ns: int) -> None:
        if not token_ids:
            return
        record = self._open_record(request_id, "tokens")
        if record is None:
            return
        record.chunks.append(TokenChunk(time_ns, tuple(token_ids)))
        with self._lock:
            self._tokens += len(token_ids)

    def on_end(
        self, request_id: str, outcome: Outcome, time_ns: int, error: str | None = None, **facts: int | None
    ) -> None:
        record = self._open_record(request_id, "end")
        if record is None:
            return
        if unknown := set(facts) - _FACTS:
            self._violate(f"end of {request_id!r} with unknown facts {sorted(unknown)}")
        with self._lock:
            if request_id in self._ended:
                self.violations.append(f"second end of {request_id!r}")
                return
            self._ended.add(request_id)
            record.t_done_ns = time_ns
            # A request that "succeeds" without a token did not answer anything.
            record.outcome = Outcome.EMPTY if outcome.ok and not record.chunks else outcome
            record.error = error
            for name in _FACTS & set(facts):
                setattr(record, name, facts[name])
            last = len(self._ended) == len(self._records)
        for callback in self._on_end_callbacks:
            callback(request_id)
        if last:
            self._all_ended.set()

    # -- reading -------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Counts so far."""
        with self._lock:
            return Progress(self._sent, len(self._ended), len(self._records), self._tokens)

    def records(self) -> list[RequestRecord]:
        """The records in the order of the workload. Read them after the backend has stopped."""
        return list(self._records.values())

    def check(self) -> None:
        """Raise :class:`SinkViolation` if the backend broke the contract."""
        if self.violations:
            more = f" (and {len(self.violations) - 1} more)" if len(self.violations) > 1 else ""
            raise SinkViolation(f"the backend broke the sink's contract: {self.violations[0]}{more}")

    def _open_record(self, request_id: str, what: str) -> RequestRecord | None:
        record = self._records.get(request_id)
        if record is None:
            self._violate(f"{what} of unknown request {request_id!r}")
            return None
        if request_id in self._ended:
            self._violate(f"{what} of {request_id!r} after its end")
            return None
        return record

    def _violate(self, message: str) -> None:
        with self._lock:
            self.violations.append(message)


def _empty_record(request: ScheduledRequest) -> RequestRecord:
    return RequestRecord(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_ids),
        max_new_tokens=request.max_new_tokens,
        prefix_group=request.prefix_group,
    )
