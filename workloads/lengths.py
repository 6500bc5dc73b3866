"""Length distributions: how many tokens prompts and outputs have. All lengths are whole tokens, at least 1."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workloads.length_rows import LengthRows, read_lengths
from workloads.names import unknown_name


class Lengths(Protocol):
    """A distribution of token counts."""

    def sample(self, n: int, rng: random.Random) -> list[int]:
        """``n`` independent lengths, each at least 1."""


LENGTHS: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: make a distribution available as ``kind: name``."""

    def add(cls: type) -> type:
        LENGTHS[name] = cls
        return cls

    return add


def length_class(kind: str, where: str) -> type:
    """The distribution registered as ``kind``; ValueError naming the setting ``where`` if there is none."""
    if kind not in LENGTHS:
        raise unknown_name(f"{where}.kind", kind, LENGTHS)
    return LENGTHS[kind]


@register("fixed")
@dataclass(frozen=True)
class Fixed:
    """Always ``value``."""

    value: int

    def __post_init__(self) -> None:
        if self.value < 1:
            raise ValueError(f"length value is {self.value}: give at least 1 token")

    def sample(self, n: int, rng: random.Random) -> list[int]:
        return [self.value] * n


@register("uniform")
@dataclass(frozen=True)
class Uniform:
    """Every whole number from ``low`` to ``high``, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high)

    def sample(self, n: int, rng: random.Random) -> list[int]:
        return [rng.randint(self.low, self.high) for _ in range(n)]


@register("loguniform")
@dataclass(frozen=True)
class LogUniform:
    """exp of a uniform number between ln(low) and ln(high), rounded down: many short, few long."""

    low: int
    high: int

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high)

    def sample(self, n: int, rng: random.Random) -> list[int]:
        lo, hi = math.log(self.low), math.log(self.high)
        # exp(log(low)) may come out just under low
        return [max(self.low, int(math.exp(rng.uniform(lo, hi)))) for _ in range(n)]


@register("lognormal")
@dataclass(frozen=True)
class LogNormal:
    """exp of a normal number with mean ln(median) and deviation ``sigma``, rounded, clipped to [low, high]."""

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high)
        if not (self.median > 0 and math.isfinite(self.median) and self.sigma >= 0 and math.isfinite(self.sigma)):
            raise ValueError(f"lognormal needs median > 0 and sigma >= 0; got median {self.median}, sigma {self.sigma}")

    def sample(self, n: int, rng: random.Random) -> list[int]:
        mu = math.log(self.median)
        # clip before rounding: a large sigma overflows exp only in the exponent's upper tail
        top = math.log(self.high)
        return [max(self.low, round(math.exp(min(top, rng.normalvariate(mu, self.sigma))))) for _ in range(n)]


@register("empirical")
@dataclass(frozen=True)
class Empirical:
    """One of ``values``, with probability proportional to its weight (equal if no weights are given)."""

    values: Sequence[int]
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 1:
            raise ValueError(f"empirical lengths need at least one value and none under 1; got {list(self.values)[:8]}")
        if self.weights is not None and (
            len(self.weights) != len(self.values) or min(self.weights) < 0 or sum(self.weights) <= 0
        ):
            raise ValueError(
                f"empirical weights must be as many as values ({len(self.values)}), none negative, sum above 0; "
                f"got {list(self.weights)[:8]}"
            )

    def sample(self, n: int, rng: random.Random) -> list[int]:
        return rng.choices(list(self.values), weights=self.weights, k=n)


@register("table")
@dataclass(frozen=True)
class Table:
    """Lengths of one ``column`` of the csv ``path``, as often as they stand there or as ``weight_column`` says."""

    path: str
    column: str
    weight_column: str | None = None

    def __post_init__(self) -> None:
        _ = self.rows  # what is wrong with the table is found here

    @functools.cached_property
    def rows(self) -> LengthRows:
        """The table as it was read."""
        return read_lengths(self.path, (self.column,), self.weight_column)

    def sample(self, n: int, rng: random.Random) -> list[int]:
        return [length for (length,) in rng.choices(self.rows.lengths, cum_weights=self.rows.weights, k=n)]


def table_facts(lengths: Mapping[str, Lengths]) -> dict[str, Any]:
    """For ``Workload.spec``: hashes of the tables among ``lengths``, by name, and ``notes`` of what they leave out."""
    tables = {name: each.rows for name, each in lengths.items() if isinstance(each, Table)}
    notes = dict.fromkeys(note for rows in tables.values() for note in rows.notes)
    return {f"{name}_table_sha256": rows.sha256 for name, rows in tables.items()} | {"notes": list(notes)}


def check_bounds(low: int, high: int) -> None:
    """ValueError unless 1 <= low <= high."""
    if not 1 <= low <= high:
        raise ValueError(f"length bounds are low {low}, high {high}: give 1 <= low <= high")
