"""Whose fault a failed step is.

A step that raises is tried again in parts. A request whose own part fails while another's does not is to blame, and it
alone is ended. If no part fails, or all do, or finding out takes too long, the fault is nobody's in particular: then it
is the whole loop's, and every live request has to end with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from engine.requests import Request

PATIENCE_S = 0.5
"""Seconds for finding out; clients of a loop that has failed must hear of it within one."""

Culprit = tuple[Request, Exception]


def cause_of(error: BaseException) -> str:
    """An exception as requests that end with it name it."""
    return f"{type(error).__name__}: {error}"


def find_culprits(
    requests: Sequence[Request],
    error: Exception,
    attempt: Callable[[Sequence[Request]], bool],
    clock: Callable[[], float],
) -> list[Culprit]:
    """The requests whose part of a failed step fails by itself, and with what.

    Args:
        requests: those of the step, at least two.
        error: what it raised.
        attempt: launches the step of some of them; says whether there was anything to launch, and raises if that
            fails, leaving them as they were. It is not called again for those for which it has succeeded.
        clock: seconds.

    Raises:
        ``error``: the fault cannot be told to be anybody's, or not within `PATIENCE_S`.
    """
    deadline = clock() + PATIENCE_S
    parts = deque(_halves(requests))
    culprits: list[Culprit] = []
    succeeded = False
    while parts:  # breadth first, so that a part that succeeds is met early
        if clock() > deadline:
            raise error
        part = parts.popleft()
        try:
            succeeded = attempt(part) or succeeded
        except Exception as again:
            if len(part) == 1:
                culprits.append((part[0], again))
            else:
                parts.extend(_halves(part))
    if not (succeeded and culprits):
        raise error
    return culprits


def _halves(requests: Sequence[Request]) -> tuple[Sequence[Request], Sequence[Request]]:
    middle = len(requests) // 2
    return requests[:middle], requests[middle:]
