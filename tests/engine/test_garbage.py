"""The garbage collector is held back while a loop runs, and is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from engine import ContinuousBatchingConfig, garbage, init_continuous_batching


@pytest.fixture
def threshold() -> Iterator[int]:
    before = gc.get_threshold()
    gc.set_threshold(701, *before[1:])
    yield 701
    gc.set_threshold(*before)


def test_two_loops_hold_it_back_until_the_last_has_ended(threshold: int) -> None:
    garbage.set_aside()
    garbage.set_aside()
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    assert gc.get_threshold()[0] == garbage.ALLOCATIONS
    garbage.give_back()
    assert gc.get_freeze_count() > 1000
    garbage.give_back()
    assert gc.get_freeze_count() < 1000
    assert gc.get_threshold()[0] == threshold


@pytest.mark.parametrize("own", [0, 123_456])
def test_a_threshold_that_is_off_or_larger_stays(threshold: int, own: int) -> None:
    gc.set_threshold(own)
    garbage.set_aside()
    assert gc.get_threshold()[0] == own
    garbage.give_back()
    assert gc.get_threshold()[0] == own


def test_a_manager_holds_it_back_from_its_start_to_its_end(threshold: int, m1: Any) -> None:
    manager = init_continuous_batching(m1, None, ContinuousBatchingConfig(num_blocks=8, page_size=4))
    assert gc.get_threshold()[0] == threshold
    manager.start()
    manager.add_request([1, 2, 3], max_new_tokens=2)
    assert manager.get_result(timeout=20) is not None
    assert gc.get_threshold()[0] == garbage.ALLOCATIONS
    manager.stop(keep_for_next_session=True)
    assert manager.warmed_up
    assert gc.get_threshold()[0] == threshold
    manager.destroy()
    assert gc.get_threshold()[0] == threshold, "given back once"
