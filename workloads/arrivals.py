"""Arrival processes: when each request of a workload is due.

A process is a small frozen dataclass, registered by name. A new one is one class here and one yaml file: its config
schema is derived from its fields (``workloads.config``).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workloads.names import unknown_name


class Arrival(Protocol):
    """Turns a number of requests (of sessions, in a workload of sessions) into due times."""

    @property
    def concurrency(self) -> int | None:
        """Closed-loop cap on requests in flight; None for an open loop."""

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        """``n`` due times in seconds after the start of the run, non-decreasing.

        ``rng`` is drawn from only by random processes; ``recorded`` are the workload's own times, if it has any.
        """

    def think_times(self, n: int, rng: random.Random) -> list[float]:
        """``n`` waits in seconds before each request's sender sends it; only a closed loop has other ones than 0."""


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

    def think_times(self, n: int, rng: random.Random) -> list[float]:
        return [0.0] * n


@register("burst")
@dataclass(frozen=True)
class Burst(OpenLoop):
    """Every request is due at the start."""

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        return [0.0] * n


@register("constant")
@dataclass(frozen=True)
class Constant(OpenLoop):
    """Request k is due at k / rate: a division each, so that no rounding accumulates.

    Attributes:
        rate: requests a second.
    """

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        return [k / self.rate for k in range(n)]


@register("poisson")
@dataclass(frozen=True)
class Poisson(OpenLoop):
    """Independent exponential gaps with mean 1 / rate; the first request comes after one gap too.

    Attributes:
        rate: requests a second, on average.
    """

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        now, times = 0.0, []
        for _ in range(n):
            now += rng.expovariate(self.rate)
            times.append(now)
        return times


@register("gamma")
@dataclass(frozen=True)
class Gamma(OpenLoop):
    """Independent gamma gaps with mean 1 / rate and coefficient of variation ``cv``; the first comes after one gap too.

    cv above 1 is burstier than Poisson (which is cv 1), below 1 more regular. In terms of the burstiness b of vLLM's
    benchmark, which is the gamma distribution's shape, cv = 1 / sqrt(b).

    Attributes:
        rate: requests a second, on average.
        cv: coefficient of variation of the gaps; 1 = Poisson, more = burstier.
    """

    rate: float
    cv: float = 2.0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        check_cv("arrival.cv", self.cv)

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        return list(itertools.accumulate(gamma_times(n, 1 / self.rate, self.cv, rng)))


@dataclass(frozen=True)
class RateProfile(OpenLoop):
    """Poisson arrivals whose rate changes over time (an inhomogeneous Poisson process), by a change of clock.

    On a clock that advances by one an expected request, such arrivals are a Poisson process of rate 1: gaps are drawn
    there and taken back to seconds (Cinlar 1975, "Introduction to Stochastic Processes", section 4.7).
    """

    def expected(self, t: float) -> float:
        """Mean number of requests due in the first ``t`` seconds: non-decreasing, 0 at 0, without bound."""
        raise NotImplementedError

    def seconds_at(self, expected: float) -> float:
        """The first moment at which :meth:`expected` is ``expected``."""
        raise NotImplementedError

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        gaps = (rng.expovariate(1.0) for _ in range(n))
        return [self.seconds_at(requests) for requests in itertools.accumulate(gaps)]


@register("ramp")
@dataclass(frozen=True)
class Ramp(RateProfile):
    """The rate goes in a straight line from ``start_rate`` to ``end_rate`` in ``ramp_s`` seconds and stays there.

    Attributes:
        start_rate: requests a second at the start; 0 is allowed.
        end_rate: requests a second from the end of the ramp on.
        ramp_s: seconds from the one to the other.
    """

    start_rate: float
    end_rate: float
    ramp_s: float

    def __post_init__(self) -> None:
        check_rate(self.start_rate, "arrival.start_rate", zero=True)
        check_rate(self.end_rate, "arrival.end_rate")
        check_seconds(self.ramp_s, "arrival.ramp_s")

    def expected(self, t: float) -> float:
        ramped = min(t, self.ramp_s)
        slope = (self.end_rate - self.start_rate) / self.ramp_s
        return self.start_rate * ramped + slope * ramped * ramped / 2 + self.end_rate * (t - ramped)

    def seconds_at(self, expected: float) -> float:
        if (beyond := expected - self.expected(self.ramp_s)) >= 0:
            return self.ramp_s + beyond / self.end_rate
        slope = (self.end_rate - self.start_rate) / self.ramp_s
        # The root of start_rate t + slope t^2 / 2 = expected in the form that loses no digits where slope is small.
        root = math.sqrt(max(0.0, self.start_rate**2 + 2 * slope * expected))
        return min(self.ramp_s, 2 * expected / (self.start_rate + root)) if expected > 0 else 0.0


@register("on_off")
@dataclass(frozen=True)
class OnOff(RateProfile):
    """``on_s`` seconds at ``on_rate``, then ``off_s`` seconds at ``off_rate`` (0 = silence), and again.

    Attributes:
        on_rate: requests a second during a burst.
        on_s: seconds that a burst lasts.
        off_s: seconds between two bursts.
        off_rate: requests a second between bursts; 0 = silence.
    """

    on_rate: float
    on_s: float
    off_s: float
    off_rate: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.on_rate, "arrival.on_rate")
        check_rate(self.off_rate, "arrival.off_rate", zero=True)
        check_seconds(self.on_s, "arrival.on_s")
        check_seconds(self.off_s, "arrival.off_s")

    def expected(self, t: float) -> float:
        periods, rest = divmod(t, self.on_s + self.off_s)
        on, off = self._of_a_period()
        return periods * (on + off) + min(rest, self.on_s) * self.on_rate + max(0.0, rest - self.on_s) * self.off_rate

    def seconds_at(self, expected: float) -> float:
        on, off = self._of_a_period()
        periods, rest = divmod(expected, on + off)
        if rest == 0 and periods > 0 and off == 0:  # the pause before it adds nothing: the burst before had it already
            periods, rest = periods - 1, on
        start = periods * (self.on_s + self.off_s)
        if rest <= on or off == 0:
            return start + rest / self.on_rate
        return start + self.on_s + (rest - on) / self.off_rate

    def _of_a_period(self) -> tuple[float, float]:
        """Requests expected in its two parts."""
        return self.on_s * self.on_rate, self.off_s * self.off_rate


@register("diurnal")
@dataclass(frozen=True)
class Diurnal(RateProfile):
    """``rate`` on average, following a cosine: rate (1 + amplitude cos(2 pi (t - peak_s) / period_s)).

    Attributes:
        rate: requests a second, averaged over a period.
        amplitude: 0 is constant; 1 falls to silence half a period after the peak.
        period_s: a day by default; a minute or two show the same shape in a short run.
        peak_s: when the rate is highest.
    """

    rate: float
    amplitude: float = 0.5
    period_s: float = 86400.0
    peak_s: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        check_seconds(self.period_s, "arrival.period_s")
        if not 0 <= self.amplitude <= 1:
            raise ValueError(f"arrival.amplitude is {self.amplitude}: give 0 (constant) to 1 (silent at the lowest)")
        if not math.isfinite(self.peak_s):
            raise ValueError(f"arrival.peak_s is {self.peak_s}: give seconds")

    def expected(self, t: float) -> float:
        turn = 2 * math.pi / self.period_s
        swing = (math.sin(turn * (t - self.peak_s)) + math.sin(turn * self.peak_s)) / turn
        return self.rate * (t + self.amplitude * swing)

    def seconds_at(self, expected: float) -> float:
        # No closed form. The swing is at most two amplitudes of period / 2 pi, which brackets the moment.
        reach = self.amplitude * self.period_s / math.pi
        low, high = max(0.0, expected / self.rate - reach), expected / self.rate + reach
        while low < (middle := (low + high) / 2) < high:  # until there is no number between them
            if self.expected(middle) < expected:
                low = middle
            else:
                high = middle
        return high


@register("closed_loop")
@dataclass(frozen=True)
class ClosedLoop:
    """``concurrency`` clients, each sending its next request when its last one has ended and it has thought.

    Attributes:
        concurrency: requests (in a workload of sessions: conversations) in flight.
        think_s: seconds on average between the end of a client's request and its next one.
        think_cv: coefficient of variation of those times, gamma distributed: 0 = always ``think_s``, 1 = exponential.
    """

    concurrency: int
    think_s: float = 0.0
    think_cv: float = 1.0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"arrival.concurrency is {self.concurrency}: give at least 1 request in flight")
        check_seconds(self.think_s, "arrival.think_s", zero=True)
        check_cv("arrival.think_cv", self.think_cv, zero=True)

    def due_times(self, n: int, rng: random.Random, recorded: Sequence[float] | None) -> list[float]:
        return [0.0] * n

    def think_times(self, n: int, rng: random.Random) -> list[float]:
        return gamma_times(n, self.think_s, self.think_cv, rng)


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


def gamma_times(n: int, mean: float, cv: float, rng: random.Random) -> list[float]:
    """``n`` independent gamma times with that mean and coefficient of variation; cv 0 = all equal, without drawing."""
    if mean == 0 or cv == 0:
        return [mean] * n
    shape = 1 / cv**2
    return [rng.gammavariate(shape, mean / shape) for _ in range(n)]


def check_rate(rate: float, name: str = "arrival.rate", zero: bool = False) -> None:
    """ValueError unless ``rate`` (requests/s) is finite and above 0, or is 0 where that is allowed."""
    if not (math.isfinite(rate) and (rate > 0 or (zero and rate == 0))):
        raise ValueError(f"{name} is {rate}: give requests per second {'from 0' if zero else 'above 0'}")


def check_seconds(seconds: float, name: str, zero: bool = False) -> None:
    """ValueError unless ``seconds`` is finite and above 0, or is 0 where that is allowed."""
    if not (math.isfinite(seconds) and (seconds > 0 or (zero and seconds == 0))):
        raise ValueError(f"{name} is {seconds}: give seconds {'from 0' if zero else 'above 0'}")


def check_cv(name: str, cv: float, zero: bool = False) -> None:
    """ValueError for a coefficient of variation that no gamma distribution of doubles has."""
    if not (0.01 <= cv <= 100 or (zero and cv == 0)):
        raise ValueError(
            f"{name} is {cv}: give 0.01 to 100{' or 0 for equal times' if zero else ', or arrival=constant'}"
        )
