"""The sink of a run: takes what happens from whatever threads the backend uses, one record a request afterwards."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.deliveries import UNKNOWN, Deliveries, DeliveryLog
from harness.record import Outcome, RequestRecord
from workloads.workload import ScheduledRequest, Workload

_FACTS = frozenset(
    (
        "cached_tokens",
        "recomputed_tokens",
        "padding_prompt_tokens",
        "padding_output_tokens",
        "prompt_tokens",
        "output_tokens",
        "output_counted_by",
        "statuses",
        "t_pending_ns",
        "t_decoding_ns",
        "t_over_ns",
        "preemptions",
        "prefill_steps",
        "kv_blocks",
    )
)


class SinkViolation(RuntimeError):
    """A backend broke the sink's contract (unknown request, second end, token after the end)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Live counts: requests sent, requests ended, requests in the workload, tokens delivered."""

    sent: int
    ended: int
    total: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What is new since the last look: columns of deliveries as bytes, and every request whose record changed.

    Attributes:
        columns: by name, see :data:`harness.deliveries.COLUMNS`.
        requests: index in the workload and the record, without its deliveries.
    """

    columns: dict[str, bytes]
    requests: list[tuple[int, RequestRecord]]


class Recorder:
    """Implements :class:`harness.backends.base.TokenSink`; every method is thread-safe and does no I/O.

    A breach of the contract is not raised into the backend's thread, where it could take down the loop that is
    being measured: it is kept in ``violations`` and fails the run afterwards.

    Attributes:
        t_start_ns: when the schedule began; None until the sender has said so.
    """

    def __init__(self, workload: Workload) -> None:
        self._records = [_empty_record(r) for r in workload.requests]
        self._index = {r.request_id: k for k, r in enumerate(workload.requests)}
        if len(self._index) != len(workload):
            raise ValueError("request ids of a workload must be unique: give each request its own request_id")
        self._open = dict(self._index)  # without the requests that ended
        self._log = DeliveryLog()
        self._answered = bytearray(len(workload))  # whether a request had a delivery
        self._sent = 0
        self._lock = threading.Lock()
        self._all_ended = threading.Event()
        self._changed: set[int] = set()
        self._taken = (0, 0)  # deliveries and ids that take_changes has given out
        self.t_start_ns: int | None = None
        self.violations: list[str] = []
        if not self._records:
            self._all_ended.set()

    # -- the sender's side ---------------------------------------------------------------------------------------

    def started(self, t_start_ns: int) -> None:
        """Note when the schedule begins."""
        self.t_start_ns = t_start_ns

    def sent(self, request_id: str, t_sched_ns: int, t_submit_ns: int, prompt_tokens: int | None = None) -> None:
        """Note that the sender is handing over ``request_id`` now (``t_submit_ns``), due at ``t_sched_ns``.

        Args:
            prompt_tokens: length of its prompt, where that was not known before (an answer is part of it).
        """
        k = self._index[request_id]
        record = self._records[k]
        with self._lock:
            record.t_sched_ns = t_sched_ns
            record.t_submit_ns = t_submit_ns
            if prompt_tokens is not None:
                record.prompt_tokens = prompt_tokens
            self._sent += 1
            self._changed.add(k)

    def wait_all_ended(self, timeout_s: float | None = None) -> bool:
        """Block until every request of the workload has ended; False if ``timeout_s`` passed first."""
        return self._all_ended.wait(timeout_s)

    # -- TokenSink -----------------------------------------------------------------------------------------------

    def on_admit(self, request_id: str, time_ns: int) -> None:
        with self._lock:
            k = self._open.get(request_id)
            if k is None:
                self._violate("admission", request_id)
            elif self._records[k].t_admit_ns is None:  # re-admission after a preemption is not a new queueing
                self._records[k].t_admit_ns = time_ns
                self._changed.add(k)

    def on_tokens(self, request_id: str, token_ids: Sequence[int], time_ns: int) -> None:
        if not token_ids:
            return
        with self._lock:
            k = self._open.get(request_id)
            if k is None:
                self._violate("tokens", request_id)
                return
            try:
                self._log.add(k, token_ids, time_ns)
            except OverflowError:
                self.violations.append(f"a token id of {request_id!r} is too large: {max(token_ids)}")
                return
            self._answered[k] = 1

    def on_hidden_tokens(self, request_id: str, count: int | None, time_ns: int) -> None:
        if count == 0:
            return
        with self._lock:
            k = self._open.get(request_id)
            if k is None:
                self._violate("tokens", request_id)
                return
            self._log.add_hidden(k, count, time_ns)
            self._answered[k] = 1

    def on_end(
        self, request_id: str, outcome: Outcome, time_ns: int, error: str | None = None, **facts: int | str | None
    ) -> None:
        with self._lock:
            k = self._open.pop(request_id, None)
            if k is None:
                self._violate("end", request_id)
                return
            record = self._records[k]
            record.t_done_ns = time_ns
            # A request that "succeeds" without a token did not answer anything.
            record.outcome = Outcome.EMPTY if outcome.ok and not self._answered[k] else outcome
            record.error = error
            for name, value in facts.items():
                if name not in _FACTS:
                    self.violations.append(f"end of {request_id!r} with unknown fact {name!r}")
                elif name != "prompt_tokens" or value is not None:  # what was sent is known even to a silent server
                    setattr(record, name, value)
            self._changed.add(k)
            last = not self._open
        if last:
            self._all_ended.set()

    # -- reading -------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Counts so far."""
        with self._lock:
            total = len(self._records)
            return Progress(self._sent, total - len(self._open), total, self._log.tokens)

    def outcome(self, request_id: str) -> Outcome:
        """How a request ended; UNFINISHED while it has not."""
        with self._lock:
            return self._records[self._index[request_id]].outcome

    def take_changes(self) -> Changes:
        """What has come since the last call; cheap enough to be asked for while measuring."""
        with self._lock:
            deliveries, ids = self._taken
            columns = self._log.tail(deliveries, ids)
            self._taken = (len(self._log), len(self._log.ids))
            changed, self._changed = self._changed, set()
            return Changes(columns, [(k, replace(self._records[k])) for k in sorted(changed)])

    def last_end_ns(self) -> int | None:
        """The latest terminal output so far; None before the first."""
        with self._lock:
            return max((r.t_done_ns for r in self._records if r.t_done_ns is not None), default=None)

    def records(self) -> list[RequestRecord]:
        """The records in the order of the workload. Read them after the backend has stopped."""
        with self._lock:
            return with_deliveries(self._records, self._log.by_request(len(self._records)))

    def check(self) -> None:
        """Raise :class:`SinkViolation` if the backend broke the contract."""
        if self.violations:
            more = f" (and {len(self.violations) - 1} more)" if len(self.violations) > 1 else ""
            raise SinkViolation(f"the backend broke the sink's contract: {self.violations[0]}{more}")

    def _violate(self, what: str, request_id: str) -> None:
        """The lock is held."""
        if request_id in self._index:
            self.violations.append(f"{what} of {request_id!r} after its end")
        else:
            self.violations.append(f"{what} of unknown request {request_id!r}")


def with_deliveries(records: Sequence[RequestRecord], deliveries: Sequence[Deliveries]) -> list[RequestRecord]:
    """``records`` with what was delivered to each.

    Deliveries of unknown sizes held one token each if the server's total says that there were as many tokens. What
    came at one moment (several events in one read) is one delivery.
    """
    complete = []
    for record, own in zip(records, deliveries, strict=True):
        unknown = bool((own.sizes == UNKNOWN).any())
        if unknown and record.output_tokens == len(own):
            own = Deliveries(own.times_ns, own.sizes.clip(1, 1), own.token_ids)
        complete.append(replace(record, chunks=own.merged()))
    return complete


def _empty_record(request: ScheduledRequest) -> RequestRecord:
    return RequestRecord(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_ids),
        planned_prompt_tokens=len(request.prompt_ids),
        max_new_tokens=request.max_new_tokens,
        prefix_group=request.prefix_group,
        holds_answer_of=request.follows if request.takes_answer else None,
        phase=request.phase,
    )
