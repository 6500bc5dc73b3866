"""Arrival processes: when each request of a workload is due.

A process is a small frozen dataclass, registered by name. A new one is one class here and one yaml file: its config
schema is derived from its fields (``workloads.config``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workloads.names import unknown_name


class Arrival(Protocol):
    """Turns a number of requests into due times."""

    @property
    def concurrency(self) -> int | None:
        """Closed-loop cap on requests in flight; None for an open loop."""

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        """``n`` due times in seconds after the start of the run, non-decreasing.

        ``rng`` is drawn from only by random processes; ``recorded`` are the workload's own times, if it has any.
        """


ARRIVALS: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: make an arrival process available as ``arrival.kind=name``."""

    def add(cls: type) -> type:
        ARRIVALS[name] = cls
        return cls

    return add


def arrival_class(kind: str) -> type:
    """The arrival process registered as ``kind``; ValueError with the nearest name if there is none."""
    if kind not in ARRIVALS:
        raise unknown_name("arrival.kind", kind, ARRIVALS)
    return ARRIVALS[kind]


@dataclass(frozen=True)
class OpenLoop:
    """What all open-loop processes share: no cap on requests in flight."""

    @property
    def concurrency(self) -> int | None:
        return None


@register("burst")
@dataclass(frozen=True)
class Burst(OpenLoop):
    """Every request is due at the start."""

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        return [0.0] * n


@register("constant")
@dataclass(frozen=True)
class Constant(OpenLoop):
    """Request k is due at k / rate: a division each, so that no rounding accumulates."""

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        return [k / self.rate for k in range(n)]


@register("poisson")
@dataclass(frozen=True)
class Poisson(OpenLoop):
    """Independent exponential gaps with mean 1 / rate; the first request comes after one gap too."""

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        now, times = 0.0, []
        for _ in range(n):
            now += rng.expovariate(self.rate)
            times.append(now)
        return times


@register("closed_loop")
@dataclass(frozen=True)
class ClosedLoop:
    """``concurrency`` clients, each sending its next request when its last one ended."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"arrival.concurrency is {self.concurrency}: give at least 1 request in flight")

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        return [0.0] * n


@register("as_recorded")
@dataclass(frozen=True)
class AsRecorded(OpenLoop):
    """The times the workload itself carries: those of a trace, or ``due_s`` of a prompts file."""

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        if recorded is None:
            raise ValueError(
                "arrival=as_recorded needs a workload with times of its own (a trace, or a prompts file in which every "
                "line has due_s): choose such a workload, or arrival=burst, constant, poisson or closed_loop"
            )
        if len(recorded) != n:
            raise ValueError(f"{len(recorded)} recorded times for {n} requests")
        return list(recorded)


def check_rate(rate: float) -> None:
    """ValueError unless ``rate`` (requests/s) is finite and above 0."""
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"arrival.rate is {rate}: give requests per second above 0")
