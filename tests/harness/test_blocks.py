"""The order of a sweep's runs."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.blocks import Place, arrange, together


def test_every_block_holds_every_arm_once_and_the_next_is_its_reverse():
    order = arrange([[0, 1, 2, 3]], blocks=6, seed=0)
    blocks = [[place.arm for place in order if place.block == b] for b in range(6)]
    assert [len(order), len(blocks)] == [24, 6]
    assert all(sorted(block) == [0, 1, 2, 3] for block in blocks)
    assert all(blocks[b + 1] == blocks[b][::-1] for b in (0, 2, 4))
    assert len({tuple(b) for b in blocks}) > 2  # the pairs have orders of their own
    assert [place.position for place in order] == [0, 1, 2, 3] * 6
    # Of two blocks, every arm has the same mean position: a linear drift cancels.
    means = Counter()
    for place in order[:8]:
        means[place.arm] += place.position
    assert set(means.values()) == {3}


def test_two_arms_run_as_abba():
    arms = [place.arm for place in arrange([[0, 1]], blocks=2, seed=3)]
    assert arms in ([0, 1, 1, 0], [1, 0, 0, 1])


def test_the_seed_decides_the_order():
    assert arrange([[0, 1, 2, 3]], 4, seed=1) == arrange([[0, 1, 2, 3]], 4, seed=1)
    assert arrange([[0, 1, 2, 3]], 4, seed=1) != arrange([[0, 1, 2, 3]], 4, seed=2)
    first = Counter(arrange([[0, 1]], 2, seed)[0].arm for seed in range(200))
    assert 60 < first[0] < 140


def test_arms_of_a_facet_stay_together():
    order = [place.arm for place in arrange([[0, 1, 2], [3, 4, 5]], blocks=4, seed=0)]
    for block in (order[i : i + 6] for i in range(0, 24, 6)):
        assert {frozenset(block[:3]), frozenset(block[3:])} == {frozenset((0, 1, 2)), frozenset((3, 4, 5))}


def test_a_repeated_arm_is_a_replica():
    order = arrange([[0, 1, 0]], blocks=2, seed=0)
    assert Counter((place.arm, place.replica) for place in order) == {(0, 0): 2, (0, 1): 2, (1, 0): 2}


def test_one_block_keeps_its_order():
    assert arrange([[2, 0], [1]], 1, seed=9) == [Place(0, 0, 2), Place(0, 1, 0), Place(0, 2, 1)]
    with pytest.raises(ValueError, match="at least one block, got 0"):
        arrange([[0]], 0, seed=0)


def test_runs_that_share_a_process_stand_together_in_their_block():
    """Two facets of two arms, 0 and 2 on one engine, 1 and 3 on another; arm 0 a second time as A/A."""
    order = together(arrange([[0, 1, 0], [2, 3]], blocks=2, seed=1), lambda arm: arm % 2)
    for block in (0, 1):
        own = [p for p in order if p.block == block]
        assert [p.position for p in own] == list(range(5))
        engines = [(p.arm % 2, p.replica) for p in own]
        assert len([k for k in range(5) if k == 0 or engines[k] != engines[k - 1]]) == 3
        assert sorted((p.arm, p.replica) for p in own) == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
