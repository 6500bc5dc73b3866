"""Says what a long computation is doing: a live line in a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status

EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""

Say = Callable[[str], None]
"""Takes what is being done now, in a few words."""


def say_nothing(text: str) -> None:
    """For callers that want no progress."""


Tell = Callable[[str, int, int], None]
"""Takes what is simulated now, its requests, and how many are to be expected after it."""


def tell_nothing(text: str, requests: int, after: int) -> None:
    """For callers that want no progress of simulations."""


class TimeToGo:
    """Adds the time to go to what is said of simulations, by how fast requests were simulated so far.

    Args:
        say: told the words.
        now: a clock, s.

    Attributes:
        later: requests to be expected after the search that is under way.
    """

    def __init__(self, say: Say, now: Callable[[], float] = time.monotonic) -> None:
        self._say, self._now = say, now
        self._done, self._simulating, self._began_s = 0, 0, now()
        self.later = 0

    def within(self, what: str) -> Tell:
        """For the runs of one search, whose name goes before the words."""
        return lambda text, requests, after: self.begins(f"{what}: {text}", requests, after)

    def begins(self, text: str, requests: int, after: int = 0) -> None:
        """A simulation of so many requests begins, and the one before is over."""
        if self._simulating:
            self._done += self._simulating
            each_s = (self._now() - self._began_s) / self._done
            text += f", {_rounded((requests + after + self.later) * each_s)} to go"
        else:
            self._began_s = self._now()  # what came before was no simulation
        self._simulating = requests
        self._say(text)


def _rounded(seconds: float) -> str:
    """A time that is not known to the second."""
    if seconds < 10:
        return "some seconds"
    return f"about {round(seconds, -1):.0f} s" if seconds < 120 else f"about {seconds / 60:.0f} minutes"


class Progress:
    """Context manager around a computation; call it with what is being done.

    Args:
        title: whose computation it is, for example ``cb-plan``.
        console: where to show it; None = stderr, so that stdout holds only results.
        every_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, title: str, console: Console | None = None, every_s: float = EVERY_S) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._every_s = every_s
        self._text = "starting"
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self._talker = threading.Thread(target=self._talk, name="progress", daemon=True)
        self._status: Status | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status(escape(self._line()))
            self._status.start()
        self._talker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._talker.join()
        if self._status is not None:
            self._status.stop()

    def __call__(self, text: str) -> None:
        self._text = text
        if self._status is not None:
            self._status.update(escape(self._line()))

    def _talk(self) -> None:
        """From its own thread: a single simulation may take longer than a line may be away."""
        every_s = self._every_s if self._status is None else 1.0
        while not self._over.wait(every_s):
            if self._status is not None:
                self._status.update(escape(self._line()))
            else:
                self._console.print(self._line(), markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        return f"{self._title}: {self._text}, {time.monotonic() - self._began_s:.0f} s"
