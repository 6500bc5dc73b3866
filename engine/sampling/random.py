"""A counter-based random stream: noise that depends on (seed, token index, vocabulary id) and on nothing else.

Batch mates, chunking, preemption and the size of a graph therefore cannot change what a seeded request samples. The
mixer is a 32-bit integer finalizer (xor-shift-multiply, "lowbias32", Ellis 2018), evaluated in int64 so that it is
exact and identical on every device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_MASK = 0xFFFFFFFF
_M1, _M2 = 0x7FEB352D, 0x846CA68B
_GOLDEN = 0x9E3779B9


def _mix_int(x: int) -> int:
    x &= _MASK
    x ^= x >> 16
    x = (x * _M1) & _MASK
    x ^= x >> 15
    x = (x * _M2) & _MASK
    return x ^ (x >> 16)


def seed_key(seed: int) -> int:
    """What a seed contributes to its stream, in [0, 2**32); 64 bits of it count."""
    return _mix_int(_mix_int((seed & _MASK) ^ _GOLDEN) ^ ((seed >> 32) & _MASK))


def stream_key(seed: int, index: int) -> int:
    """Key in [0, 2**31) of the noise for the ``index``-th generated token of a request with ``seed``."""
    return _mix_int(seed_key(seed) ^ _mix_int(index + 1)) & 0x7FFFFFFF


def stream_keys(seed_keys: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """`stream_key` of many rows, int64, from their `seed_key`."""
    return (_mix(seed_keys ^ _mix(indices + 1)) & 0x7FFFFFFF).astype(np.int64)


def child_seed(seed: int, child: int) -> int:
    """Seed in [0, 2**64) of the ``child``-th further sequence of a request with ``seed``."""
    low = _mix_int((seed & _MASK) ^ _mix_int(2 * child + 1))
    high = _mix_int(((seed >> 32) & _MASK) ^ _mix_int(2 * child + 2))
    return high << 32 | low


def _mix(x: Any) -> Any:
    """`_mix_int` of each element of an int64 tensor or array in [0, 2**32). The products wrap around, which leaves
    their low 32 bits right; what the shifts bring down is cut off before."""
    x = x ^ (x >> 16)
    x = (x * _M1) & _MASK
    x = x ^ (x >> 15)
    x = (x * _M2) & _MASK
    return x ^ (x >> 16)


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, one row a key.

    Args:
        keys: [rows] int64, from `stream_key`.
        vocab_size: columns.

    Returns:
        [rows, vocab_size] float32; adding it to log probabilities and taking the argmax samples from them.
    """
    ids = torch.arange(vocab_size, device=keys.device, dtype=torch.int64)
    words = _mix(keys[:, None] ^ _mix((ids * _GOLDEN) & _MASK)[None, :])
    # 23 bits and a half: the largest float32 below 1 that is exact, so neither logarithm sees 0.
    uniform = ((words >> 9).to(torch.float32) + 0.5) * (1.0 / (1 << 23))
    return -torch.log(-torch.log(uniform))
