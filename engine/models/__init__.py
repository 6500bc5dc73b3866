"""Ways to run a model over the paged cache: fused for known families, bridged for any other."""

from engine.models.base import Executor, LayerCaches
from engine.models.bridged import BridgedModel
from engine.models.families import FAMILIES, why_not_fused
from engine.models.fused import FusedDecoder

__all__ = ["FAMILIES", "BridgedModel", "Executor", "FusedDecoder", "LayerCaches", "why_not_fused"]
