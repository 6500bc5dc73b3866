"""Being asked to stop: Ctrl-C, and the signals that mean the same, told apart by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP (its terminal is gone)"}

RELAYED = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGUSR1, signal.SIGHUP: signal.SIGHUP}
"""What a measured process is sent for each: SIGTERM itself ends it at once, with all that it measured."""


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that knows its signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """The signal that came; Python's own KeyboardInterrupt is SIGINT's."""
    return interrupt.signal if isinstance(interrupt, Interrupted) else signal.SIGINT


def by(number: signal.Signals) -> str:
    """How that is told."""
    return f"interrupted by {_NAMES.get(number, number.name)}"


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """128 and the signal's number, as of a shell: 130 of Ctrl-C, 143 of SIGTERM, 129 of SIGHUP."""
    return 128 + signal_of(interrupt)


def take_relayed() -> None:
    """In a measured process: each relayed signal is an interrupt by the one it stands for, whatever was inherited."""
    meant = {sent: came for came, sent in RELAYED.items()}

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted(meant[signal.Signals(number)])

    for sent in meant:
        signal.signal(sent, interrupt)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let nothing interrupt what is written meanwhile; only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in RELAYED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupting() -> Iterator[None]:
    """Treat SIGTERM (a batch system's end of a job) and SIGHUP (the terminal is gone) like Ctrl-C, so that what was
    measured is written down. Under nohup SIGHUP stays ignored; only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    on_terminal = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]

    def terminated(number: int, frame: Any) -> None:
        raise Interrupted(number)

    def hung_up(number: int, frame: Any) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)  # writing to a terminal that is gone is an error
        for stream in on_terminal:
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        raise Interrupted(number)

    handlers = {signal.SIGTERM: terminated, signal.SIGHUP: hung_up}
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
