"""This project's engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import engine
from harness.backends.generation import NO_EOS, GenerationSettings, eos_ids, generation_config
from harness.backends.manager import ManagerBackend
from harness.backends.settings import continuous_config
from harness.record import ConfigValue


class OursBackend(ManagerBackend):
    """``engine.init_continuous_batching``; see :meth:`ManagerBackend` for the arguments."""

    name = "ours"
    queue_full = engine.QueueFull

    @classmethod
    def create(cls, model: Any, settings: Mapping[str, Any], generation: GenerationSettings) -> OursBackend:
        """Make its manager, not started.

        Raises:
            ValueError: a setting that ``engine.ContinuousBatchingConfig`` does not have, or a value it refuses.
        """
        config = cls.configure(settings, generation)
        manager = engine.init_continuous_batching(
            model,
            generation_config=generation_config(model, generation, no_eos=NO_EOS),
            continuous_batching_config=config,
        )
        return cls(model, manager, eos_ids(model, generation))

    @classmethod
    def configure(cls, settings: Mapping[str, Any], generation: GenerationSettings) -> Any:
        """Its config object; raises ValueError as :meth:`create`."""
        return continuous_config(cls.name, engine.ContinuousBatchingConfig, settings, generation)

    def _mark_start(self) -> None:
        self._manager.reset_counters()

    def _cause_of_death(self) -> str | None:
        error = self._manager.fatal_error
        return None if error is None else f"{type(error).__name__}: {error}"

    def _new_tokens(self, output: Any, seen: int) -> list[int]:
        tokens: list[int] = output.tokens_since(seen)  # without copying all that came before
        return tokens

    def _facts(self, output: Any) -> dict[str, int | str | None]:
        entered = [(status.name.lower(), round(at * 1e9)) for status, at in output.status_times]
        at = dict(entered)
        return super()._facts(output) | {
            "statuses": " > ".join(at),
            "t_pending_ns": at["pending"],
            "t_decoding_ns": at.get("decoding"),
            "t_over_ns": entered[-1][1],
            "preemptions": output.preemptions,
            "prefill_steps": output.prefill_steps,
            "kv_blocks": output.kv_blocks,
        }

    def config(self) -> list[ConfigValue]:
        resolved = self._manager.resolved_config
        rows = (*resolved.rows(), *self._manager.measured_settings())
        # The model's part of the cache: what a simulation of this engine needs and no setting says.
        layout, why = resolved.layout, "derived: the model's attention layers"
        model = {
            "windows": layout.windows,
            "num_kv_heads": layout.num_kv_heads,
            "head_dim": layout.head_dim,
            "itemsize": layout.itemsize,
        }
        return [
            *(ConfigValue(name, value, source) for name, value, source in rows),
            *(ConfigValue(f"cache.{name}", value, why) for name, value in model.items()),
            ConfigValue("attn_implementation_in_use", resolved.attention_backend, "derived: attention_backend"),
        ]

    def steps(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(record) for record in self._manager.step_log]

    def counters(self) -> dict[str, float | int | None]:
        return dict(self._manager.counters())

    def memory(self) -> dict[str, int | None]:
        return dict(self._manager.ledger())
