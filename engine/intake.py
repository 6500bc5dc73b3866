"""Where client threads and the loop meet: what is asked for, which requests are live, how urgently to stop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from engine.requests import Request, RequestStatus

logger = logging.getLogger(__name__)

QUEUE_PATIENCE_S = 10.0
"""How long a submission waits for room in a full queue."""

Order = Request | str
"""A request to serve, or the id of one to cancel."""


class QueueFull(RuntimeError):
    """More requests wait than ``max_queue_size`` allows; try again later."""


class Stop(IntEnum):
    """How urgently the loop is asked to end; only ever raised while it runs."""

    NO = 0
    FLUSH = 1
    HARD = 2


class Intake:
    """Orders of client threads until the loop takes them, and the requests that have not ended.

    Args:
        max_queue_size: requests that may wait for admission; 0 = no limit.

    Attributes:
        changed: the condition under which everything here changes; other objects may wait on it too.
        live: requests submitted and not ended, by id.
        accepting: whether new requests are taken.
        stop: how urgently the loop is asked to end.
    """

    def __init__(self, max_queue_size: int) -> None:
        self.changed = threading.Condition()
        self.live: dict[str, Request] = {}
        self.accepting = True
        self.stop = Stop.NO
        self._limit = max_queue_size
        self._orders: deque[Order] = deque()
        self._counter = 0

    # --- client threads ---------------------------------------------------------------------------------------------

    def number(self) -> int:
        """How many requests asked for a place before."""
        with self.changed:
            self._counter += 1
            return self._counter - 1

    def free_id(self, number: int) -> str:
        """A generated id that no live request has."""
        while f"req_{number}" in self.live:
            number += 1_000_000
        return f"req_{number}"

    def wait_for_room(self, count: int) -> None:
        """Wait until ``count`` more requests fit the queue.

        Raises:
            ValueError: they never will.
            QueueFull: none left the queue in time.
        """
        if not self._limit:
            return
        if count > self._limit:
            raise ValueError(f"{count} sequences of a prompt are more than max_queue_size={self._limit}; ask for fewer")
        deadline = time.monotonic() + QUEUE_PATIENCE_S
        with self.changed:
            while self._num_waiting() + count > self._limit and self.accepting:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise QueueFull(f"{self._limit} requests already wait (max_queue_size); try again later")
                self.changed.wait(min(remaining, 0.05))

    def submit(self, request: Request, generated_number: int | None) -> bool:
        """Take a request and its children; False if none are taken any more.

        Args:
            generated_number: of a request whose id was generated, and may have been taken meanwhile.

        Raises:
            ValueError: a live request has its id.
        """
        with self.changed:
            if not self.accepting:
                return False
            if generated_number is not None:
                request.rename(self.free_id(generated_number))
            family = (request, *request.children)
            for member in family:
                if member.request_id in self.live:
                    raise ValueError(f"request id {member.request_id!r} is in use by a live request; choose another")
            self.live.update((member.request_id, member) for member in family)
            self._orders.append(request)
            self.changed.notify_all()
            return True

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a live request."""
        with self.changed:
            if request_id in self.live:
                self._orders.append(request_id)
                self.changed.notify_all()

    def open(self) -> None:
        """Take requests, and let the loop run."""
        with self.changed:
            self.accepting, self.stop = True, Stop.NO

    def close(self, stop: Stop = Stop.NO) -> None:
        """Take no more requests; ask the loop to end at least as urgently as ``stop``."""
        with self.changed:
            self.accepting = False
            self.stop = max(self.stop, stop)
            self.changed.notify_all()

    # --- the loop ---------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether the loop has anything to take; cheap, without the lock."""
        return bool(self._orders) or self.stop is not Stop.NO

    def take(self, ready: Callable[[], bool]) -> tuple[list[Order], Stop]:
        """Wait for orders, a stop, or until ``ready()``; the orders are handed over, in order of arrival."""
        with self.changed:
            self.changed.wait_for(lambda: self.has_news or ready())
            orders = list(self._orders)
            self._orders.clear()
            self.changed.notify_all()
            return orders, self.stop

    def take_requests(self) -> list[Request]:
        """Close, and hand over the requests that were never taken."""
        self.close()
        with self.changed:
            requests = [order for order in self._orders if isinstance(order, Request)]
            self._orders.clear()
            return requests

    def end_unserved(self, reason: str) -> list[Request]:
        """End the requests that were added to a loop that never ran: as cancelled where that was asked, else as
        failed. They stay live until `ended` is told."""
        with self.changed:
            cancelled = {order for order in self._orders if isinstance(order, str)}
            requests = self.take_requests()
        family = [member for request in requests for member in (request, *request.children)]
        for member in family:
            if member.request_id in cancelled:
                member.end(RequestStatus.CANCELLED, "cancelled by the client")
            else:
                member.end(RequestStatus.FAILED, reason)
        return family

    def ended(self, request_ids: list[str]) -> None:
        """These requests have had their terminal outputs."""
        with self.changed:
            for request_id in request_ids:
                del self.live[request_id]
            self.changed.notify_all()

    def _num_waiting(self) -> int:
        return sum(1 for request in self.live.values() if request.admitted_time < 0)
