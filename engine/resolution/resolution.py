"""The settings while they are being decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.model_shape import ModelShape
from engine.resolution.resolved import Resolved


class Resolution:
    """The values settled so far, and what they are settled from.

    Attributes:
        config, shape, hints: as the user gave them, the model's sizes, and what is known of the requests.
        attn: the attention implementation that the model was loaded with.
        free: bytes of device memory that nobody uses.
        ram_probe: available bytes of host memory, None = unknown.
        compile_fallback: torch.compile's settings for paths that nothing else decides.
        values: by setting, its value and where it comes from; None = still open.
        notes: (logging level, sentence) of choices that a user may not expect.
        layout: shape of the cache.
    """

    def __init__(
        self,
        config: ContinuousBatchingConfig,
        shape: ModelShape,
        hints: WorkloadHints,
        attn: str | None,
        free: int,
        ram_probe: Callable[[], int | None],
        compile_fallback: Any,
    ) -> None:
        self.config, self.shape, self.hints, self.attn, self.free = config, shape, hints, attn, free
        self.ram_probe = ram_probe
        self.compile_fallback = compile_fallback
        defaults = ContinuousBatchingConfig()
        self.values: dict[str, Resolved] = {}
        self.notes: list[tuple[int, str]] = []
        for f in fields(ContinuousBatchingConfig):
            value = getattr(config, f.name)
            self.values[f.name] = Resolved(value, "default" if value == getattr(defaults, f.name) else "user")
        self.layout = shape.cache_layout(config.page_size)

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def source(self, name: str) -> str:
        return self.values[name].source

    def set(self, name: str, value: Any, why: str) -> None:
        self.values[name] = Resolved(value, why)

    def note(self, level: int, sentence: str) -> None:
        self.notes.append((level, sentence))

    def is_open(self, name: str) -> bool:
        return self[name] is None
