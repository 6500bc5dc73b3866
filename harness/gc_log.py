"""Records when the interpreter collects garbage: meanwhile nothing else runs in the process, nor does the engine."""

from __future__ import annotations

import gc
from typing import Any

from harness.clock import NS_PER_S, Clock


class GcLog:
    """Garbage collections of this process between :meth:`start` and :meth:`stop`, as seen by ``gc.callbacks``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ns: int | None = None
        self._pauses: list[tuple[int, int, int]] = []

    def start(self) -> None:
        gc.callbacks.append(self._called)

    def stop(self) -> None:
        """Record nothing more; safe to call again."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def pauses(self) -> list[dict[str, Any]]:
        """One mapping a collection: ``t_ns`` of its start, ``duration_ms``, ``generation``."""
        return [
            {"t_ns": began, "duration_ms": (ended - began) / NS_PER_S * 1000, "generation": generation}
            for began, ended, generation in self._pauses
        ]

    def _called(self, phase: str, info: dict[str, int]) -> None:
        # Collections do not nest, and this runs in the thread that caused one: no lock is needed.
        now = self._clock.now_ns()
        if phase == "start":
            self._began_ns = now
        elif self._began_ns is not None:
            self._pauses.append((self._began_ns, now, info["generation"]))
            self._began_ns = None
