"""How one request chooses its tokens, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request.

    Attributes:
        temperature: 0 (or under 1e-5, where dividing would overflow) means greedy: the most likely token. Otherwise
            logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
        seed: key of the request's own random stream. The same seed gives the same tokens whatever the batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0 (0 = greedy), got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1 = off), got {self.top_p!r}")
        for name, value in (("top_k", self.top_k), ("seed", self.seed)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be >= -1 (0 or -1 = off), got {self.top_k!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def override(self, **values: Any) -> SamplingParams:
        """A copy with the given fields; ValueError names a field that does not exist."""
        unknown = sorted(set(values) - set(self.__slots__))
        if unknown:
            known = ", ".join(self.__slots__)
            raise ValueError(f"unknown sampling parameter {unknown[0]!r}; a request may set {known}")
        return replace(self, **values)
