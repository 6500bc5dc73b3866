"""From the loop to whoever waits: one queue for all, iterators for one request, callbacks for asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from engine.requests import GenerationOutput
from engine.step_outputs import Outputs

logger = logging.getLogger(__name__)

Entry = list[GenerationOutput | None]
"""An output in a queue, alone in its list; None once taken."""

Call = tuple[Callable[[GenerationOutput], None], GenerationOutput]
"""A handler and what it is to be called with."""


class _Inbox:
    """An event loop's outputs.

    Attributes:
        loop: the event loop.
        handlers: requests whose handlers are to be called on it.
        calls: what is to be called, in order.
    """

    __slots__ = ("calls", "handlers", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.handlers = loop, 0
        self.calls: list[Call] = []


_FEW = 64
"""Taken entries that may stay in the common queue whatever its length."""


class OutputRouter:
    """Keeps outputs until they are taken, each exactly once, in order of arrival.

    Outputs arrive a step at a time and are sorted out by whoever takes from them, so that the loop's thread has little
    to do with each. Then an output stands in the common queue and in its request's own queue; taking it from one marks
    it taken in the other.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._arrived: deque[Outputs] = deque()  # before they are sorted into the following
        self._queue: deque[Entry] = deque()
        self._taken = 0  # entries of the common queue that were taken past its head
        self._by_request: dict[str, deque[Entry]] = {}
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], None], _Inbox]] = {}
        self._inboxes: dict[asyncio.AbstractEventLoop, _Inbox] = {}  # of the loops that have handlers

    def deliver(self, outputs: Outputs) -> None:
        """Hand over a step's outputs; wakes the waiting threads once, and each event loop that has handlers once."""
        with self._condition:
            self._arrived.append(outputs)
            inboxes = list(self._inboxes.values())
            self._condition.notify_all()
        for inbox in inboxes:
            try:
                inbox.loop.call_soon_threadsafe(self._serve, inbox)
            except RuntimeError:  # the consumer closed its event loop: nobody is there to receive
                dropped = len(self._take_calls(inbox))
                if dropped:
                    logger.warning("%d outputs found their event loop closed and are dropped", dropped)

    def take(self, timeout: float | None, give_up: Callable[[], bool]) -> GenerationOutput | None:
        """The next output of any request; None after ``timeout`` seconds or when ``give_up()`` says none will come."""
        return self._wait(self._pop, timeout, give_up)

    def take_head(self, request_id: str, timeout: float | None, give_up: Callable[[], bool]) -> GenerationOutput | None:
        """The next output if it is this request's; None, and nothing is taken, if another's comes first."""

        def head() -> tuple[bool, GenerationOutput | None]:
            if not self._has_next():
                return False, None
            output = self._queue[0][0]
            assert output is not None
            return (True, None) if output.request_id != request_id else self._pop()

        return self._wait(head, timeout, give_up)

    def take_of(self, request_id: str, timeout: float | None, give_up: Callable[[], bool]) -> GenerationOutput | None:
        """The next output of this request, past those of others."""

        def pop() -> tuple[bool, GenerationOutput | None]:
            self._sort_all()
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
            self._sort_all()
            inbox = self._inboxes.setdefault(loop, _Inbox(loop))
            inbox.handlers += 1
            if request_id in self._handlers:
                self._drop_handler(request_id)
            self._handlers[request_id] = (callback, inbox)
            for entry in self._by_request.pop(request_id, ()):
                output, entry[0] = entry[0], None
                if output is not None:
                    self._taken += 1
                    self._call(output)
            self._drop_taken()
        loop.call_soon(self._serve, inbox)

    def clear(self) -> int:
        """Drop what waits to be taken; returns how many outputs that were."""
        with self._condition:
            if self._handlers:  # what is theirs is not dropped
                self._sort_all()
            dropped = sum(map(len, self._arrived)) + sum(entry[0] is not None for entry in self._queue)
            self._arrived.clear()
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
            return not self._has_next()

    def _pop(self) -> tuple[bool, GenerationOutput | None]:
        if not self._has_next():
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

    def _has_next(self) -> bool:
        """Whether an output stands in the common queue, and then at its head; sorts out what arrived as far as that
        takes."""
        self._drop_taken()
        while self._arrived and not self._queue:
            self._sort(self._arrived.popleft())
        return bool(self._queue)

    def _sort_all(self) -> None:
        while self._arrived:
            self._sort(self._arrived.popleft())

    def _sort(self, outputs: Outputs) -> None:
        """Put each output where it is taken from."""
        handlers, queue, by_request = self._handlers, self._queue, self._by_request
        for output in outputs:
            request_id = output.request_id
            if request_id in handlers:
                self._call(output)
                continue
            entry: Entry = [output]
            queue.append(entry)
            own = by_request.get(request_id)
            if own is None:
                by_request[request_id] = deque((entry,))
            else:
                own.append(entry)

    def _call(self, output: GenerationOutput) -> None:
        """Note a call of the output's handler, which is dropped after the last one."""
        callback, inbox = self._handlers[output.request_id]
        inbox.calls.append((callback, output))
        if output.is_finished():
            self._drop_handler(output.request_id)

    def _drop_handler(self, request_id: str) -> None:
        _, inbox = self._handlers.pop(request_id)
        inbox.handlers -= 1
        if not inbox.handlers:
            del self._inboxes[inbox.loop]

    def _take_calls(self, inbox: _Inbox) -> list[Call]:
        with self._condition:
            self._sort_all()
            calls, inbox.calls = inbox.calls, []
        return calls

    def _serve(self, inbox: _Inbox) -> None:
        """On an event loop: call its handlers; one that raises is reported to the loop and takes nothing from the
        others."""
        for callback, output in self._take_calls(inbox):
            try:
                callback(output)
            except Exception as error:
                inbox.loop.call_exception_handler(
                    {"message": f"result handler of request {output.request_id!r} failed", "exception": error}
                )

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
