"""Names of settings that do not exist: which one was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(what: str, given: str, known: Iterable[str]) -> TypeError:
    """The error of a ``what`` that is called ``given`` and does not exist, with the nearest of ``known`` if one is."""
    near = difflib.get_close_matches(given, sorted(known), n=1, cutoff=0.5)
    return TypeError(f"unknown {what} {given!r}" + (f". Did you mean {near[0]!r}?" if near else ""))
