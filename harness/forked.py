"""Processes forked from a server that has done their imports (:mod:`harness.forkserver`), as their client sees them.

A server belongs to the folder and the environment that it was started with, since imports depend on both; a process
with others gets another server. The servers used last are kept until this process ends.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from harness import interpreter
from harness.errors import RunFailed

KEPT = 2
"""Servers that stay although nothing of theirs runs: arms that differ in their environment may take turns."""

END_PATIENCE_S = (5.0, 10.0)
"""How long a process that is ended may take after SIGTERM, and its server to say so after SIGKILL."""


class ServerGone(Exception):
    """A server ended before its run did.

    Attributes:
        code: its exit code; negative = the signal that ended it.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class ForkedProcess:
    """A process of a server, from the request for it to its end; like ``Popen``, with what its server says of it.

    Attributes:
        pid: process and group; None until the server has forked it.
        code: exit code; negative = the signal that ended it; None while it is not known.
    """

    def __init__(self, server: _Server, connection: socket.socket) -> None:
        self._server, self._connection = server, connection
        self._pending = b""
        self.pid: int | None = None
        self.code: int | None = None

    def fileno(self) -> int:
        """Readable when the server has something to say, until ``code`` is known; then call :meth:`take`."""
        return self._connection.fileno()

    def take(self) -> None:
        """Take what the server says.

        Raises:
            ServerGone: nothing, ever again.
            RunFailed: it could not fork.
        """
        try:
            data = self._connection.recv(4096)
        except ConnectionResetError:  # it never read what it was sent
            data = b""
        if not data:
            raise ServerGone(self._server.ended())
        *lines, self._pending = (self._pending + data).split(b"\n")
        for message in map(json.loads, lines):
            if "error" in message:
                raise RunFailed(message["error"])
            self.pid, self.code = message.get("pid", self.pid), message.get("code")

    def wait(self, timeout_s: float) -> int:
        """Its exit code.

        Raises:
            TimeoutError: there was none within ``timeout_s``.
            ServerGone, RunFailed: there will be none.
        """
        give_up = time.monotonic() + timeout_s
        while self.code is None:
            if not select.select([self], [], [], max(0.0, give_up - time.monotonic()))[0]:
                raise TimeoutError(f"process {self.pid} did not end within {timeout_s:g} s")
            self.take()
        return self.code

    def interrupt(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        if self.pid is not None and self.code is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Make sure that it and what it started are gone."""
        try:
            with suppress(TimeoutError):
                self.wait(0.0)  # what the server has said by now
            if self.pid is None and self.code is None:
                self._server.end()  # not even forked: it hangs in an import, or is about to begin what nobody wants
            for sent, patience_s in zip((signal.SIGTERM, signal.SIGKILL), END_PATIENCE_S, strict=True):
                if self.code is None:
                    self._kill_group(sent)
                    with suppress(TimeoutError):
                        self.wait(patience_s)
            if self.code is None:
                self._server.end()  # killed, and it has not said so: it would be as silent about the next run
        except (ServerGone, RunFailed):
            self._kill_group(signal.SIGKILL)  # nobody is there to say how it ends
        finally:
            self._connection.close()
            _release(self._server)

    def _kill_group(self, sent: signal.Signals) -> None:
        if self.pid is not None and self.code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, sent)


class _Server:
    """A server as its client holds it.

    Attributes:
        key: what it was started for.
        runs: processes of it that have not been released; guarded by the lock of the table.
    """

    def __init__(self, module: str, environment: Mapping[str, str], log: int) -> None:
        self.key = _key(module, environment)
        self.runs = 0
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*interpreter.COMMAND, "-m", "harness.forkserver", str(theirs.fileno()), module],
                stdin=subprocess.DEVNULL,
                stdout=log,  # until it has imported everything: what goes wrong then is for this run to say
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=interpreter.environment(environment),
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends its runs in order
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def request(self, pipe: int, log: int, arguments: Sequence[str]) -> socket.socket:
        """Ask for a child; the connection over which its life is told."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # a server that is gone is found by whoever listens to the connection
            socket.send_fds(self._control, [b"+"], [theirs.fileno(), pipe, log])
            ours.sendall(json.dumps(list(arguments)).encode() + b"\n")
        return ours

    def ended(self) -> int:
        """The exit code of a server that has closed a connection too early."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(5.0)
        return self.end()

    def end(self) -> int:
        """End it now. It has nothing to lose, and its runs notice when they next say something to whoever is left."""
        self._control.close()
        self._process.kill()
        return self._process.wait()


_servers: list[_Server] = []  # the one used last comes last
_lock = threading.Lock()


def start(module: str, arguments: Sequence[str], pipe: int, log: int, environment: Mapping[str, str]) -> ForkedProcess:
    """A process that runs ``module.main([pipe, *arguments])``, forked after ``module.prepare()``. End it afterwards.

    Args:
        pipe: descriptor for its messages; the caller closes its own.
        log: descriptor that becomes its stdout and stderr; likewise.
        environment: all of its environment.
    """
    with _lock:
        found = [server for server in _servers if server.alive and server.key == _key(module, environment)]
        server = found[0] if found else _Server(module, environment, log)
        _servers[:] = [other for other in _servers if other is not server and other.alive] + [server]
        server.runs += 1
        _end_idle(KEPT)
    return ForkedProcess(server, server.request(pipe, log, arguments))


def _key(module: str, environment: Mapping[str, str]) -> tuple[str, str, dict[str, str]]:
    return module, os.getcwd(), dict(environment)


def _release(server: _Server) -> None:
    with _lock:
        server.runs -= 1
        _end_idle(KEPT)


def _end_idle(kept: int) -> None:
    """End servers without runs, those used longest ago first, until ``kept`` are left. The lock is held."""
    for server in [server for server in _servers if not server.runs][: max(0, len(_servers) - kept)]:
        _servers.remove(server)
        server.end()


@atexit.register
def end_servers() -> None:
    """End all servers; the next process starts a new one."""
    with _lock:
        for server in _servers:
            server.end()
        _servers.clear()


def _after_fork() -> None:
    """In a fork of the caller: its servers are not this process's to end, and its lock may be held for ever."""
    global _lock
    _servers.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
