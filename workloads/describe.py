"""What a workload is, in numbers: how many, how fast, how bursty, how long, and how much of it a prefix cache can save.

Everything is computed from the frozen requests, so it holds for whatever built them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from workloads.workload import Workload

BLOCK_SIZES = (16, 64, 256)
"""Page sizes for which prefix reuse is stated."""


@dataclass(frozen=True)
class LengthSummary:
    """Token counts of the prompts, or of the answers asked for: percentiles are linear."""

    total: int
    mean: float
    p50: float
    p95: float
    max: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthSummary:
        p50, p95 = np.percentile(lengths, (50, 95))
        return cls(sum(lengths), sum(lengths) / len(lengths), float(p50), float(p95), max(lengths))


@dataclass(frozen=True)
class Description:
    """A workload in numbers.

    Attributes:
        sessions: chains of requests that wait for each other; as many as requests where none waits.
        concurrency: cap on requests in flight of a closed loop; None in an open one.
        waiting_requests: whose due time is known only when another one ends; no rate can be stated with them.
        duration_s: from the first due time to the last.
        rate_request_s: requests after the first / duration; None for a burst and where requests wait.
        gap_cv: coefficient of variation of the gaps between due times (Poisson 1, constant 0); None as the rate, and
            for fewer than two gaps.
        prompt_tokens, output_tokens: their lengths; with answers inside prompts, as planned.
        prefix_reuse: by block size, the share of prompt tokens that a cache without limit would serve (see
            :func:`prefix_reuse`).
        notes: what was left out of a file or put right.
    """

    name: str
    content_hash: str
    requests: int
    sessions: int
    concurrency: int | None
    waiting_requests: int
    duration_s: float
    rate_request_s: float | None
    gap_cv: float | None
    prompt_tokens: LengthSummary
    output_tokens: LengthSummary
    prefix_reuse: dict[int, float]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def describe(workload: Workload, block_sizes: Sequence[int] = BLOCK_SIZES) -> Description:
    """Sum a workload up; ValueError if it holds no request."""
    if not workload.requests:
        raise ValueError(f"workload {workload.name!r} holds no request: there is nothing to describe")
    due = np.array([r.due_s for r in workload.requests])
    waiting = waiting_requests(workload)
    duration = float(due[-1] - due[0])
    timed = waiting == 0 and duration > 0
    gaps = np.diff(due)
    return Description(
        name=workload.name,
        content_hash=workload.content_hash,
        requests=len(workload),
        sessions=workload.sessions,
        concurrency=workload.concurrency,
        waiting_requests=waiting,
        duration_s=duration,
        rate_request_s=float(len(gaps) / duration) if timed else None,
        gap_cv=float(gaps.std() / gaps.mean()) if timed and len(gaps) > 1 else None,
        prompt_tokens=LengthSummary.of([len(r.prompt_ids) for r in workload.requests]),
        output_tokens=LengthSummary.of([r.max_new_tokens for r in workload.requests]),
        prefix_reuse={size: prefix_reuse(workload, size) for size in block_sizes},
        notes=workload.notes,
    )


def waiting_requests(workload: Workload) -> int:
    """Requests that are sent when others have ended: later turns, later phases, in a closed loop all but the first."""
    if workload.phases:
        return sum(r.phase != workload.phases[0] for r in workload.requests)
    places = workload.sessions if workload.concurrency is None else min(workload.concurrency, workload.sessions)
    return len(workload) - places


def prefix_reuse(workload: Workload, block_size: int) -> float:
    """Share of prompt tokens that a prefix cache without limit serves, if each request ends before the next is sent.

    Whole blocks from the start of a prompt are served if they were computed before, but never the last token of a
    prompt, whose logits are needed. What was computed of a request is its prompt, and, where its answer is part of a
    later prompt, that answer without its last token, which is never fed to the model.

    Raises:
        ValueError: a block size below 1.
    """
    if block_size < 1:
        raise ValueError(f"block size is {block_size}: give at least 1 token")
    goes_on = {r.follows: r for r in workload.requests if r.takes_answer}
    known: dict[tuple[int, bytes], int] = {}  # (block before, content) -> number of the block
    served = 0
    for request in workload.requests:
        hit, parent = 0, -1
        for block in _blocks(request.prompt_ids[:-1], block_size):
            if (found := known.get((parent, block))) is None:
                break
            parent, hit = found, hit + block_size
        served += hit
        computed = request.prompt_ids
        if (later := goes_on.get(request.request_id)) is not None:
            computed = later.prompt_ids[: len(computed) + request.max_new_tokens - 1]
        parent = -1
        for block in _blocks(computed, block_size):
            parent = known.setdefault((parent, block), len(known))
    return served / workload.prompt_tokens


def _blocks(ids: Sequence[int], size: int) -> Iterator[bytes]:
    """The whole blocks of ``ids``."""
    data = np.asarray(ids, dtype=np.int64).tobytes()
    for start in range(0, len(ids) // size * size, size):
        yield data[8 * start : 8 * (start + size)]
