"""Folders that hold no result, told before the engine and all it needs are imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def check_folders(arguments: Sequence[str]) -> None:
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
