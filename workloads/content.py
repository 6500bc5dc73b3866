"""What a workload kind produces before arrivals are applied."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.prompts import Prompt


@dataclass(frozen=True)
class Content:
    """Requests without due times.

    Attributes:
        prompts, max_new_tokens: one entry a request.
        recorded_s: the workload's own times, non-decreasing; None if it has none.
        arrival_rng: the generator a random arrival process draws from.
        facts: what reading or building found, for ``Workload.spec``.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: Sequence[int]
    arrival_rng: random.Random
    recorded_s: Sequence[float] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
