"""Ways to run a model over the paged cache: fused for known families, bridged for any other."""

from engine.models.base import Executor, LayerCaches, TraceableExecutor
from engine.models.bridged import BridgedModel
from engine.models.compiled import CompiledExecutor
from engine.models.families import FAMILIES, why_not_fused
from engine.models.fused import FusedDecoder

__all__ = [
    "FAMILIES",
    "BridgedModel",
    "CompiledExecutor",
    "Executor",
    "FusedDecoder",
    "LayerCaches",
    "TraceableExecutor",
    "why_not_fused",
]
