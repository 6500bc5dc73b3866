"""Shows what the measured process is doing: one live line in a terminal, one plain line a job elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.status import Status


class JobDisplay:
    """Context manager around one run; feed it the child's messages.

    Args:
        title: what is running, for example ``#2 engine=static``.
        console: where to show it; None = stderr, so that stdout holds only results.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._status: Status | None = None
        self._measuring_since: float | None = None
        self._phase = "starting"
        self._counts = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status(self._line())
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, message: Mapping[str, Any]) -> None:
        """Take a message of the child (see :mod:`harness.isolate`)."""
        if phase := message.get("phase"):
            if phase == "measuring" and self._measuring_since is None:
                self._measuring_since = time.monotonic()
            self._phase = str(phase)
        if "ended" in message:
            since = self._measuring_since or time.monotonic()
            elapsed_s = max(time.monotonic() - since, 1e-3)
            self._counts = (
                f"{message['ended']}/{message['total']} requests, {message['sent'] - message['ended']} in flight, "
                f"{message['tokens'] / elapsed_s:,.0f} tok/s, {elapsed_s:.0f} s"
            )
        if self._status is not None:
            self._status.update(self._line())

    def finish(self, outcome: str) -> None:
        """Print the one line that stays."""
        if self._status is not None:
            self._status.stop()
        self._console.print(f"{self._title}: {outcome}", markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        what = self._counts if self._phase == "measuring" and self._counts else self._phase
        return f"{self._title}: {what}".replace("[", r"\[")
