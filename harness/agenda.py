"""What is to be sent next: requests by due time, some of which learn theirs when another one ends."""

from __future__ import annotations

import heapq
import threading
from collections import deque

from harness.clock import NS_PER_S
from workloads.workload import ScheduledRequest, Workload


class Agenda:
    """Requests of a run in the order in which they fall due; every method is thread-safe.

    A request that neither follows another nor needs a place is due at its own time from the start. One that follows
    another, and in a closed loop one that waits for a place, is due its think time after that end, and not before its
    own time. A place belongs to a session from its first request until its last one ended. Requests of a phase are due
    their think time after the last end of the phase before.

    Made before the clock of a run begins to count, so that its making (tens of ms for a long trace) delays no request:
    moments count from 0 until :meth:`begin`.
    """

    def __init__(self, workload: Workload) -> None:
        self._t_start_ns = 0
        self._lock = threading.Lock()
        self._index = {r.request_id: k for k, r in enumerate(workload.requests)}
        self._follower = {r.follows: r for r in workload.requests if r.follows is not None}
        phases = workload.phases
        self._phases = deque([[r for r in workload.requests if r.phase == p] for p in phases[1:]])
        opening = [r for r in workload.requests if r.follows is None and r.phase in (None, *phases[:1])]
        self._open_in_phase = len(opening) if phases else 0
        places = len(opening) if workload.concurrency is None else workload.concurrency
        self._queue = deque(opening[places:])  # first requests of sessions without a place
        self._to_come = len(workload) - len(opening[:places])
        # Heap of (ns after the start, place in the workload, request).
        self._due = [(_own_ns(r), self._index[r.request_id], r) for r in opening[:places]]
        heapq.heapify(self._due)

    def begin(self, t_start_ns: int) -> None:
        """The schedule begins at ``t_start_ns``; to be called before the first request is taken."""
        self._t_start_ns = t_start_ns

    def next_due_ns(self) -> int | None:
        """When the next request is due; None while none has a due time."""
        with self._lock:
            return self._t_start_ns + self._due[0][0] if self._due else None

    def take(self) -> tuple[int, ScheduledRequest]:
        """The next request with its due time, which is the caller's from now on."""
        with self._lock:
            due_ns, _, request = heapq.heappop(self._due)
            return self._t_start_ns + due_ns, request

    @property
    def exhausted(self) -> bool:
        """Every request has been taken or given up."""
        with self._lock:
            return not self._due and not self._to_come

    def ended(self, request_id: str, ok: bool, time_ns: int) -> list[str]:
        """Give who waits for this end its due time.

        Returns:
            The requests that are given up: a session whose turn was not answered does not go on.
        """
        with self._lock:
            self._end_in_phase(time_ns)
            follower = self._follower.get(request_id)
            if follower is not None and ok:
                self._fall_due(follower, time_ns)
                return []
            given_up = []
            while follower is not None:
                given_up.append(follower.request_id)
                follower = self._follower.get(follower.request_id)
            self._to_come -= len(given_up)
            if self._queue:
                self._fall_due(self._queue.popleft(), time_ns)
            return given_up

    def _end_in_phase(self, time_ns: int) -> None:
        """The lock is held."""
        self._open_in_phase -= 1
        if self._open_in_phase == 0 and self._phases:
            following = self._phases.popleft()
            self._open_in_phase = len(following)
            for request in following:
                self._fall_due(request, time_ns)

    def _fall_due(self, request: ScheduledRequest, end_ns: int) -> None:
        """The lock is held."""
        due_ns = max(_own_ns(request), end_ns - self._t_start_ns + round(request.think_s * NS_PER_S))
        heapq.heappush(self._due, (due_ns, self._index[request.request_id], request))
        self._to_come -= 1


def _own_ns(request: ScheduledRequest) -> int:
    return round(request.due_s * NS_PER_S)
