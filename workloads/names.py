"""Errors for names that do not exist, with the nearest one that does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(what: str, given: object, allowed: Iterable[str]) -> ValueError:
    """A ValueError that says which ``what`` was given, the nearest allowed one, and all that are allowed."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {what} {given!r}: {hint}allowed: {', '.join(names) or 'none'}")
