"""The order of a sweep's runs: randomised blocks in ABBA pairs.

A block holds every arm once, so that what changes slowly (a warming machine, another user) reaches all arms alike and
the arms of one block can be compared pair by pair. The order inside a block is random; the block after it is its
reverse, so that a linear drift cancels within the two::

    block 0   B A C
    block 1   C A B
    block 2   A C B
    block 3   B C A

Source: Box, Hunter and Hunter, Statistics for Experimenters, chapter on randomised blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run stands in the order of its sweep.

    Attributes:
        block: index of the block, from 0; the run's ``repeat``.
        position: index within the block, from 0.
        arm: index of the arm, in the order in which the arms were written.
        replica: 1 for the second run of an arm in the same block (A/A), else 0.
    """

    block: int
    position: int
    arm: int
    replica: int = 0


def arrange(facets: Sequence[Sequence[int]], blocks: int, seed: int) -> list[Place]:
    """The runs of a sweep in order.

    Args:
        facets: arms by index, those that are compared with each other together: they run next to each other. An arm
            that stands twice in its facet runs twice in each block, the second time as replica 1.
        blocks: how often every arm runs. One block cannot be balanced by another: it keeps the order given.
        seed: of the order.

    Raises:
        ValueError: ``blocks`` is below 1.
    """
    if blocks < 1:
        raise ValueError(f"a sweep has at least one block, got {blocks}")
    groups = [_numbered(arms) for arms in facets]
    if blocks == 1:
        return _placed(0, [run for group in groups for run in group])
    rng = random.Random(seed)
    order: list[Place] = []
    shuffled: list[tuple[int, int]] = []
    for block in range(blocks):
        shuffled = shuffled[::-1] if block % 2 else _shuffled(groups, rng)
        order += _placed(block, shuffled)
    return order


def together(order: Sequence[Place], process: Callable[[int], Hashable]) -> list[Place]:
    """``order`` with the runs of one process next to each other, at the place of the first of them in their block.

    Args:
        process: of an arm, by index; arms with the same one share a process in each block, replicas with replicas.
    """
    grouped: dict[Hashable, list[Place]] = {}
    for place in order:
        grouped.setdefault((place.block, place.replica, process(place.arm)), []).append(place)
    blocks: dict[int, list[Place]] = {}
    for members in grouped.values():
        blocks.setdefault(members[0].block, []).extend(members)
    return [replace(place, position=k) for places in blocks.values() for k, place in enumerate(places)]


def _numbered(arms: Sequence[int]) -> list[tuple[int, int]]:
    return [(arm, arms[:at].count(arm)) for at, arm in enumerate(arms)]


def _shuffled(groups: Sequence[Sequence[tuple[int, int]]], rng: random.Random) -> list[tuple[int, int]]:
    return [run for group in rng.sample(list(groups), len(groups)) for run in rng.sample(list(group), len(group))]


def _placed(block: int, runs: Sequence[tuple[int, int]]) -> list[Place]:
    return [Place(block, position, arm, replica) for position, (arm, replica) in enumerate(runs)]
