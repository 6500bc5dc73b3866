"""Token selection: per-request parameters, logits processors, a counter-based random stream and the sampler."""

from engine.sampling.logprobs import Choice
from engine.sampling.params import SamplingParams
from engine.sampling.random import child_seed
from engine.sampling.sampler import Sampler

__all__ = ["Choice", "Sampler", "SamplingParams", "child_seed"]
