"""Names that do not exist: the nearest ones that do, and one wording for saying so."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(given: object, known: Iterable[str], most: int = 1) -> tuple[str, ...]:
    """Up to ``most`` known names that resemble ``given``, best first; () if none is close."""
    return tuple(difflib.get_close_matches(str(given), sorted(known), n=most, cutoff=0.5))


def did_you_mean(names: Iterable[str]) -> str:
    """A sentence that offers ``names``, with a space before it; "" if there are none."""
    offered = " or ".join(repr(name) for name in names)
    return f" Did you mean {offered}?" if offered else ""


def unknown(what: str, given: object, known: Iterable[str]) -> str:
    """One line: which ``what`` was given, the nearest known one, and all that are known."""
    names = sorted(known)
    hint = did_you_mean(nearest(given, names))
    return f"unknown {what} {given!r}.{hint} Available: {', '.join(names) or 'none'}."


def unknown_name(what: str, given: object, known: Iterable[str]) -> ValueError:
    """The error of a boundary at which a name is unknown; see :func:`unknown`."""
    return ValueError(unknown(what, given, known))
