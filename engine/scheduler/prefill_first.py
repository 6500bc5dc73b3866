"""Prefill first: prompts take the token budget, decoding requests get what is left."""

from __future__ import annotations

from engine.scheduler.base import Scheduler
from engine.scheduler.policy import Phase


class PrefillFirstScheduler(Scheduler):
    """Protects time to first token, at the price of gaps in running streams while long prompts are computed."""

    phases = (Phase.PREFILL, Phase.ADMIT, Phase.DECODE)
    default_safety_margin = 0.0
