"""Python's garbage collector while a loop runs.

A full collection walks every object of the process: with torch and transformers loaded that is some 100 ms, in the
middle of a step. So what is there when a loop begins is set aside (``gc.freeze``, as vLLM does), and collections come
once in `ALLOCATIONS` new objects instead of once in 700: a step that streams to 256 consumers makes as many. What is
set aside, rubbish in cycles among it, is looked at again when the last loop has ended: a model that is dropped between
two sessions can be collected.
"""

from __future__ import annotations

import gc
import threading

ALLOCATIONS = 50_000
"""Objects made and not freed between two collections of the young ones."""

_lock = threading.Lock()
_loops = 0
_before: tuple[int, int, int] | None = None


def set_aside() -> None:
    """A loop begins. Each call is followed by one of `give_back`."""
    global _loops, _before
    with _lock:
        _loops += 1
        gc.freeze()
        if _loops == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < ALLOCATIONS:  # 0: whoever runs this has turned collections off
                gc.set_threshold(ALLOCATIONS, *_before[1:])


def give_back() -> None:
    """A loop has ended; with the last one everything is as it was."""
    global _loops, _before
    with _lock:
        _loops -= 1
        if _loops == 0 and _before is not None:
            gc.unfreeze()
            if gc.get_threshold()[0] == ALLOCATIONS:  # nobody else has changed it
                gc.set_threshold(*_before)
            _before = None
