"""Packed inputs of a step: what each row reads and writes, and where padding goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.cache import CacheLayout
from engine.requests import Request
from engine.runner.batch import BatchState, StepShape
from engine.scheduler import IN_FLIGHT, RunningSlots, ScheduledRow, StepRows

Make = Callable[..., Request]


def row(request: Request, slot: int, table: list[int], start: int, count: int, samples: bool = True) -> ScheduledRow:
    if request.slot < 0:
        request.tables = (table,)
        run(request, slot)
    return ScheduledRow(request, start, count, samples)


def run(request: Request, slot: int) -> None:
    """Let it run in a slot, as if it alone did."""
    slots = RunningSlots(slot + 1)
    slots._free = [slot]
    slots._stays = next(STAYS)
    slots.occupy(request)


STAYS = itertools.count()


def filled(state: BatchState, rows: list[ScheduledRow], shape: StepShape) -> dict[str, np.ndarray]:
    views = shape.carve(np.full(shape.size, -99, dtype=np.int32))
    state.fill(shape, views, StepRows.of(rows))
    assert all((view != -99).all() for view in views.values()), "every place of the buffer is written"
    return views


def follow(state: BatchState, rows: list[ScheduledRow]) -> int:
    return state.follow(StepRows.of(rows))


@pytest.mark.parametrize("tokens", [5, 6])
def test_sections_fill_the_buffer_without_gaps(tokens: int) -> None:
    """Those of int64 first, so that each begins at a multiple of 8 bytes; a tensor is carved as an array is."""
    shape = StepShape(decodes=2, prefills=1, prefill_tokens=tokens, samples=2, width=4, groups=2)
    buffer = np.arange(shape.size, dtype=np.int32)
    views = shape.carve(buffer)
    assert np.array_equal(np.concatenate([v.ravel().view(np.int32) for v in views.values()]), buffer)
    assert views["tables"].shape == (2, 3, 4)
    assert {name for name, view in views.items() if view.dtype == np.int64} == {
        "kv_slots", "slots", "sample_index", "sample_slots"
    }  # fmt: skip
    for name, tensor in shape.carve(torch.from_numpy(buffer)).items():
        assert np.array_equal(tensor.numpy(), views[name])


def test_padding_rows_touch_the_trash_block_only(make_request: Make) -> None:
    """B24: 3 real and 5 padded decode rows. Padding writes into block 0, reads one key of it, and its samples go to a
    slot that no request has."""
    layout = CacheLayout.build([None], 4, 2, 8, 4)
    state = BatchState(layout, max_requests=6)
    last_block = 9  # the pool's last block is in use
    rows = [
        row(make_request(range(5)), 0, [3, last_block], 4, 1),
        row(make_request(range(3)), 4, [1], 2, 1, samples=False),
        row(make_request(range(9)), 2, [5, 7, 2], 8, 1),
    ]
    width = follow(state, rows)
    assert width == 3
    views = filled(state, rows, StepShape(8, 0, 0, 8, 8, 1))

    assert views["kv_slots"][0, :3].tolist() == [last_block * 4, 1 * 4 + 2, 2 * 4]
    assert ((views["kv_slots"][0, 3:] >= 0) & (views["kv_slots"][0, 3:] < 4)).all(), "only in the trash block"
    assert views["tables"][0, 3:].tolist() == [[0] * 8] * 5
    assert views["kv_lengths"].tolist() == [5, 3, 9, 1, 1, 1, 1, 1]
    assert views["slots"].tolist() == [0, 4, 2] + [6] * 5
    assert views["sample_slots"].tolist() == [0, 2] + [6] * 6
    assert views["sample_index"][:2].tolist() == [0, 2]
    assert views["ids"].tolist() == [4, 2, 8] + [0] * 5
    assert (views["positions"][3:] == 0).all()


def test_padding_is_the_same_with_several_groups(make_request: Make) -> None:
    """B24, for a hybrid model."""
    state = BatchState(CacheLayout.build([4, None], 4, 2, 8, 4), max_requests=2)
    request = make_request(range(9))
    request.tables = ([0, 6, 8], [1, 2, 3])
    run(request, 1)
    rows = [ScheduledRow(request, 8, 1, True)]
    follow(state, rows)
    views = filled(state, rows, StepShape(4, 0, 0, 4, 3, 2))
    assert views["kv_slots"][:, 0].tolist() == [8 * 4, 3 * 4]
    assert (views["kv_slots"][:, 1:] < 4).all()
    assert (views["kv_slots"] >= 0).all()
    assert (views["tables"][:, 1:] == 0).all()


def test_a_mixed_step(make_request: Make) -> None:
    layout = CacheLayout.build([None], 4, 2, 8, 4)
    state = BatchState(layout, max_requests=4)
    rows = [
        row(make_request([10, 11, 12]), 1, [2], 2, 1),
        row(make_request(range(20, 30)), 3, [4, 1, 6], 3, 4, samples=False),  # positions 3-6
        row(make_request(range(40, 43)), 0, [5], 0, 3),
    ]
    follow(state, rows)
    views = filled(state, rows, StepShape(1, 2, 7, 2, 3, 1))
    assert views["ids"].tolist() == [12, 23, 24, 25, 26, 40, 41, 42]
    assert views["positions"].tolist() == [2, 3, 4, 5, 6, 0, 1, 2]
    assert views["kv_slots"][0].tolist() == [10, 19, 4, 5, 6, 20, 21, 22]
    assert views["kv_lengths"].tolist() == [3, 7, 3]
    assert views["cu_query"].tolist() == [1, 5, 8]
    assert views["cu_kv"].tolist() == [0, 7, 10]
    assert views["sample_index"].tolist() == [0, 7]
    assert views["sample_slots"].tolist() == [1, 0]


def test_a_mixed_step_padded_to_a_captured_one(make_request: Make) -> None:
    """B24. Padding rows stand between the decode rows and the prefill rows, and behind those; padding tokens behind
    all others."""
    layout = CacheLayout.build([None], 4, 2, 8, 4)
    state = BatchState(layout, max_requests=4)
    rows = [
        row(make_request([10, 11, 12]), 1, [2], 2, 1),
        row(make_request(range(20, 30)), 3, [4, 1, 6], 3, 4, samples=False),  # positions 3-6
        row(make_request(range(40, 43)), 0, [5], 0, 3),
    ]
    follow(state, rows)
    views = filled(state, rows, StepShape(decodes=3, prefills=4, prefill_tokens=10, samples=7, width=5, groups=1))
    assert views["ids"].tolist() == [12, 23, 24, 25, 26, 40, 41, 42, 0, 0, 0, 0, 0]
    assert views["positions"].tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 0, 0, 0, 0, 0]
    assert views["kv_slots"][0, :8].tolist() == [10, 19, 4, 5, 6, 20, 21, 22]
    assert (views["kv_slots"][0, 8:] < 4).all(), "padding writes to the trash block"
    assert views["kv_lengths"].tolist() == [3, 1, 1, 7, 3, 0, 0]
    assert views["tables"][0, [1, 2, 5, 6]].tolist() == [[0] * 5] * 4
    assert views["tables"][0, 3].tolist() == [4, 1, 6, 0, 0]
    assert views["cu_query"].tolist() == [1, 5, 8, 8, 8]
    assert views["cu_kv"].tolist() == [0, 7, 10, 10, 10]
    assert views["slots"].tolist() == [1, 4, 4, 3, 0, 4, 4]
    assert views["sample_index"][:2].tolist() == [0, 7]
    assert views["sample_slots"].tolist() == [1, 0] + [4] * 5


def test_a_token_still_on_the_device_is_named_by_a_mark(make_request: Make) -> None:
    state = BatchState(CacheLayout.build([None], 4, 2, 8, 4), max_requests=1)
    request = make_request(range(3))
    request.num_in_flight = 1
    rows = [row(request, 0, [1], 3, 1)]
    follow(state, rows)
    assert filled(state, rows, StepShape(1, 0, 0, 1, 1, 1))["ids"].tolist() == [IN_FLIGHT]


def test_a_new_owner_of_a_slot_brings_its_own_table(make_request: Make) -> None:
    state = BatchState(CacheLayout.build([None], 4, 2, 8, 4), max_requests=1)
    first, second = make_request(range(9)), make_request(range(5))
    follow(state, [row(first, 0, [7, 8, 9], 8, 1)])
    rows = [row(second, 0, [3, 4], 4, 1)]
    assert follow(state, rows) == 2
    views = filled(state, rows, StepShape(1, 0, 0, 1, 2, 1))
    assert views["tables"][0].tolist() == [[3, 4]]
    assert views["kv_slots"].tolist() == [[16]]


def test_tables_widen_as_sequences_grow(make_request: Make) -> None:
    state = BatchState(CacheLayout.build([None], 4, 2, 8, 4), max_requests=1)
    request, table = make_request(range(200)), [1]
    for pages in range(1, 51):
        table[:] = range(1, pages + 1)
        rows = [row(request, 0, table, 4 * pages - 1, 1)]
        assert follow(state, rows) == pages
    views = filled(state, rows, StepShape(1, 0, 0, 1, 50, 1))
    assert views["tables"][0, 0].tolist() == list(range(1, 51))
