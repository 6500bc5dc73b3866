"""An event loop in a thread of its own, in which a backend serves its requests as tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs from its construction until :meth:`stop`.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the loop to its end; its result, or what it raised."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def begin(self, request_id: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the task of a request; never waits."""
        self._loop.call_soon_threadsafe(self._begin, request_id, serve)

    def stop(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel every task, run ``close`` once they have ended, and end the loop. Safe to call again."""
        if self._thread is None:
            return
        self.wait(self._end(close))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._thread = None
        self._loop.close()

    def _begin(self, request_id: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(serve())
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    async def _end(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.sleep(0)  # a task cancelled before its first step would report nothing
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close()
