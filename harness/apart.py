"""Questions that a process of its own answers, where the caller has no torch or must stay as it is.

``python -m MODULE`` reads the question as JSON from its standard input and writes the answer as JSON behind a mark, so
that what libraries print when they are imported is not taken for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from harness import interpreter
from harness.errors import one_line

MARK = "harness.apart: "


class NoAnswer(ValueError):
    """Why there is none, in one line."""


def ask(module: str, question: Any, timeout_s: float | None = None, env: Mapping[str, str] | None = None) -> Any:
    """The answer of ``python -m module`` to ``question``, both as plain values; ``env`` on top of this environment.

    Raises:
        NoAnswer: it raised an exception, ended otherwise, or took longer than ``timeout_s``.
    """
    try:
        done = subprocess.run(
            [*interpreter.COMMAND, "-m", module],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=interpreter.environment({**os.environ, **(env or {})}),
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"there was no answer within {error.timeout:g} s") from error
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not answers:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        # What an interpreter that cannot start says last is where it was, not why.
        raise NoAnswer(next((line for line in reversed(said) if "Error: " in line), said[-1]))
    found = json.loads(answers[-1])
    if "error" in found:
        raise NoAnswer(found["error"])
    return found["answer"]


def answer(respond: Callable[[Any], Any]) -> int:
    """The other side of :func:`ask`: what ``respond`` makes of the question, or why it could not. The exit code."""
    try:
        found = {"answer": respond(json.load(sys.stdin))}
    except Exception as error:  # whoever asked shows one line, whatever was raised
        found = {"error": one_line(error)}
    print(f"\n{MARK}{json.dumps(found, default=str)}", flush=True)
    return 1 if "error" in found else 0
