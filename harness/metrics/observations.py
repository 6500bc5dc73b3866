"""A run record as arrays: one pass over the objects, everything after it is vectorised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.deliveries import UNKNOWN, Deliveries
from harness.metrics.step_log import held_spans
from harness.record import Outcome, RequestRecord, RunRecord

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Observations:
    """Times in ns after the start of the run (float64, exact below 2**53 ns; NaN = not observed).

    Attributes:
        request_ids, outcomes: per request. A request reported ok without a token is ``empty``: it is a failure.
        ok: [requests] ended by EOS or at the cap with at least one token.
        t_sched, t_submit, t_admit, t_first, t_last, t_done: [requests].
        n_tokens: [requests] tokens generated; where ``counted`` is False, how many at least.
        counted: [requests] whether that number is known.
        chunk_request: [chunks] index of the request; deliveries without tokens are left out.
        chunk_time, chunk_size: [chunks] ns after the start, tokens in it (UNKNOWN where a server did not say).
        held: [spans, 2] start and end of the steps in which the safety margin kept prefills out; None without a step
            log that tells.
        started: whether the start of the run was recorded; if not, only differences of times mean something.
    """

    request_ids: tuple[str, ...]
    outcomes: tuple[str, ...]
    ok: BoolArray
    t_sched: FloatArray
    t_submit: FloatArray
    t_admit: FloatArray
    t_first: FloatArray
    t_last: FloatArray
    t_done: FloatArray
    n_tokens: IntArray
    counted: BoolArray
    chunk_request: IntArray
    chunk_time: IntArray
    chunk_size: IntArray
    started: bool
    held: FloatArray | None = None


def _origin_ns(record: RunRecord) -> int:
    """Start of the run; if unknown, any observed time, so that differences stay exact."""
    if record.t_start_ns is not None:
        return record.t_start_ns
    for r in record.requests:
        for t in (r.t_sched_ns, r.t_submit_ns, r.t_admit_ns, r.t_done_ns):
            if t is not None:
                return t
    return 0


def _relative(times: Iterable[int | None], origin: int) -> FloatArray:
    return np.array([np.nan if t is None else t - origin for t in times], dtype=np.float64)


def _check_order(requests: list[RequestRecord], chunk_request: IntArray, chunk_time: IntArray) -> None:
    backward = (np.diff(chunk_time) < 0) & (np.diff(chunk_request) == 0)
    if backward.any():
        at = int(np.flatnonzero(backward)[0])
        raise ValueError(
            f"request {requests[chunk_request[at]].request_id!r}: a delivery is stamped "
            f"{int(chunk_time[at] - chunk_time[at + 1])} ns before the one that came ahead of it; "
            "stamp deliveries in order with time.perf_counter_ns of one process"
        )


def observe(record: RunRecord) -> Observations:
    """The columnar view of ``record``; ValueError if the deliveries of a request run backwards in time."""
    requests, origin = record.requests, _origin_ns(record)
    delivered = [Deliveries.of(r.chunks) for r in requests]
    counts = np.array([len(d) for d in delivered], dtype=np.int64)
    size = np.concatenate([np.zeros(0, np.int64), *(d.sizes for d in delivered)])
    time = np.concatenate([np.zeros(0, np.int64), *(d.times_ns for d in delivered)]) - origin
    request = np.repeat(np.arange(len(requests), dtype=np.int64), counts)
    real = size != 0
    size, time, request = size[real], time[real], request[real]
    _check_order(requests, request, time)

    seen = np.bincount(request, weights=size.clip(1), minlength=len(requests)).astype(np.int64)
    stated = np.array([UNKNOWN if r.output_tokens is None else r.output_tokens for r in requests], dtype=np.int64)
    n_tokens = np.where(stated == UNKNOWN, seen, stated)
    counted = stated != UNKNOWN
    counted |= np.bincount(request, weights=size == UNKNOWN, minlength=len(requests)) == 0
    t_first = np.full(len(requests), np.nan)
    t_last = np.full(len(requests), np.nan)
    t_last[request] = time  # in order, so the last delivery of each request stays
    t_first[request[::-1]] = time[::-1]

    outcomes = tuple(
        str(Outcome.EMPTY) if r.outcome in (Outcome.OK_EOS, Outcome.OK_LENGTH) and n == 0 else str(r.outcome)
        for r, n in zip(requests, seen, strict=True)
    )
    ok = np.array([o in (Outcome.OK_EOS, Outcome.OK_LENGTH) for o in outcomes], dtype=np.bool_)
    return Observations(
        request_ids=tuple(r.request_id for r in requests),
        outcomes=outcomes,
        ok=ok,
        t_sched=_relative((r.t_sched_ns for r in requests), origin),
        t_submit=_relative((r.t_submit_ns for r in requests), origin),
        t_admit=_relative((r.t_admit_ns for r in requests), origin),
        t_first=t_first,
        t_last=t_last,
        t_done=_relative((r.t_done_ns for r in requests), origin),
        n_tokens=n_tokens,
        counted=counted,
        chunk_request=request,
        chunk_time=time,
        chunk_size=size,
        started=record.t_start_ns is not None,
        held=held_spans(record, origin),
    )
