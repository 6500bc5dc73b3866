"""How ``cb-plan`` and ``cb-tune`` begin: usage and folders without a result are told before the engine is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.interruption import by, exit_code, interrupting, signal_of
from harness.streams import open_closed


def start(command: str, usage: str, module: str, argv: Sequence[str] | None) -> int:
    """Run ``module.run`` with the command's arguments once they are worth the seconds that importing it takes.

    Returns:
        Its exit status; 0 after the usage, 2 with one line on standard error if a folder holds no result, 128 and the
        number of the signal that interrupted it.
    """
    open_closed()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print(usage)
        return 0
    try:
        with interrupting():
            _check_folders(arguments)
            run = importlib.import_module(module).run
    except KeyboardInterrupt as interrupt:
        print(f"{command}: {by(signal_of(interrupt))}; nothing had begun", file=sys.stderr)
        return exit_code(interrupt)
    except (ValueError, OSError) as error:
        print(f"{command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return int(run(arguments))


def _check_folders(arguments: Sequence[str]) -> None:
    """Of a command's arguments, those that are folders of results (without ``=``).

    Raises:
        ValueError: one holds no result, or several of commands of their own; one line.
        OSError: it cannot be read.
    """
    from harness import store  # pandas: what the usage need not wait for

    for folder in (Path(argument) for argument in arguments if "=" not in argument):
        if not store.is_result(folder):
            from harness.report.read import read_results

            read_results(folder)  # says what is wrong; tables that were never joined are fine
