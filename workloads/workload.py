"""The frozen workload: what is sent, when, and how many tokens are asked for.

A :class:`Workload` is the only thing that passes from this package to the harness. It is immutable and
carries a content hash, so that two runs can prove that they were given the same requests.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of a workload.

    Attributes:
        request_id: unique within the workload.
        due_s: seconds after the start of the run at which the request is to be sent; 0.0 in a burst. It is a lower
            bound for a request that waits for another one's end: one that ``follows``, or one in a closed loop.
        prompt_ids: token ids of the prompt, never empty. With ``takes_answer`` a plan: see there.
        max_new_tokens: cap on generated tokens, at least 1.
        prefix_group: which group of requests shares this request's first ``prefix_tokens`` ids; None if none.
        prefix_tokens: length in tokens of the prefix shared with the group.
        follows: id of the request that must have ended before this one is sent (the turn before, in a session).
        think_s: seconds between the end that this request waits for and the moment it is due: of the request that it
            follows, or, in a closed loop, of the one whose place it takes.
        takes_answer: the prompt is that of the request it follows, then its answer, then new ids. ``prompt_ids`` holds
            as many ids as that request's ``max_new_tokens`` in the answer's place, for whoever sends it to replace.
        phase: requests of a phase are sent when every request of the phases before it has ended; None = the workload
            has no phases.
    """

    request_id: str
    due_s: float
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    prefix_group: int | None = None
    prefix_tokens: int = 0
    follows: str | None = None
    think_s: float = 0.0
    takes_answer: bool = False
    phase: int | None = None

    def answering(
        self, before: ScheduledRequest, sent_ids: tuple[int, ...], answer: tuple[int, ...]
    ) -> ScheduledRequest:
        """This request with what was really sent and answered one turn before in its prompt.

        Args:
            before: the request that this one follows, as it was planned.
            sent_ids: the prompt with which it was sent.
            answer: the ids it was answered with, however many.
        """
        own = self.prompt_ids[len(before.prompt_ids) + before.max_new_tokens :]
        return replace(self, prompt_ids=sent_ids + answer + own)


@dataclass(frozen=True)
class Workload:
    """An immutable list of requests in order of due time, and what built it.

    Attributes:
        name: short name for tables and file names.
        requests: in order of ``due_s``.
        concurrency: closed-loop cap on requests in flight; None for an open loop.
        spec: the resolved settings that built the workload (arrival, lengths, seeds, trace file hash …); ``notes`` in
            it are sentences about what was left out of a file or put right.
        measured_gaps: first and last token index whose gaps its phases are about; None = all.
    """

    name: str
    requests: tuple[ScheduledRequest, ...]
    concurrency: int | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    measured_gaps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """ValueError where requests follow others in a way that cannot be sent."""
        known: set[str] = set()
        followed: set[str] = set()
        for r in self.requests:
            if r.follows is not None and (r.follows not in known or r.follows in followed):
                raise ValueError(
                    f"request {r.request_id!r} follows {r.follows!r}: each may follow one that stands before it and "
                    "that no other follows"
                )
            if r.follows is not None:
                followed.add(r.follows)
            elif r.takes_answer:
                raise ValueError(f"request {r.request_id!r} takes an answer but follows none")
            known.add(r.request_id)
        if self.phases and (self.concurrency is not None or followed or None in {r.phase for r in self.requests}):
            raise ValueError(
                "a workload with phases has all its requests in them, no closed loop and no sessions: what waits for "
                "what could not be told"
            )

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) over every request and the concurrency cap; independent of name and spec."""
        digest = hashlib.sha256(json.dumps({"concurrency": self.concurrency}).encode())
        for r in self.requests:
            head = [r.request_id, r.due_s, r.max_new_tokens, r.prefix_group, r.prefix_tokens]
            waits = (r.follows, r.think_s, r.takes_answer)
            if waits != (None, 0.0, False):  # absent where there is nothing to say: hashes of plain requests stay
                head += waits
            if r.phase is not None:
                head.append(r.phase)
            digest.update(json.dumps(head).encode())
            digest.update(struct.pack(f"<{len(r.prompt_ids)}q", *r.prompt_ids))
        return digest.hexdigest()

    def sent_ids(self, request_id: str, answers: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The prompt with which a request is sent, given the answers to those before it in its session.

        Raises:
            KeyError: there is no such request, or an answer in its prompt is not among ``answers``.
        """
        by_id = self._by_id
        chain = [by_id[request_id]]
        while chain[-1].takes_answer:
            chain.append(by_id[str(chain[-1].follows)])
        before = chain.pop()
        ids = before.prompt_ids
        while chain:
            request = chain.pop()
            ids = request.answering(before, ids, answers[before.request_id]).prompt_ids
            before = request
        return ids

    @cached_property
    def _by_id(self) -> dict[str, ScheduledRequest]:
        return {r.request_id: r for r in self.requests}

    @property
    def sessions(self) -> int:
        """Number of chains of requests that wait for each other's end; a request that waits for none is one."""
        return sum(r.follows is None for r in self.requests)

    @cached_property
    def phases(self) -> tuple[int, ...]:
        """The phases in order; () without."""
        return tuple(sorted({r.phase for r in self.requests if r.phase is not None}))

    @property
    def waits(self) -> bool:
        """Whether some requests are sent only when others have ended."""
        return self.concurrency is not None or self.sessions < len(self) or len(self.phases) > 1

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out of a file or put right, one sentence each."""
        return tuple(self.spec.get("notes", ()))

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens over all requests, without padding."""
        return sum(len(r.prompt_ids) for r in self.requests)
