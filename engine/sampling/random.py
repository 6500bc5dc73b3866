"""A counter-based random stream: noise that depends on (seed, token index, vocabulary id) and on nothing else.

Batch mates, chunking, preemption and the size of a graph therefore cannot change what a seeded request samples. Seed
and index make a key here; key and vocabulary id make the noise (`engine.kernels.gumbel`).
"""

from __future__ import annotations

import numpy as np

from engine.kernels.mixing import GOLDEN, MASK, mix


def _mix_int(x: int) -> int:
    return mix(x & MASK)


def seed_key(seed: int) -> int:
    """What a seed contributes to its stream, in [0, 2**32); 64 bits of it count."""
    return _mix_int(_mix_int((seed & MASK) ^ GOLDEN) ^ ((seed >> 32) & MASK))


def folded(seed: int) -> int:
    """A base seed of any size in 32 bits, itself if it has no more; all of its bits count."""
    word = seed & MASK
    while seed := seed >> 32:
        word = _mix_int(word ^ GOLDEN) ^ (seed & MASK)
    return word


def stream_key(seed: int, index: int) -> int:
    """Key in [0, 2**31) of the noise for the ``index``-th generated token of a request with ``seed``."""
    return _mix_int(seed_key(seed) ^ _mix_int(index + 1)) & 0x7FFFFFFF


def stream_keys(seed_keys: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """`stream_key` of many rows, int64, from their `seed_key`."""
    return (mix(seed_keys ^ mix(indices + 1)) & 0x7FFFFFFF).astype(np.int64)


def child_seed(seed: int, child: int) -> int:
    """Seed in [0, 2**64) of the ``child``-th further sequence of a request with ``seed``."""
    low = _mix_int((seed & MASK) ^ _mix_int(2 * child + 1))
    high = _mix_int(((seed >> 32) & MASK) ^ _mix_int(2 * child + 2))
    return high << 32 | low
