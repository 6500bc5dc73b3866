"""Workloads: which requests are sent, when, and how many tokens each asks for.

:func:`build_workload` turns a workload config and an arrival config into one frozen, hashed :class:`Workload`.
"""

from workloads.build import build_warmup, build_workload
from workloads.workload import ScheduledRequest, Workload

__all__ = ["ScheduledRequest", "Workload", "build_warmup", "build_workload"]
