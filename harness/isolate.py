"""Runs measurements in a fresh child process and watches it.

Peaks, CUDA contexts, captured graphs and compile caches do not carry over from one process to the next, and a crash
takes only its own runs with it. The child is forked from a server that has done its imports and nothing else
(:mod:`harness.forked`): those take longer than many a run. It reports through a pipe, one JSON object a line:
``{"phase": …}`` when a phase begins, live counts while measuring, ``{"error": …, "status": …}`` if it gives up, each
with the index of its ``run``. Its stdout and stderr go to the log.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends.settings import environment_named
from harness.errors import RunFailed
from harness.forked import ForkedProcess, ServerGone, start
from harness.interruption import RELAYED, signal_of

CHILD = "harness.child"
"""The module that is the child."""

WRITING_LIMIT_S = 300.0
MEASURING_GRACE_S = 30.0
"""What the child gets beyond ``measure.timeout_s`` to notice its own timeout and wind down."""

EXIT_LIMIT_S = 10.0
"""What the child gets to exit after the last of its report."""

INTERRUPT_GRACE_S = 10.0
"""What an interrupted child gets to write down what it measured so far."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest time in seconds that the child may stay in each part of its life."""

    start_s: float
    measure_s: float

    def of(self, phase: str) -> float:
        if phase == "measuring":
            return self.measure_s + MEASURING_GRACE_S
        return WRITING_LIMIT_S if phase == "writing" else self.start_s


def run_isolated(
    specs: Sequence[Path],
    log: Path,
    limits: Limits,
    on_message: Callable[[Mapping[str, Any]], None],
    env: Mapping[str, str] | None = None,
) -> None:
    """Run ``harness.child`` on ``specs``, in a process of its own, to its end.

    Args:
        specs: its runs as JSON, read by the child.
        log: file to which the child's stdout and stderr are appended.
        limits: time limits by phase; the start limit covers everything before measuring, also between two runs.
        on_message: called with each message of the child, in this thread.
        env: environment variables of the child on top of this process's.

    Raises:
        RunFailed: the child reported an error, crashed, was killed or exceeded a limit; the cause says which.
        KeyboardInterrupt: after the child was ended; one that was measuring had time to write what it had.
    """
    env = env or {}
    watch = _Watch(limits, on_message)
    read_end, write_end = os.pipe()
    with open(read_end, "rb", buffering=0) as pipe:
        try:
            with log.open("ab") as log_file:
                child = start(CHILD, list(map(str, specs)), write_end, log_file.fileno(), _environment(env))
        finally:
            os.close(write_end)
        try:
            try:
                watch.follow(pipe, child)
            except KeyboardInterrupt as interrupt:
                if watch.phase in ("measuring", "writing"):
                    _let_finish(child, watch, pipe, signal_of(interrupt))
                raise
            code = _exit_code(child, watch)
        except ServerGone as gone:
            cause = _describe_exit("the server of measured processes", gone.code, watch.phase, env)
            raise RunFailed(cause, detail=_tail(log)) from None
        finally:
            child.end()
    if watch.failure is not None:
        raise watch.failure
    if code != 0:
        raise RunFailed(_describe_exit("the measured process", code, watch.phase, env), detail=_tail(log))
    if watch.phase != "done":
        raise RunFailed(f"the measured process stopped while {watch.phase} without saying why", detail=_tail(log))


class _Watch:
    """Reads the child's messages and keeps the time of its phases."""

    def __init__(self, limits: Limits, on_message: Callable[[Mapping[str, Any]], None]) -> None:
        self._limits = limits
        self._on_message = on_message
        self._phase_began = time.monotonic()
        self._pending = b""
        self.phase = "starting"
        self.failure: RunFailed | None = None

    def follow(self, pipe: Any, child: ForkedProcess, longest_s: float = math.inf) -> None:
        """Return at the end of the pipe or after ``longest_s``.

        Raises:
            RunFailed: a phase takes too long, or the child could not be made.
            ServerGone: its server ended before it did.
        """
        give_up = time.monotonic() + longest_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if child.code is None:
                selector.register(child, selectors.EVENT_READ)
            while True:
                limit_s = self._limits.of(self.phase)
                left_s = limit_s - (time.monotonic() - self._phase_began)
                if left_s <= 0:
                    raise RunFailed(f"still {self.phase} after {limit_s:g} s; ended", status="timeout")
                ready = [key.fileobj for key, _ in selector.select(min(left_s, max(0.0, give_up - time.monotonic())))]
                if not ready and time.monotonic() >= give_up:
                    return
                if child in ready:
                    child.take()
                    if child.code is not None:
                        selector.unregister(child)
                if pipe not in ready:
                    continue
                data = pipe.read(65536)
                if not data:
                    return
                *lines, self._pending = (self._pending + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, message: Mapping[str, Any]) -> None:
        if "error" in message:
            self.failure = RunFailed(message["error"], message.get("traceback"), message.get("status", "failed"))
        elif (phase := message.get("phase")) not in (None, self.phase):
            # Everything before measuring shares one limit, so its clock is not restarted by a new phase.
            if phase in ("measuring", "writing"):
                self._phase_began = time.monotonic()
            self.phase = phase
        self._on_message(message)


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["PYTHONFAULTHANDLER"] = "1"  # a segmentation fault leaves its stack in the log
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment | dict(env)


def _let_finish(child: ForkedProcess, watch: _Watch, pipe: Any, came: signal.Signals) -> None:
    """Pass the interrupt on and follow the child while it writes its tables; another Ctrl-C ends the patience."""
    # A message may have been torn by the interrupt; it must not turn into an error of its own.
    with suppress(RunFailed, ServerGone, ValueError):
        child.interrupt(RELAYED[came])
        watch.follow(pipe, child, INTERRUPT_GRACE_S)


def _exit_code(child: ForkedProcess, watch: _Watch) -> int:
    try:
        return child.wait(EXIT_LIMIT_S)
    except TimeoutError as error:
        if watch.phase == "done" or watch.failure is not None:
            return 0  # all of the run is written or told; only its end is not, and may be its server's fault
        raise RunFailed(f"the measured process closed its report but did not exit within {EXIT_LIMIT_S:g} s") from error


def _describe_exit(which: str, code: int, phase: str, env: Mapping[str, str]) -> str:
    if code >= 0:
        under = f" with {environment_named(env)}" if env and phase == "starting" else ""
        return f"{which} exited with code {code} while {phase}{under}"
    name = signal.Signals(-code).name
    hint = " (out of memory? the kernel's OOM killer sends it)" if name == "SIGKILL" else ""
    return f"{which} was ended by {name} while {phase}{hint}"


def _tail(log: Path, lines: int = 20) -> str | None:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) or None
    except OSError:
        return None
