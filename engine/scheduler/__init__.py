"""Scheduling policies by name."""

from engine.scheduler.base import ScheduledRow, Scheduler, SchedulerLimits, StepPlan
from engine.scheduler.fifo import FifoScheduler
from engine.scheduler.prefill_first import PrefillFirstScheduler

SCHEDULERS: dict[str, type[Scheduler]] = {"fifo": FifoScheduler, "prefill_first": PrefillFirstScheduler}

__all__ = ["SCHEDULERS", "ScheduledRow", "Scheduler", "SchedulerLimits", "StepPlan"]
