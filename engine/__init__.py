"""A continuous-batching engine for transformers models.

`generate_batch` for a list of prompts, `continuous_batching_context_manager` for serving; `attach(model)` makes code
written for transformers' continuous batching run on it unchanged.
"""

from engine.api import (
    attach,
    continuous_batching_context_manager,
    destroy_cached_continuous_batching_manager,
    detach,
    generate_batch,
    init_continuous_batching,
)
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.intake import QueueFull
from engine.manager import ContinuousBatchingManager
from engine.requests import FinishReason, GenerationOutput, RequestStatus

__all__ = [
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "FinishReason",
    "GenerationOutput",
    "QueueFull",
    "RequestStatus",
    "WorkloadHints",
    "attach",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
    "detach",
    "generate_batch",
    "init_continuous_batching",
]
