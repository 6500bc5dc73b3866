"""The steps of resolution and their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.compilation import compile_config
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.model_shape import ModelShape
from engine.resolution import execution, memory
from engine.resolution.estimates import available_ram, free_memory
from engine.resolution.resolution import Resolution
from engine.resolution.resolved import ResolvedConfig


def resolve(
    config: ContinuousBatchingConfig,
    shape: ModelShape,
    hints: WorkloadHints,
    attn_implementation: str | None,
    memory_probe: Callable[[torch.device], int] = free_memory,
    ram_probe: Callable[[], int | None] = available_ram,
    compile_fallback: Any = None,
) -> ResolvedConfig:
    """Decide every setting.

    Args:
        config: the user's settings, unchanged by this.
        shape: the model's sizes.
        hints: what is known of the requests.
        attn_implementation: what the model was loaded with.
        memory_probe: free bytes of a device; an argument so that tests can state it.
        ram_probe: available bytes of host memory, None = unknown; asked only if blocks may be offloaded.
        compile_fallback: ``compile_config`` of the GenerationConfig, for paths that nothing else decides.

    Raises:
        ValueError: settings that cannot be met together or on this device, with the field, its value and what to do.
    """
    fallback = compile_config("compile_config of the generation config", compile_fallback)
    r = Resolution(config, shape, hints, attn_implementation, memory_probe(shape.device), ram_probe, fallback)
    for step in (
        execution.scheduler,
        execution.attention,
        execution.forward,
        execution.decode_path,
        execution.compilation,
        execution.graphs_and_async,
        execution.parallel,
        execution.sharing,
        memory.memory_percent,
        memory.packed_weights,
        memory.requests_before_memory,
        memory.batch_tokens,
        memory.num_blocks,
        memory.fit_requests,
        execution.padding,
        memory.offload,
    ):
        step(r)
    return ResolvedConfig(r.values, r.layout, memory.ledger(r), r.notes)
