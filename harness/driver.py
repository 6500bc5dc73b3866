"""Sends a workload to a backend on schedule and waits for its end.

The sender follows absolute due times: request k is due at ``t_start + due_s[k]`` whatever happened to the requests
before it, so a late wake-up costs one request its lag and the schedule nothing. It never waits for replies, except in
a closed loop, where it also waits for a free place.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from harness.backends.base import Backend
from harness.clock import NS_PER_S, Clock
from harness.errors import one_line
from harness.record import Outcome
from harness.recorder import Recorder
from workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class Drive:
    """Outcome of :func:`drive`: start of the schedule, last observed end (or the moment of giving up), and why it
    gave up if it did."""

    t_start_ns: int
    t_end_ns: int
    timed_out: bool
    interrupted: bool = False


def drive(workload: Workload, backend: Backend, recorder: Recorder, clock: Clock, timeout_s: float) -> Drive:
    """Run ``workload`` on a warmed-up backend and return when all requests ended, ``timeout_s`` passed or Ctrl-C came.

    Requests still open then keep the outcome UNFINISHED, with the tokens they had. The backend is started
    and told about the end of input here; stopping it is the caller's business.

    Raises:
        Exception: whatever the sender met outside the backend's own ``submit`` (for example a wrong clock).
    """
    backend.start(recorder)
    sender = _Sender(workload, backend, recorder, clock)
    interrupted = False
    sender.start()
    try:
        # The wait is on real threads, so its limit is real time even under a fake clock.
        finished = sender.wait(timeout_s)
    except KeyboardInterrupt:  # what was observed so far is worth keeping; the caller ends the run
        finished, interrupted = False, True
    finally:
        sender.cancel()
    if sender.failure is not None:
        raise sender.failure
    last_end_ns = recorder.last_end_ns()
    t_end_ns = last_end_ns if finished and last_end_ns is not None else clock.now_ns()
    return Drive(sender.t_start_ns, t_end_ns, timed_out=not finished and not interrupted, interrupted=interrupted)


class _Sender(threading.Thread):
    """The thread that submits; daemon, so that a hung backend cannot keep the process alive."""

    def __init__(self, workload: Workload, backend: Backend, recorder: Recorder, clock: Clock) -> None:
        super().__init__(name="sender", daemon=True)
        self._workload = workload
        self._backend = backend
        self._recorder = recorder
        self._clock = clock
        self._cancelled = threading.Event()
        self._places: threading.Semaphore | None = None
        self._done = threading.Event()
        self.failure: BaseException | None = None
        self.t_start_ns = clock.now_ns()
        if workload.concurrency is not None:
            places = threading.Semaphore(workload.concurrency)
            recorder.call_on_end(lambda _request_id: places.release())
            self._places = places

    def run(self) -> None:
        try:
            self.t_start_ns = self._clock.now_ns()
            self._recorder.started(self.t_start_ns)
            for request in self._workload.requests:
                t_sched_ns = self.t_start_ns + round(request.due_s * NS_PER_S)
                if not self._clock.sleep_until(t_sched_ns, self._cancelled) or not self._take_place():
                    return
                t_submit_ns = self._clock.now_ns()
                self._recorder.sent(request.request_id, t_sched_ns, t_submit_ns)
                try:
                    self._backend.submit(request)
                except Exception as error:  # one refused request must not end the others
                    self._recorder.on_end(
                        request.request_id, Outcome.ENGINE_ERROR, self._clock.now_ns(), error=one_line(error)
                    )
            self._backend.close_input()
        except BaseException as error:
            self.failure = error
        finally:
            self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """True once everything has been sent and has ended; False at the timeout or if the sender failed."""
        give_up = time.monotonic() + timeout_s
        if not self._done.wait(timeout_s) or self.failure is not None:
            return False
        return self._recorder.wait_all_ended(max(0.0, give_up - time.monotonic()))

    def cancel(self) -> None:
        """Send nothing more and end the thread (a ``submit`` that hangs is left to the daemon flag)."""
        self._cancelled.set()
        if self._places is not None:
            self._places.release()
        self.join(timeout=1.0)

    def _take_place(self) -> bool:
        if self._places is not None:
            self._places.acquire()
        return not self._cancelled.is_set()
