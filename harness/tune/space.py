"""Which settings are varied, and what an engine that ran out of memory does to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.simulate import EngineSetup


@dataclass(frozen=True)
class Variable:
    """A setting and the values it may take, the baseline's among them."""

    name: str
    values: tuple[Any, ...]


def variables(setup: EngineSetup) -> tuple[Variable, ...]:
    """What is tuned, around a measured engine: tokens and requests of a step, order of work, safety margin."""
    tokens, requests = setup.max_batch_tokens, setup.max_requests_per_batch
    sizes = sorted({n for n in (tokens // 8, tokens // 4, tokens // 2, tokens, tokens * 2) if n >= 16})
    places = sorted({n for n in (requests // 4, requests // 2, requests) if n >= 1})
    margins = sorted({0.0, 0.05, 0.15, 0.3, setup.safety_margin})
    return (
        Variable("max_batch_tokens", tuple(sizes)),
        Variable("max_requests_per_batch", tuple(places)),
        Variable("scheduler_type", ("fifo", "prefill_first")),
        Variable("safety_margin", tuple(margins)),
    )


def baseline(setup: EngineSetup) -> dict[str, Any]:
    """The measured engine's values of what is tuned."""
    return {v.name: getattr(setup, v.name) for v in variables(setup)}


def changes(settings: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that differ from the baseline, in the order in which they were changed."""
    return {name: value for name, value in settings.items() if value != base[name]}


def memory(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Sorts settings by the memory that a step needs beside the cache: activations by its tokens, then logits and
    captured steps by its requests."""
    return settings["max_batch_tokens"], settings["max_requests_per_batch"]


@dataclass(frozen=True)
class Retreat:
    """One step back after memory ran out: which variable returned to the baseline, and what is to be tried now."""

    variable: str
    given_up: Any
    settings: dict[str, Any]


def retreat(settings: Mapping[str, Any], base: Mapping[str, Any], order: Sequence[str]) -> Retreat | None:
    """The variable that was changed last goes back to the baseline; None if nothing is changed any more.

    One variable a time: each remedy is a run of its own.

    Args:
        order: names in the order in which they were changed, the last one last.
    """
    for name in reversed(order):
        if settings[name] != base[name]:
            return Retreat(name, settings[name], {**settings, name: base[name]})
    return None
