"""The result of resolution: every setting with its value and where it came from, frozen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine.cache.layout import CacheLayout
from engine.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting's value and its source: "user", "default", or "derived: from what"."""

    value: Any
    source: str


class ResolvedConfig:
    """Every field of `ContinuousBatchingConfig` decided, and what was derived besides; immutable.

    Fields are attributes (``resolved.num_blocks``); ``resolved.source("num_blocks")`` says where a value came from.

    Attributes:
        layout: shape of the cache.
        ledger: planned use of memory.
        notes: choices that a user may not expect, as (logging level, sentence).
    """

    layout: CacheLayout
    ledger: Ledger
    notes: tuple[tuple[int, str], ...]

    def __init__(
        self,
        values: Mapping[str, Resolved],
        layout: CacheLayout,
        ledger: Ledger,
        notes: Sequence[tuple[int, str]] = (),
    ) -> None:
        object.__setattr__(self, "notes", tuple(notes))
        object.__setattr__(self, "_values", MappingProxyType(dict(values)))
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "ledger", ledger)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_values")[name].value
        except (KeyError, AttributeError):
            raise AttributeError(f"ResolvedConfig has no setting {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a resolved configuration does not change; make a new manager")

    def source(self, name: str) -> str:
        return self._values[name].source

    def rows(self) -> list[tuple[str, Any, str]]:
        """(field, value, source) of every setting, in order of the fields."""
        return [(name, r.value, r.source) for name, r in self._values.items()]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={r.value!r}" for name, r in self._values.items())
        return f"ResolvedConfig({shown})"

    def to_json(self) -> str:
        return json.dumps([{"field": f, "value": v, "source": s} for f, v, s in self.rows()], default=str)
