"""The frozen workload: what is sent, when, and how many tokens are asked for.

A :class:`Workload` is the only thing that passes from this package to the harness. It is immutable and
carries a content hash, so that two runs can prove that they were given the same requests.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of a workload.

    Attributes:
        request_id: unique within the workload.
        due_s: seconds after the start of the run at which the request is to be sent; 0.0 in a burst. In a closed
            loop it is a lower bound: the request is sent once it is due *and* a place is free.
        prompt_ids: token ids of the prompt, never empty.
        max_new_tokens: cap on generated tokens, at least 1.
        prefix_group: which group of requests shares this request's first ``prefix_tokens`` ids; None if none.
        prefix_tokens: length in tokens of the prefix shared with the group.
    """

    request_id: str
    due_s: float
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    prefix_group: int | None = None
    prefix_tokens: int = 0


@dataclass(frozen=True)
class Workload:
    """An immutable list of requests in order of due time, and what built it.

    Attributes:
        name: short name for tables and file names.
        requests: in order of ``due_s``.
        concurrency: closed-loop cap on requests in flight; None for an open loop.
        spec: the resolved settings that built the workload (arrival, lengths, seeds, trace file hash …).
    """

    name: str
    requests: tuple[ScheduledRequest, ...]
    concurrency: int | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) over every request and the concurrency cap; independent of name and spec."""
        digest = hashlib.sha256(json.dumps({"concurrency": self.concurrency}).encode())
        for r in self.requests:
            head = json.dumps([r.request_id, r.due_s, r.max_new_tokens, r.prefix_group, r.prefix_tokens])
            digest.update(head.encode())
            digest.update(struct.pack(f"<{len(r.prompt_ids)}q", *r.prompt_ids))
        return digest.hexdigest()

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens over all requests, without padding."""
        return sum(len(r.prompt_ids) for r in self.requests)
