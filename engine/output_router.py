"""From the loop to whoever waits: one queue for all, iterators for one request, callbacks for asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from engine.requests import GenerationOutput

logger = logging.getLogger(__name__)


Entry = list[GenerationOutput | None]
"""An output in a queue, alone in its list; None once taken."""


_FEW = 64
"""Taken entries that may stay in the common queue whatever its length."""


class OutputRouter:
    """Keeps outputs until they are taken, each exactly once, in order of arrival.

    An output stands in the common queue and in its request's own queue; taking it from one marks it taken in the other.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[Entry] = deque()
        self._taken = 0  # entries of the common queue that were taken past its head
        self._by_request: dict[str, deque[Entry]] = {}
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]] = {}

    def deliver(self, outputs: list[GenerationOutput]) -> None:
        """Hand over a step's outputs; wakes the waiting threads once, and each event loop once."""
        calls: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[GenerationOutput], None], GenerationOutput]]] = {}
        with self._condition:
            handlers, queue, by_request = self._handlers, self._queue, self._by_request
            for output in outputs:
                request_id = output.request_id
                if request_id in handlers:
                    callback, loop = handlers[request_id]
                    calls.setdefault(loop, []).append((callback, output))
                    if output.is_finished():
                        del handlers[request_id]
                    continue
                entry: Entry = [output]
                queue.append(entry)
                own = by_request.get(request_id)
                if own is None:
                    by_request[request_id] = deque((entry,))
                else:
                    own.append(entry)
            self._condition.notify_all()
        for loop, batch in calls.items():
            try:
                loop.call_soon_threadsafe(_run_all, batch)
            except RuntimeError:  # the consumer closed its event loop: nobody is there to receive
                logger.warning("%d outputs found their event loop closed and are dropped", len(batch))

    def take(self, timeout: float | None, give_up: Callable[[], bool]) -> GenerationOutput | None:
        """The next output of any request; None after ``timeout`` seconds or when ``give_up()`` says none will come."""
        return self._wait(self._pop, timeout, give_up)

    def take_head(self, request_id: str, timeout: float | None, give_up: Callable[[], bool]) -> GenerationOutput | None:
        """The next output if it is this request's; None, and nothing is taken, if another's comes first."""

        def head() -> tuple[bool, GenerationOutput | None]:
            self._drop_taken()
            if not self._queue:
                return False, None
            output = self._queue[0][0]
            assert output is not None
            return (True, None) if output.request_id != request_id else self._pop()

        return self._wait(head, timeout, give_up)

    def take_of(self, request_id: str, timeout: float | None, give_up: Callable[[], bool]) -> GenerationOutput | None:
        """The next output of this request, past those of others."""

        def pop() -> tuple[bool, GenerationOutput | None]:
            own = self._by_request.get(request_id)
            while own:
                entry = own.popleft()
                if not own:
                    del self._by_request[request_id]
                if entry[0] is not None:
                    output, entry[0] = entry[0], None
                    self._taken += 1
                    self._drop_taken()
                    return True, output
            return False, None

        return self._wait(pop, timeout, give_up)

    def handle(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Send this request's outputs to ``callback`` on the running event loop, those that already wait first."""
        loop = asyncio.get_running_loop()
        with self._condition:
            waiting = [e for e in self._by_request.pop(request_id, ()) if e[0] is not None]
            batch = []
            over = False
            for entry in waiting:
                output, entry[0] = entry[0], None
                self._taken += 1
                assert output is not None
                batch.append((callback, output))
                over = over or output.is_finished()
            self._drop_taken()
            if not over:
                self._handlers[request_id] = (callback, loop)
        if batch:
            loop.call_soon(_run_all, batch)

    def clear(self) -> int:
        """Drop what waits to be taken; returns how many outputs that were."""
        with self._condition:
            dropped = sum(entry[0] is not None for entry in self._queue)
            self._queue.clear()
            self._taken = 0
            self._by_request.clear()
        return dropped

    def wake(self) -> None:
        """Let waiting threads look again whether to give up."""
        with self._condition:
            self._condition.notify_all()

    @property
    def is_empty(self) -> bool:
        with self._condition:
            self._drop_taken()
            return not self._queue

    def _pop(self) -> tuple[bool, GenerationOutput | None]:
        self._drop_taken()
        if not self._queue:
            return False, None
        entry = self._queue.popleft()
        output, entry[0] = entry[0], None
        assert output is not None
        own = self._by_request.get(output.request_id)
        while own and own[0][0] is None:
            own.popleft()
        if own is not None and not own:
            del self._by_request[output.request_id]
        return True, output

    def _drop_taken(self) -> None:
        while self._queue and self._queue[0][0] is None:
            self._queue.popleft()
            self._taken -= 1
        if self._taken > max(len(self._queue) // 2, _FEW):  # behind an output that nobody takes they would pile up
            self._queue = deque(entry for entry in self._queue if entry[0] is not None)
            self._taken = 0

    def _wait(
        self,
        attempt: Callable[[], tuple[bool, GenerationOutput | None]],
        timeout: float | None,
        give_up: Callable[[], bool],
    ) -> GenerationOutput | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while True:
                done, output = attempt()
                if done or give_up():
                    return output
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return None
                self._condition.wait(remaining)


def _run_all(batch: list[tuple[Callable[[GenerationOutput], None], GenerationOutput]]) -> None:
    """Call each handler; one that raises is reported to the event loop and takes nothing from the others."""
    for callback, output in batch:
        try:
            callback(output)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"result handler of request {output.request_id!r} failed", "exception": error}
            )
