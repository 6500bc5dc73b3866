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

    def submit(self, request: Request, generated_number: int | None, patience: float | None) -> bool:
        """Take a request and its children once they fit the queue; False if none are taken any more.

        Args:
            generated_number: of a request whose id was generated, and may have been taken meanwhile.
            patience: seconds to wait for room; None = as long as requests are taken.

        Raises:
            ValueError: a live request has its id, or the family is larger than the queue.
            QueueFull: too few left the queue in time.
        """
        family = (request, *request.children)
        if self._limit and len(family) > self._limit:
            raise ValueError(
                f"{len(family)} sequences of a prompt are more than max_queue_size={self._limit}; ask for fewer"
            )
        deadline = None if patience is None else time.monotonic() + patience
        with self.changed:
            while self.accepting and not self._has_room(len(family)):
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise QueueFull(f"{self._limit} requests already wait (max_queue_size); try again later")
                # Admission to the batch changes nothing here, so nobody tells of it.
                self.changed.wait(0.05 if remaining is None else min(remaining, 0.05))
            if not self.accepting:
                return False
            if generated_number is not None:
                request.rename(self.free_id(generated_number))
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

    def _has_room(self, count: int) -> bool:
        """Whether ``count`` more may wait for admission."""
        if not self._limit or len(self.live) + count <= self._limit:  # no more wait than live
            return True
        return sum(request.admitted_time < 0 for request in self.live.values()) + count <= self._limit
