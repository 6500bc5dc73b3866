"""The server of measured processes: imports what every run needs once, and forks a child for each run.

``python -m harness.forkserver FD MODULE``, started and asked by :mod:`harness.forked`. It calls ``MODULE.prepare()``,
then waits on the socket ``FD``. A request is one byte with three descriptors: a connection of the run's own, the pipe
for its messages and its log. The child leads a session of its own, has the log as stdout and stderr, reads its
arguments from the connection and ends as ``MODULE.main([pipe, *arguments])`` ends, as a program of its own would. Over
the connection the child says ``{"pid": …}``, and the server, once it has waited for the child, ``{"code": …}``
(negative = ended by that signal), or ``{"error": …}`` if it could not fork. The server ends when its client and all
its runs are gone.

Not :mod:`multiprocessing`'s fork server: there is one of it a process, it keeps the environment of its first use
(``CUDA_VISIBLE_DEVICES``, ``OMP_NUM_THREADS`` and many more are read by imports), and each of its children imports the
caller's ``__main__`` again.

All children of a server share what the interpreter drew when it started: the seed of string hashes and the places of
libraries in memory. Everything else of a run is its own; ``random`` is seeded anew at a fork, by Python.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from typing import Any


def main() -> int:
    """Serve, and in a child carry on as the run; the exit code of either."""
    ended: list[int] = []
    atexit.register(_leave, ended)  # before all imports, so that what they register comes first
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    module = importlib.import_module(sys.argv[2])
    module.prepare()
    _become_quiet()
    # What is there now is there for good: a collection in a child must not touch, and so copy, its pages.
    gc.collect()
    gc.freeze()
    arguments = _serve(control)
    code: int = 0 if arguments is None else module.main(arguments)
    ended.append(code)
    return code


def _leave(ended: list[int]) -> None:
    """The last of what is done at exit, when threads have ended. The interpreter's own end would go through every
    object of every module to free what the process gives back anyway: seconds in which the next run could begin."""
    if ended:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(ended[0])


def _serve(control: socket.socket) -> list[str] | None:
    """Fork a child for each request and say how it ended. Returns a child's arguments in the child, else None."""
    woken, waker = socket.socketpair()
    woken.setblocking(False)
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must be there for the byte to be written
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    runs: dict[int, socket.socket] = {}  # connections by process id
    waited = [control, woken]
    while control in waited or runs:
        ready, _, _ = select.select(waited, [], [])
        if woken in ready:
            woken.recv(4096)
            _report_ended(runs)
        if control not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        if not request:
            waited.remove(control)
            continue
        connection, pipe, log = socket.socket(fileno=descriptors[0]), *descriptors[1:]
        try:
            pid = _fork()
        except OSError as error:
            _say(connection, error=f"no process could be made for the run: {error}")
            connection.close()
        else:
            if pid == 0:
                for mine in (control, woken, waker, *runs.values()):
                    mine.close()
                return _become_run(connection, pipe, log)
            runs[pid] = connection
        # An end that stays open here would hide from the client that the run is over.
        os.close(pipe)
        os.close(log)
    return None


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of threads at a fork. None is ours, and none of Python's: pyarrow's allocator has one, which
        # provides for forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_run(connection: socket.socket, pipe: int, log: int) -> list[str]:
    """Leave the server behind; the arguments of the run."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()  # into the log
    with connection, connection.makefile("rb") as request:
        _say(connection, pid=os.getpid())  # from here on its group can be ended
        return [str(pipe), *json.loads(request.readline())]


def _become_quiet() -> None:
    """Let go of the log in which the imports could say what they had to."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _report_ended(runs: dict[int, socket.socket]) -> None:
    while runs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in runs:
            with runs.pop(pid) as connection:
                _say(connection, code=os.waitstatus_to_exitcode(status))


def _say(connection: socket.socket, **message: Any) -> None:
    with suppress(OSError):  # the client has given the run up
        connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    raise SystemExit(main())
