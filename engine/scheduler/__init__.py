"""Scheduling policies by name."""

from engine.scheduler.base import Scheduler
from engine.scheduler.fifo import FifoScheduler
from engine.scheduler.plan import IN_FLIGHT, Collected, ScheduledRow, StepPlan, StepRows
from engine.scheduler.policy import SchedulerLimits
from engine.scheduler.prefill_first import PrefillFirstScheduler
from engine.scheduler.slots import RunningSlots

SCHEDULERS: dict[str, type[Scheduler]] = {"fifo": FifoScheduler, "prefill_first": PrefillFirstScheduler}

__all__ = [
    "IN_FLIGHT",
    "SCHEDULERS",
    "Collected",
    "RunningSlots",
    "ScheduledRow",
    "Scheduler",
    "SchedulerLimits",
    "StepPlan",
    "StepRows",
]
