"""This project's engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.backends.generation import NO_EOS, GenerationSettings, eos_ids, generation_config
from harness.backends.manager import ManagerBackend
from harness.backends.settings import continuous_config
from harness.record import ConfigValue

_GAUGES = frozenset(("kv_blocks_total",))
"""Counters that say how things stand rather than how often something happened: never subtracted."""


class OursBackend(ManagerBackend):
    """``engine.init_continuous_batching``; see :meth:`ManagerBackend` for the arguments."""

    name = "ours"

    def __init__(self, model: Any, manager: Any, eos: frozenset[int]) -> None:
        super().__init__(model, manager, eos)
        self._records_before = 0
        self._counted_before: Mapping[str, float | int | None] = {}

    @classmethod
    def create(cls, model: Any, settings: Mapping[str, Any], generation: GenerationSettings) -> OursBackend:
        """Make its manager, not started.

        Raises:
            ValueError: a setting that ``engine.ContinuousBatchingConfig`` does not have, or a value it refuses.
        """
        import engine

        config = continuous_config(cls.name, engine.ContinuousBatchingConfig, settings, generation)
        manager = engine.init_continuous_batching(
            model,
            generation_config=generation_config(model, generation, no_eos=NO_EOS),
            continuous_batching_config=config,
        )
        return cls(model, manager, eos_ids(model, generation))

    def _mark_start(self) -> None:
        self._records_before = len(self._manager.step_log)
        self._counted_before = dict(self._manager.counters())

    def _cause_of_death(self) -> str | None:
        error = getattr(self._manager, "fatal_error", None)
        return None if error is None else f"{type(error).__name__}: {error}"

    def _new_tokens(self, output: Any, seen: int) -> list[int]:
        tokens: list[int] = output.tokens_since(seen)  # without copying all that came before
        return tokens

    def config(self) -> list[ConfigValue]:
        return [ConfigValue(name, value, source) for name, value, source in self._manager.resolved_config.rows()]

    def steps(self) -> list[dict[str, Any]]:
        """Step log since ``start``, steps counted from 0."""
        rows = [_as_dict(record) for record in list(self._manager.step_log)[self._records_before :]]
        return [row | {"step": index} for index, row in enumerate(rows)]

    def counters(self) -> dict[str, float | int | None]:
        """Counts since ``start``; gauges as they are; the fewest free blocks from the step log since ``start``."""
        counts: dict[str, float | int | None] = {}
        for name, value in self._manager.counters().items():
            before = self._counted_before.get(name)
            subtract = name not in _GAUGES and value is not None and before is not None
            counts[name] = value - before if subtract else value
        free = [row["free_blocks"] for row in self.steps() if row.get("free_blocks") is not None]
        counts["kv_blocks_free_min"] = min(free) if free else None
        return counts

    def memory(self) -> dict[str, int | None]:
        return dict(self._manager.ledger())


def _as_dict(record: Any) -> dict[str, Any]:
    return dict(record) if isinstance(record, Mapping) else dataclasses.asdict(record)
