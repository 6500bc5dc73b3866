"""What a scheduling policy is made of: an order of phases, and budgets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets of one step.

    Attributes:
        max_batch_tokens: query tokens of one forward pass.
        max_requests: requests running at once (each needs a slot and a row of logits).
        safety_margin: no prefill goes on while less than this share of the blocks is available and something decodes.
    """

    max_batch_tokens: int
    max_requests: int
    safety_margin: float


class Phase(Enum):
    """The three kinds of work a step is filled with; a policy is an order of them."""

    DECODE = auto()
    PREFILL = auto()
    ADMIT = auto()
