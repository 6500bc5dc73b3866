"""Client threads that hold the loop still between two steps."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable


class PauseGate:
    """Any number of threads may hold a pause at once; the loop goes on when the last one leaves.

    Args:
        changed: the condition that the loop and its clients share.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._holders: Counter[int] = Counter()
        self._weights_changed = False
        self.parked = False

    @property
    def called(self) -> bool:
        """Whether the loop has to come to `park` before its next step."""
        return bool(self._holders) or self._weights_changed

    @property
    def held_here(self) -> bool:
        """Whether the calling thread holds a pause."""
        return threading.get_ident() in self._holders

    def enter(self, is_gone: Callable[[], bool]) -> bool:
        """Hold the loop; returns once it stands still, False and without holding it if it is gone."""
        with self._changed:
            self._holders[threading.get_ident()] += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self.parked or is_gone())
            except BaseException:
                self._let_go()
                raise
            if not self.parked:
                self._let_go()
                return False
            return True

    def leave(self, weights_changed: bool) -> None:
        """Let go of the loop."""
        with self._changed:
            self._weights_changed = self._weights_changed or weights_changed
            self._let_go()

    def park(self, give_up: Callable[[], bool]) -> bool:
        """The loop's side: stand still while a thread holds it; True if weights were changed since the last time."""
        with self._changed:
            self.parked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._holders or give_up())
            self.parked = False
            weights_changed, self._weights_changed = self._weights_changed, False
            return weights_changed

    def _let_go(self) -> None:
        me = threading.get_ident()
        self._holders[me] -= 1
        if not self._holders[me]:
            del self._holders[me]
        self._changed.notify_all()
