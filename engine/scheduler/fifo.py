"""First in, first out: those who decode go on, then prefills in order of arrival fill what is left."""

from __future__ import annotations

from engine.scheduler.base import Scheduler
from engine.scheduler.policy import Phase


class FifoScheduler(Scheduler):
    """Protects inter-token latency: a step always carries every decoding request that has room."""

    phases = (Phase.DECODE, Phase.PREFILL, Phase.ADMIT)
    default_safety_margin = 0.15
