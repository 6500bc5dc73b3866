"""A request from admission to its one terminal output.

`Request` is the engine's private state: the scheduler, the cache and the runner read and write it from the loop thread
only. `GenerationOutput` is what leaves the engine: a snapshot that never changes after it was made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from engine.sampling.logprobs import TopTokens
from engine.sampling.params import SamplingParams
from engine.sampling.random import child_seed
from engine.slot_counters import SlotCounters


class RequestStatus(IntEnum):
    """Life cycle of a request. 0-4 are transformers' numbers, so the two enums compare equal; ours are above."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5


# A member of an enumeration is slow to look up.
_OVER = int(RequestStatus.FINISHED)
_DECODING = RequestStatus.DECODING


class FinishReason(StrEnum):
    """Why a finished request ended."""

    STOP = "stop"
    LENGTH = "length"


class GenerationOutput:
    """What a consumer receives: a partial output of a streaming request, or the terminal output of any request.

    The token list of the request only ever grows, so a snapshot is a reference to it and a length: handing one over per
    token costs the same whatever has been generated before. The lists are copied when they are read.

    Attributes:
        request_id: as given or generated at submission.
        prompt_ids: token ids of the prompt.
        generated_tokens: token ids so far, prompt excluded; the EOS or the stop sequence that ended the request is
            their end.
        logprobs: log probability of each generated token (empty unless ``return_logprobs``).
        top_logprobs: for each generated token the most likely (id, log probability) pairs, the most likely first (empty
            unless the request asks for ``top_logprobs``). Tokens that a filter excluded are left out.
        timestamps: ``time.perf_counter()`` seconds, one a token; None unless ``record_timestamps``.
        created_time: ``time.perf_counter()`` seconds at submission.
        lifespan: (left the queue, ended) in ``time.perf_counter()`` seconds; -1 where it has not happened.
        status: a `RequestStatus`.
        finish_reason: "stop" or "length" once finished, else None.
        error: one line naming the cause when failed or cancelled, else None.
        cached_tokens: prompt tokens served from the prefix cache, or shared with the request it is a child of.
        recomputed_tokens: tokens computed again because the request was preempted.
        preemptions: how often it was preempted.
        status_times: (status, ``time.perf_counter()`` seconds at which it was first entered), in order. A preempted
            request is pending again, ``preemptions`` times; that is not listed.
        prefill_steps: steps that computed tokens of its prompt, or what a preemption had lost.
        kv_blocks: blocks it held when it ended; None before, or if it ended in the queue.
    """

    __slots__ = ("_length", "_request", "preemptions", "recomputed_tokens", "request_id", "status")

    def __init__(self, request: Request, then: tuple[int, int, int] | None = None) -> None:
        """
        Args:
            request: as it is now, unless ``then`` is given.
            then: tokens it had, prompt included, ``recomputed_tokens`` and ``preemptions`` at some time at which it
                decoded on.
        """
        # Made for each token of a stream, so it notes what may still change and reads the rest when asked.
        self._request = request
        self.request_id = request.request_id
        if then is None:
            length, self.status = len(request.tokens), request.status
            self.recomputed_tokens, self.preemptions = request.recomputed_tokens, request.preemptions
        else:
            self.status = _DECODING
            length, self.recomputed_tokens, self.preemptions = then
        self._length = length - request.num_prompt

    @property
    def created_time(self) -> float:
        return self._request.created_time

    @property
    def lifespan(self) -> tuple[float, float]:
        return self._request.admitted_time, self._request.ended_time if self.is_finished() else -1.0

    @property
    def status_times(self) -> list[tuple[RequestStatus, float]]:
        request = self._request
        entered = [
            (RequestStatus.PENDING, request.created_time),
            (RequestStatus.PREFILLING, request.admitted_time),
            (RequestStatus.DECODING, request.decoding_time),
        ]
        if self.is_finished():
            entered.append((request.status, request.ended_time))
        return [(status, at) for status, at in entered if at >= 0]

    @property
    def prefill_steps(self) -> int:
        return self._request.prefill_steps

    @property
    def kv_blocks(self) -> int | None:
        return self._request.kv_blocks

    @property
    def error(self) -> str | None:
        return self._request.error if self.is_finished() else None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._request.finish_reason if self.is_finished() else None

    @property
    def cached_tokens(self) -> int:
        return self._request.cached_tokens

    @property
    def prompt_ids(self) -> list[int]:
        return self._request.tokens[: self._request.num_prompt]

    @property
    def generated_tokens(self) -> list[int]:
        start = self._request.num_prompt
        return self._request.tokens[start : start + self._length]

    @property
    def num_generated(self) -> int:
        """Length of `generated_tokens` without copying them."""
        return self._length

    def tokens_since(self, index: int) -> list[int]:
        """Generated tokens from ``index`` on: what is new for a consumer that has seen ``index`` tokens."""
        start = self._request.num_prompt
        return self._request.tokens[start + index : start + self._length]

    @property
    def logprobs(self) -> list[float]:
        return self._request.logprobs[: self._length]

    @property
    def top_logprobs(self) -> list[TopTokens]:
        return self._request.top_logprobs[: self._length]

    @property
    def timestamps(self) -> list[float] | None:
        times = self._request.timestamps
        return None if times is None else times[: self._length]

    def is_finished(self) -> bool:
        """Whether this is the terminal output: finished, failed or cancelled."""
        return self.status >= _OVER

    def __repr__(self) -> str:
        tail = f", error={self.error!r}" if self.error else ""
        return f"GenerationOutput({self.request_id!r}, {self.status.name}, {self._length} tokens{tail})"


def child_id(request_id: str, index: int) -> str:
    """Id of a request's ``index``-th child, as transformers names it."""
    return f"{request_id}__child#{index}"


@dataclass(slots=True, eq=False)
class Request:
    """Engine-side state of one request.

    The one rule that scheduling rests on: ``num_computed`` chases ``num_tokens``. Prefill, a chunk of a prefill,
    decode, resumption after a preemption and a prefix hit differ only in how far apart the two are.

    Attributes:
        tokens: prompt then generated ids, append-only.
        num_prompt: how many of ``tokens`` are the prompt.
        slot: its place among the running requests, -1 while it does not run.
        slots: where its counters are while it runs, None otherwise.
        tables: per layer group, the block id of each page of the sequence (0: a page behind a sliding window).
        num_registered: pages already offered to the prefix cache.
        children: further sequences of the same prompt that wait for it to be computed.
        parent: the request it waits for as one of those.
        decoding_time: when the step was launched that samples its first token.
        prefill_steps, kv_blocks: as in `GenerationOutput`.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    sampling: SamplingParams
    streaming: bool = False
    timestamps: list[float] | None = None
    created_time: float = 0.0

    slot: int = -1
    slots: SlotCounters | None = None
    _num_computed: int = field(default=0, init=False)  # while it does not run
    _num_in_flight: int = field(default=0, init=False)
    tables: tuple[list[int], ...] = ()
    num_registered: int = 0

    children: list[Request] = field(default_factory=list)
    parent: Request | None = None

    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopTokens] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    finish_reason: FinishReason | None = None
    error: str | None = None
    admitted_time: float = -1.0
    decoding_time: float = -1.0
    ended_time: float = -1.0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    prefill_steps: int = 0
    kv_blocks: int | None = None
    preemptions: int = 0
    num_lost: int = 0  # positions computed before the last preemption

    @classmethod
    def create(
        cls,
        request_id: str,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
        sampling: SamplingParams,
        streaming: bool = False,
        record_timestamps: bool = False,
    ) -> Request:
        tokens = list(prompt_ids)
        return cls(
            request_id=request_id,
            tokens=tokens,
            num_prompt=len(tokens),
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            sampling=sampling,
            streaming=streaming,
            timestamps=[] if record_timestamps else None,
            created_time=time.perf_counter(),
        )

    def rename(self, request_id: str) -> None:
        """Give it, and with it its children, another id before it is queued."""
        self.request_id = request_id
        for index, child in enumerate(self.children):
            child.request_id = child_id(request_id, index)

    def bear(self, count: int) -> None:
        """Give it ``count`` children: the same prompt and settings, random streams of their own."""
        for index in range(count):
            child = Request.create(
                child_id(self.request_id, index),
                self.tokens[: self.num_prompt],
                self.max_new_tokens,
                self.eos_token_ids,
                self.sampling.override(seed=child_seed(self.sampling.seed, index)),
                self.streaming,
                self.timestamps is not None,
            )
            child.parent = self
            self.children.append(child)

    @property
    def num_computed(self) -> int:
        """Positions whose keys and values are written by steps launched so far."""
        return self._num_computed if self.slots is None else int(self.slots.num_computed[self.slot])

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        if self.slots is None:
            self._num_computed = value
        else:
            self.slots.num_computed[self.slot] = value

    @property
    def num_in_flight(self) -> int:
        """Tokens sampled by launched steps whose ids have not reached the host yet."""
        return self._num_in_flight if self.slots is None else int(self.slots.num_in_flight[self.slot])

    @num_in_flight.setter
    def num_in_flight(self, value: int) -> None:
        if self.slots is None:
            self._num_in_flight = value
        else:
            self.slots.num_in_flight[self.slot] = value

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, those still on their way to the host included."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_tokens(self) -> int:
        """Positions whose keys and values it needs at most: the last generated token is never fed back."""
        return self.num_prompt + self.max_new_tokens - 1

    @property
    def is_over(self) -> bool:
        return self.status >= _OVER

    @property
    def needs(self) -> int:
        """Tokens it could compute now; 0 once its last allowed token is computed or on its way."""
        if self.num_tokens - self.num_prompt >= self.max_new_tokens:
            return 0
        return self.num_tokens - self.num_computed

    @property
    def tenancy(self) -> int:
        """Number of its stay among the running requests; 0 while it does not run."""
        return 0 if self.slots is None else int(self.slots.tenancy[self.slot])

    def append(self, token: int, now: float, logprob: float | None = None, top: TopTokens | None = None) -> None:
        """Take one generated token that reached the host at ``now`` (seconds)."""
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if top is not None:
            self.top_logprobs.append(top)
        if self.timestamps is not None:
            self.timestamps.append(now)

    def comes_to_its_end(self) -> bool:
        """Whether its newest token is its last one, which then becomes its finish reason."""
        if self.tokens[-1] in self.eos_token_ids or (self.sampling.stop_sequences and self._ends_with_stop()):
            self.finish_reason = FinishReason.STOP
        elif self.num_generated >= self.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None

    def _ends_with_stop(self) -> bool:
        """Whether the output, not the prompt before it, ends with a stop sequence."""
        generated = self.num_generated
        return generated >= self.sampling.min_new_tokens and any(
            len(stop) <= generated and self.tokens[-len(stop) :] == list(stop) for stop in self.sampling.stop_sequences
        )

    def end(self, status: RequestStatus, error: str | None = None) -> None:
        """Enter a terminal state; a request ends exactly once."""
        if self.is_over:
            raise RuntimeError(f"request {self.request_id!r} already ended as {self.status.name}")
        self.status = status
        self.error = error
        self.ended_time = time.perf_counter()
