"""Token selection: per-request parameters, a counter-based random stream and the sampler."""

from engine.sampling.params import SamplingParams
from engine.sampling.sampler import RandomRows, sample

__all__ = ["RandomRows", "SamplingParams", "sample"]
