"""Every setting beside every other: greedy tokens are those of ``model.generate`` on each prompt alone, in fp32.

A covering selection: each two values of two settings meet in at least one case. ``ENGINE_SOAK=1`` runs the whole
product instead. The engine's own kernels have theirs in ``interpreted/test_matrix.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

from engine.bench.tiny_models import tiny_model

# Gemma 2's soft-cap is not in torch's kernel, so transformers offers it with eager attention only.
ARMS = (
    ("tiny-llama", "eager"),
    ("tiny-llama", "sdpa"),
    ("tiny-mistral", "eager"),
    ("tiny-mistral", "sdpa"),
    ("tiny-gemma2", "eager"),
    ("tiny-gemma3", "eager"),
    ("tiny-gemma3", "sdpa"),
)
SETTINGS: Mapping[str, Sequence[Any]] = {
    "arm": ARMS,
    "page_size": (4, 16, 64, 256),
    "memory": ("ample", "recompute", "offload"),
    "chunks": (False, True),
    "scheduler": ("fifo", "prefill_first"),
    "sharing": (True, False),
    "ahead": (False, True),
    "fused": (None, False),
}


def pairs_of(case: Sequence[Any]) -> set[tuple[tuple[int, Any], ...]]:
    return set(combinations(enumerate(case), 2))


def covering(values: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Few elements of the product in which each pair of values occurs: each time the one with most pairs that are
    missing."""
    product_of = [(case, pairs_of(case)) for case in product(*values)]
    missing = set().union(*(pairs for _, pairs in product_of))
    chosen = []
    while missing:
        case, pairs = max(product_of, key=lambda each: len(each[1] & missing))
        chosen.append(case)
        missing -= pairs
    return chosen


VALUES = tuple(SETTINGS.values())
CASES = list(product(*VALUES)) if os.environ.get("ENGINE_SOAK") else covering(VALUES)


@cache
def model_of(name: str, attention: str) -> Any:
    """Kept: the reference is remembered by model."""
    return tiny_model(name, attention=attention)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (*case[0], *case[1:]))))
def test_tokens_equal_generate(case: tuple[Any, ...], check_case: Callable[..., Any]) -> None:
    settings = dict(zip(SETTINGS, case, strict=True))
    name, attention = settings.pop("arm")
    check_case(model_of(name, attention), attention, **settings)


def test_each_two_values_meet() -> None:
    together = set().union(*map(pairs_of, CASES))
    for (i, some), (j, others) in combinations(enumerate(VALUES), 2):
        assert all(((i, a), (j, b)) in together for a, b in product(some, others))
    assert len(CASES) < 60 or os.environ.get("ENGINE_SOAK")
