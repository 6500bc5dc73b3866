"""Sends a workload to a backend on schedule and waits for its end.

The sender follows absolute due times: request k is due at ``t_start + due_s[k]`` whatever happened to the requests
before it, so a late wake-up costs one request its lag and the schedule nothing. It never waits for replies, except
where the workload says so: in a closed loop, and between the turns of a session (see :mod:`harness.agenda`).
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass

from harness.agenda import Agenda
from harness.backends.base import Backend
from harness.clock import Clock
from harness.errors import one_line
from harness.interruption import signal_of
from harness.record import Outcome
from harness.recorder import Recorder
from harness.session_sink import SessionSink
from workloads.workload import ScheduledRequest, Workload


@dataclass(frozen=True, slots=True)
class Drive:
    """Outcome of :func:`drive`: start of the schedule, last observed end (or the moment of giving up), and why it
    gave up if it did. ``unseen_answers``: prompts that hold planned ids because an answer's were not shown."""

    t_start_ns: int
    t_end_ns: int
    timed_out: bool
    interrupted: signal.Signals | None = None
    unseen_answers: int = 0


def drive(workload: Workload, backend: Backend, recorder: Recorder, clock: Clock, timeout_s: float) -> Drive:
    """Run ``workload`` on a warmed-up backend until all requests ended, ``timeout_s`` passed or an interrupt came.

    Requests still open then keep the outcome UNFINISHED, with the tokens they had. The backend is started
    and told about the end of input here; stopping it is the caller's business.

    Raises:
        Exception: whatever the sender met outside the backend's own ``submit`` (for example a wrong clock).
    """
    sender = _Sender(workload, backend, recorder, clock)
    backend.start(sender.sink)
    interrupted = None
    sender.start()
    try:
        # The wait is on real threads, so its limit is real time even under a fake clock.
        finished = sender.wait(timeout_s)
    except KeyboardInterrupt as interrupt:  # what was observed so far is worth keeping; the caller ends the run
        finished, interrupted = False, signal_of(interrupt)
    finally:
        sender.cancel()
    if sender.failure is not None:
        raise sender.failure
    last_end_ns = recorder.last_end_ns()
    t_end_ns = last_end_ns if finished and last_end_ns is not None else clock.now_ns()
    unseen = sender.sessions.unseen_answers if sender.sessions is not None else 0
    return Drive(sender.t_start_ns, t_end_ns, not finished and interrupted is None, interrupted, unseen)


class _Sender(threading.Thread):
    """The thread that submits; daemon, so that a hung backend cannot keep the process alive."""

    def __init__(self, workload: Workload, backend: Backend, recorder: Recorder, clock: Clock) -> None:
        super().__init__(name="sender", daemon=True)
        self._backend = backend
        self._recorder = recorder
        self._clock = clock
        self._wake = threading.Event()  # something has changed that a sleeping sender must look at
        self._cancelled = False
        self._done = threading.Event()
        self._agenda = Agenda(workload)
        self._begun = False
        self.failure: BaseException | None = None
        self.t_start_ns = clock.now_ns()
        # An open loop has nothing between the backend and the recorder.
        self.sessions = SessionSink(recorder, workload, self._on_end) if workload.waits else None
        self.sink: Recorder | SessionSink = self.sessions or recorder

    def run(self) -> None:
        try:
            agenda = self._agenda
            self.t_start_ns = self._clock.now_ns()
            agenda.begin(self.t_start_ns)
            self._begun = True
            self._recorder.started(self.t_start_ns)
            while not agenda.exhausted:
                self._wake.clear()  # before looking: what comes after the look wakes
                if self._cancelled:
                    return
                due_ns = agenda.next_due_ns()
                if due_ns is None:
                    self._wake.wait()
                elif self._clock.sleep_until(due_ns, self._wake):
                    self._send(*agenda.take())
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
        self._cancelled = True
        self._wake.set()
        self.join(timeout=1.0)

    def _send(self, t_sched_ns: int, request: ScheduledRequest) -> None:
        if self.sessions is not None:
            request = self.sessions.as_sent(request)
        t_submit_ns = self._clock.now_ns()
        length = len(request.prompt_ids) if request.takes_answer else None
        self._recorder.sent(request.request_id, t_sched_ns, t_submit_ns, length)
        try:
            self._backend.submit(request)
        except Exception as error:  # one refused request must not end the others
            self.sink.on_end(request.request_id, Outcome.ENGINE_ERROR, self._clock.now_ns(), error=one_line(error))

    def _on_end(self, request_id: str, outcome: Outcome, time_ns: int) -> None:
        """Called from whatever thread the backend reports an end from."""
        if not self._begun:  # reported before anything was sent: the recorder has noted the breach
            return
        for given_up in self._agenda.ended(request_id, outcome.ok, time_ns):
            error = f"not sent: {request_id}, before it in its session, ended as {outcome.value}"
            self._recorder.on_end(given_up, Outcome.CANCELLED, time_ns, error=error)
        self._wake.set()
