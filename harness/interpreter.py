"""Interpreters started from this one: they import the same harness, whatever lies in the current folder."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

import harness

COMMAND = (sys.executable, "-P")
"""How one is called. ``-P``: neither ``-m`` nor ``-c`` puts the current folder first among what can be imported, where
a file that is named like one of our modules or of the library's would be taken for it."""


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with the folder of this process's harness first in ``PYTHONPATH``: ``sys.path`` may have led to it.
    Not if it is installed: a child finds it by itself, and packages must not come before the library."""
    root = str(Path(harness.__file__).resolve().parents[1])
    if root in map(os.path.realpath, [*site.getsitepackages(), site.getusersitepackages()]):
        return dict(base)
    others = [folder for folder in base.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", root)]
    return {**base, "PYTHONPATH": os.pathsep.join([root, *others])}
