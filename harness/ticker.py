"""Looks at a running measurement a few times a second and passes on what is new."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from harness.recorder import Recorder

INTERVAL_S = 0.2


class Ticker:
    """Sends live counts every :data:`INTERVAL_S`, from its own thread, until stopped.

    Args:
        send: takes ``sent``, ``ended``, ``total`` and ``tokens``.
    """

    def __init__(self, send: Callable[..., Any], recorder: Recorder) -> None:
        self._send = send
        self._recorder = recorder
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Safe to call again."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            p = self._recorder.progress()
            self._send(sent=p.sent, ended=p.ended, total=p.total, tokens=p.tokens)
