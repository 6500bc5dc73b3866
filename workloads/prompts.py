"""Prompts of random token ids: exact lengths without a tokenizer, distinct unless sharing is asked for."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from workloads.streams import stream


@dataclass(frozen=True)
class SharedPrefix:
    """Part of the requests begin with the prefix of their group.

    Attributes:
        fraction: share of requests that belong to a group, 0 to 1.
        tokens: length of each group's prefix, counted inside the prompt length.
        groups: number of different prefixes.
    """

    fraction: float
    tokens: int
    groups: int

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"workload.prefix.fraction is {self.fraction}: give 0 to 1")
        if self.fraction > 0 and (self.tokens < 1 or self.groups < 1):
            raise ValueError(
                f"workload.prefix.fraction is {self.fraction} but tokens {self.tokens}, groups {self.groups}: "
                "give both at least 1, or fraction=0"
            )


@dataclass(frozen=True)
class Prompt:
    """Token ids and which part of them a group shares (fields as in ``ScheduledRequest``)."""

    ids: tuple[int, ...]
    prefix_group: int | None = None
    prefix_tokens: int = 0


def allowed_ids(vocab_size: int, special_ids: Collection[int]) -> list[int]:
    """Ids a random prompt may hold: all below ``vocab_size`` but the special ones."""
    special = set(special_ids)
    ids = [i for i in range(vocab_size) if i not in special]
    if not ids:
        raise ValueError(f"no token id is left: vocabulary of {vocab_size} with {len(special)} special ids")
    return ids


def random_prompts(
    lengths: Sequence[int], ids: Sequence[int], seed: int, sharing: SharedPrefix | None = None
) -> list[Prompt]:
    """One prompt of exactly each length, ids drawn from ``ids``.

    A prompt of a group keeps at least one id of its own, so one no longer than the prefix shares its length - 1.
    Prefixes, membership and own ids come from separate streams of ``seed``.
    """
    group_of: dict[int, int] = {}
    prefixes: list[tuple[int, ...]] = []
    if sharing is not None and sharing.fraction > 0:
        members = stream(seed, "prefix_members").sample(range(len(lengths)), round(sharing.fraction * len(lengths)))
        group_of = {request: k % sharing.groups for k, request in enumerate(sorted(members))}
        prefix_rng = stream(seed, "prefix_ids")
        prefixes = [draw(prefix_rng, ids, sharing.tokens) for _ in range(sharing.groups)]
    rng = stream(seed, "prompt_ids")
    prompts = []
    for request, length in enumerate(lengths):
        group = group_of.get(request)
        shared = () if group is None else prefixes[group][: length - 1]
        own = draw(rng, ids, length - len(shared))
        prompts.append(Prompt(shared + own, group if shared else None, len(shared)))
    return prompts


def draw(rng: random.Random, ids: Sequence[int], length: int) -> tuple[int, ...]:
    """``length`` ids drawn with repetition from ``ids``."""
    return tuple(rng.choices(ids, k=length))
