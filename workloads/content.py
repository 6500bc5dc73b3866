"""What a workload kind produces before arrivals are applied."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.prompts import Prompt


@dataclass(frozen=True)
class Turn:
    """Where a request stands in its session.

    Attributes:
        session: which one; arrivals are those of sessions.
        after: index of the request whose end it waits for; None = it is sent when it is due.
        offset_s: seconds after its session's arrival at which it is due.
        think_s, takes_answer, phase: as in ``ScheduledRequest``.
    """

    session: int
    after: int | None = None
    offset_s: float = 0.0
    think_s: float = 0.0
    takes_answer: bool = False
    phase: int | None = None


@dataclass(frozen=True)
class Content:
    """Requests without due times.

    Attributes:
        prompts, max_new_tokens: one entry a request.
        recorded_s: the workload's own times, non-decreasing; None if it has none.
        arrival_rng: the generator a random arrival process draws from.
        turns: one entry a request where they are turns of sessions; None where each request arrives by itself.
        facts: what reading or building found, for ``Workload.spec``.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: Sequence[int]
    arrival_rng: random.Random
    recorded_s: Sequence[float] | None = None
    turns: Sequence[Turn] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
