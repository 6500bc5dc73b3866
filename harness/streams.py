"""The standard streams of a command."""

from __future__ import annotations

import os
import sys

_NAMES = ("stdin", "stdout", "stderr")


def open_closed() -> None:
    """Put ``os.devnull`` where a standard stream was closed before the start (``>&-``): Python leaves None there, and
    the first file that is opened would get its descriptor, with what children print in it."""
    closed = [number for number, name in enumerate(_NAMES) if getattr(sys, name) is None]
    for number in closed:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
        os.set_inheritable(number, True)
        setattr(sys, _NAMES[number], os.fdopen(number, "w" if number else "r", closefd=False))
