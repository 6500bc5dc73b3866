"""Blocks are in exactly one state, and the prefix index is exact."""

from __future__ import annotations

import pytest

from engine.cache import TRASH_BLOCK, BlockPool


def test_blocks_start_free_and_the_trash_block_is_never_given() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(5)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert TRASH_BLOCK not in blocks
    assert pool.num_available == 0
    pool.check(blocks)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)


def test_released_blocks_are_free_unless_findable() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.register(a, 0, (1, 2))
    pool.release([a, b])
    assert (pool.num_cached, pool.num_available) == (1, 3)
    pool.check()


def test_shared_block_is_released_by_its_last_holder() -> None:
    pool = BlockPool(2)
    (a,) = pool.allocate(1)
    pool.register(a, 0, (1,))
    pool.acquire(a)
    pool.release([a])
    assert pool.num_available == 1
    pool.check([a])
    pool.release([a])
    assert pool.num_available == 2
    pool.check()


def test_acquire_takes_a_cached_block_out_of_the_cache() -> None:
    pool = BlockPool(1)
    (a,) = pool.allocate(1)
    pool.register(a, 0, (1,))
    pool.release([a])
    pool.acquire(a)
    assert (pool.num_cached, pool.num_available) == (0, 0)
    pool.check([a])


def test_free_blocks_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    for block, token in ((a, 1), (b, 2)):
        pool.register(block, 0, (token,))
    pool.release([a])
    pool.release([b])
    pool.release([c])
    assert pool.allocate(1) == [c]  # free
    assert pool.evictions == 0
    assert pool.allocate(2) == [a, b]  # a was let go first
    assert pool.evictions == 2
    assert pool.find(0, (1,)) is None


def test_later_pages_of_a_sequence_are_evicted_before_earlier_ones() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    parent = 0
    for block in table:
        parent = pool.register(block, parent, (7,))
    pool.release(table)
    assert pool.allocate(1) == [table[2]]
    assert pool.allocate(1) == [table[1]]


def test_the_same_tokens_after_another_parent_are_another_content() -> None:
    pool = BlockPool(4)
    a, b, c, d = pool.allocate(4)
    first, second = pool.register(a, 0, (1,)), pool.register(b, 0, (2,))
    child = pool.register(c, first, (9,))
    assert pool.find(first, (9,)) == (c, child)
    assert pool.find(second, (9,)) is None
    assert pool.register(d, first, (9,)) == child, "the block that is known already stays the findable one"
    assert pool.find(first, (9,)) == (c, child)


def test_children_of_an_evicted_block_are_not_found_even_if_its_content_returns() -> None:
    pool = BlockPool(3)
    a, b, _ = pool.allocate(3)
    old = pool.register(a, 0, (1,))
    pool.register(b, old, (2,))
    pool.release([a])
    (again,) = pool.allocate(1)  # evicts a
    new = pool.register(again, 0, (1,))
    assert new != old
    assert pool.find(new, (2,)) is None


def test_forgetting_everything_frees_cached_blocks_and_keeps_held_ones() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.register(a, 0, (1,))
    pool.register(b, 0, (2,))
    pool.release([a])
    pool.forget_all()
    assert pool.find(0, (1,)) is None
    assert pool.find(0, (2,)) is None
    assert pool.num_available == 1
    pool.check([b])
    pool.release([b])
    assert pool.num_cached == 0
    pool.check()


@pytest.mark.parametrize("held", [[], [1, 1], [2]])
def test_check_finds_blocks_that_are_not_held_as_often_as_referenced(held: list[int]) -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [1]
    with pytest.raises(RuntimeError, match="not referenced as often"):
        pool.check(held)


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(RuntimeError, match="!= 2"):
        pool.check()
