"""Independent random streams, one a purpose, from one seed.

Separate streams give common random numbers: changing the arrival rate leaves prompts and lengths as they were.
"""

from __future__ import annotations

import random


def stream(seed: int, purpose: str) -> random.Random:
    """The generator of ``purpose`` under ``seed``; the same on every platform and Python version in use."""
    return random.Random(f"{seed}:{purpose}")
