"""Looks at a running measurement a few times a second, passes on live counts and keeps what is new on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from harness.errors import one_line
from harness.journal import Journal
from harness.recorder import Recorder
from harness.telemetry import Telemetry

INTERVAL_S = 0.2


class Ticker:
    """Ticks every :data:`INTERVAL_S`, from its own thread, until stopped; the last tick comes with :meth:`stop`.

    A disk that refuses the journal (full, taken away) does not end the measurement: that is said once, and the journal
    ends there.

    Args:
        send: takes ``sent``, ``ended``, ``total`` and ``tokens``.
    """

    def __init__(self, send: Callable[..., Any], recorder: Recorder, journal: Journal, telemetry: Telemetry) -> None:
        self._send = send
        self._recorder = recorder
        self._journal: Journal | None = journal
        self._telemetry = telemetry
        self._samples = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and keep what came last. Safe to call again."""
        self._stopped.set()
        self._thread.join()
        self._keep()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            p = self._recorder.progress()
            self._send(sent=p.sent, ended=p.ended, total=p.total, tokens=p.tokens)
            self._keep()

    def _keep(self) -> None:
        if self._journal is None:
            return
        samples = self._telemetry.since(self._samples)
        self._samples += len(samples)
        try:
            self._journal.add(self._recorder.take_changes(), self._recorder.t_start_ns, samples)
        except OSError as error:
            print(f"the run's journal ends here: {one_line(error)}", flush=True)
            self._journal.close()
            self._journal = None
