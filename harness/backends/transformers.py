"""Continuous batching as installed with transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.backends.generation import NO_EOS, GenerationSettings, eos_ids, generation_config
from harness.backends.manager import ManagerBackend
from harness.backends.settings import continuous_config
from harness.record import ConfigValue


class TransformersBackend(ManagerBackend):
    """``model.init_continuous_batching``; see :meth:`ManagerBackend` for ``model``, ``manager`` and ``eos``.

    Args:
        settings: what the user set, for the sources of :meth:`config`.
    """

    name = "transformers"

    def __init__(self, model: Any, manager: Any, eos: frozenset[int], settings: Mapping[str, Any]) -> None:
        super().__init__(model, manager, eos)
        self._settings = settings
        self._first_step = 0

    @classmethod
    def create(cls, model: Any, settings: Mapping[str, Any], generation: GenerationSettings) -> TransformersBackend:
        """Make its manager, not started.

        Raises:
            ValueError: a setting that its ContinuousBatchingConfig does not have, or a value it refuses.
        """
        config = cls.configure(settings, generation)
        manager = model.init_continuous_batching(
            generation_config=generation_config(model, generation, no_eos=NO_EOS), continuous_batching_config=config
        )
        return cls(model, manager, eos_ids(model, generation), settings)

    @classmethod
    def configure(cls, settings: Mapping[str, Any], generation: GenerationSettings) -> Any:
        """Its config object; raises ValueError as :meth:`create`."""
        from transformers.generation import ContinuousBatchingConfig

        return continuous_config(cls.name, ContinuousBatchingConfig, settings, generation)

    def _prepare(self) -> None:
        self._manager.warmup()

    def _mark_start(self) -> None:
        self._first_step = self._steps_so_far()

    def _steps_so_far(self) -> int:
        # set by its loop's thread when that begins
        return int(getattr(self._manager, "current_batch", 0))

    def _cause_of_death(self) -> str | None:
        error = self._manager.background_thread_status.fatal_error
        return None if error is None else f"{type(error).__name__}: {error}"

    def config(self) -> list[ConfigValue]:
        """Its settings as resolved, read back from the manager.

        It keeps no sources: what the user did not give is "default" if it is the class's default, else "derived".
        """
        import transformers
        from transformers.generation import ContinuousBatchingConfig

        resolved, defaults = self._manager.continuous_batching_config, ContinuousBatchingConfig()
        rows = []
        for f in dataclasses.fields(resolved):
            value = getattr(resolved, f.name)
            if f.name in self._settings:
                source = "user"
            elif value == getattr(defaults, f.name):
                source = "default"
            else:
                source = f"derived: by transformers {transformers.__version__}"
            rows.append(ConfigValue(f.name, _plain(value), source))
        in_use = self._model.config._attn_implementation
        rows.append(ConfigValue("attn_implementation_in_use", in_use, "derived: model, device, auto_switch_to_flash"))
        if self._manager.batch_processor is not None:
            sharing = self._manager.batch_processor.cache.use_prefix_sharing
            rows.append(ConfigValue("prefix_sharing_in_use", sharing, "derived: allow_block_sharing, attention types"))
        return rows

    def steps(self) -> list[dict[str, Any]]:
        """None: it keeps no step log."""
        return []

    def counters(self) -> dict[str, float | int | None]:
        counts: dict[str, float | int | None] = {"steps": self._steps_so_far() - self._first_step}
        if self._manager.batch_processor is not None:
            counts["kv_blocks_total"] = int(self._manager.batch_processor.cache.num_blocks)
        return counts

    def memory(self) -> dict[str, int | None]:
        weights = sum(p.numel() * p.element_size() for p in self._model.parameters())
        ledger: dict[str, int | None] = {"weights_bytes": weights}
        if self._manager.batch_processor is not None:
            cache = self._manager.batch_processor.cache
            ledger["kv_cache_bytes"] = int(cache.num_sectors * cache.bytes_per_sector)
        return ledger


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else value
