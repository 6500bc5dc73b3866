"""Time as an argument: one protocol, the real clock and a fake one for tests."""

from __future__ import annotations

import threading
import time
from typing import Protocol

NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """A monotonic clock in nanoseconds that can wait for an absolute moment."""

    def now_ns(self) -> int:
        """Nanoseconds on the scale of ``time.perf_counter_ns``."""

    def sleep_until(self, deadline_ns: int, cancelled: threading.Event) -> bool:
        """Wait until ``deadline_ns`` or until ``cancelled`` is set; True if the deadline was reached.

        The deadline is absolute, so a late wake-up delays one event and never the ones after it.
        """


class RealClock:
    """``time.perf_counter_ns``; waiting costs no CPU, so that the measured engine keeps every core."""

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def sleep_until(self, deadline_ns: int, cancelled: threading.Event) -> bool:
        while (left_ns := deadline_ns - time.perf_counter_ns()) > 0:
            if cancelled.wait(left_ns / NS_PER_S):
                return False
        return not cancelled.is_set()


class FakeClock:
    """A clock that moves only when somebody sleeps; every sleep wakes ``overshoot_ns`` too late.

    Args:
        start_ns: first reading.
        overshoot_ns: how much later than asked each sleep ends (a model of timer slack).
    """

    def __init__(self, start_ns: int = 0, overshoot_ns: int = 0) -> None:
        self._now_ns = start_ns
        self._overshoot_ns = overshoot_ns
        self.sleeps = 0

    def now_ns(self) -> int:
        return self._now_ns

    def sleep_until(self, deadline_ns: int, cancelled: threading.Event) -> bool:
        if cancelled.is_set():
            return False
        if deadline_ns > self._now_ns:
            self.sleeps += 1
            self._now_ns = deadline_ns + self._overshoot_ns
        return True
