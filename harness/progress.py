"""Shows what the measured process is doing and how far the command is.

In a terminal that is one live line; elsewhere a plain line as the first run begins and then every ten seconds, so that
a log or a pipe is never silent for long. The line that ends a run stays in both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.status import Status

from harness.course import Course

EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""


def waiting_for(what: str) -> AbstractContextManager[object]:
    """Say in a terminal what the command is doing before its first run, as long as it does it."""
    console = Console(stderr=True)
    return console.status(f"{what} …") if console.is_terminal else nullcontext()


class JobDisplay:
    """Context manager around one run; feed it the child's messages.

    Args:
        title: what is running, for example ``#2 engine=static``.
        course: where the command stands, asked each time it is shown; this run is not among the ended ones.
        console: where to show it; None = stderr, so that stdout holds only results.
        every_s: seconds between two lines where there is no terminal.
    """

    def __init__(
        self, title: str, course: Callable[[], Course], console: Console | None = None, every_s: float = EVERY_S
    ) -> None:
        self._title = title
        self._course = course
        self._console = console or Console(stderr=True)
        self._every_s = every_s
        self._status: Status | None = None
        self._over = threading.Event()
        self._talker = threading.Thread(target=self._talk, name="progress", daemon=True)
        self._began = time.monotonic()
        self._measuring_since: float | None = None
        self._phase = "starting"
        self._counts = ""
        self._stands = ""  # where the command stood when this run ended, while its process goes on

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._status = self._console.status(self._live())
            self._status.start()
        elif self._course().ended == 0:  # nothing has been said yet
            self._print(self._line())
        self._talker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hush()

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
                f"{message['tokens'] / elapsed_s:,.0f} tok/s"
            )
        if self._status is not None:
            self._status.update(self._live())

    def begin(self, title: str) -> None:
        """The process goes on to another run."""
        self._title, self._measuring_since, self._counts, self._stands = title, None, "", ""
        self._began = time.monotonic()

    def note(self, outcome: str, goes_on: bool = True, well: bool = True, last: bool = True) -> None:
        """Print the line that stays about a run.

        Args:
            goes_on: whether the runs after this one will follow.
            well: whether it ended well.
            last: whether it was the last of those that one process makes of a job, which count as one.
        """
        course = self._course()
        elapsed_s = time.monotonic() - self._began
        self._stands = (course.after_this(well) if last else course.during_this(elapsed_s)) if goes_on else ""
        self._print(f"{self._title}: {outcome}" + (f" · {self._stands}" if self._stands else ""))

    def finish(self, outcome: str, goes_on: bool = True, well: bool = True) -> None:
        """:meth:`note` of the last run of the process."""
        self._hush()
        self.note(outcome, goes_on, well)

    def _talk(self) -> None:
        """Speak up from time to time, also while the child has nothing to say: loading a model may take minutes."""
        while not self._over.wait(self._every_s):
            if self._status is not None:
                self._status.update(self._live())
                continue
            line = self._line()
            if not self._over.is_set():
                self._print(line)

    def _hush(self) -> None:
        self._over.set()
        if self._status is not None:
            self._status.stop()
        if self._talker.is_alive():
            self._talker.join()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _live(self) -> str:
        return self._line().replace("[", r"\[")

    def _line(self) -> str:
        elapsed_s = time.monotonic() - self._began
        what = self._phase
        if self._phase == "measuring" and self._counts:
            what = f"measuring, {self._counts}"
        where = self._stands or self._course().during_this(elapsed_s)
        return f"{self._title}: {what}, {elapsed_s:.0f} s" + (f" · {where}" if where else "")
