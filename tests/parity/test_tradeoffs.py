"""What settings are said to buy, counted: fewer allocations by large pages, fewer evictions by a margin, more hits by
sorted inputs, and membership that changes at every step. Tokens are right on either side of each trade."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from transformers import GenerationConfig

from engine import ContinuousBatchingConfig, ContinuousBatchingManager

Run = Callable[..., Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]


def prompt(length: int, salt: int) -> list[int]:
    return [(salt + 31 * i + i * i) % 97 for i in range(length)]


def test_larger_pages_are_allocated_less_often_and_waste_more(m1: Any, run: Run, reference: Reference) -> None:
    """A-page-04, by hand: 3 prompts of 21 to 23 tokens and 8 new, of which the last is never computed."""
    prompts = [prompt(21 + i, 5 * i) for i in range(3)]
    allocated, unused = {}, {}
    for page_size in (4, 16, 64):
        result = run(
            m1, prompts, 8, page_size=page_size, num_blocks=60, max_batch_tokens=200, allow_block_sharing=False
        )
        assert result.tokens == [reference(m1, p, 8) for p in prompts]
        allocated[page_size] = result.counters["kv_blocks_allocated"]
        unused[page_size] = result.counters["unused_slots_max"]
        assert allocated[page_size] == sum(step.allocated_blocks for step in result.steps)
        first, last = result.steps[0], result.steps[-1]
        assert first.unused_slots == sum(-len(p) % page_size for p in prompts)
        assert last.unused_slots == sum(-(len(p) + 7) % page_size for p in prompts)
        assert max(step.table_pages for step in result.steps) == -(-30 // page_size)
    assert allocated == {4: 7 + 8 + 8, 16: 3 * 2, 64: 3}
    assert unused[4] <= 9 < unused[16] < unused[64] == 43 + 42 + 41


def test_two_layer_groups_have_two_last_pages(tiny_model: Callable[[str, str], Any], run: Run) -> None:
    result = run(tiny_model("tiny-gemma2", "eager"), [prompt(5, 1)], 2, page_size=16, num_blocks=9, max_batch_tokens=64)
    assert [(s.allocated_blocks, s.unused_slots) for s in result.steps] == [(2, 2 * 11), (0, 2 * 10)]


@pytest.mark.parametrize("sharing", [False, True])
def test_a_margin_delays_evictions(m1: Any, run: Run, reference: Reference, sharing: bool) -> None:
    """A-margin-04: requests that grow fourfold in a pool for about two of them."""
    prompts = [[*prompt(5, 11), *prompt(3, 7 * i)] for i in range(8)]
    expected = [reference(m1, p, 24) for p in prompts]
    preempted, evicted, held = {}, {}, {}
    for margin in (0.0, 0.15, 0.5):
        result = run(
            m1, prompts, 24, page_size=4, num_blocks=20, max_batch_tokens=32, safety_margin=margin,
            allow_block_sharing=sharing,
        )  # fmt: skip
        assert result.tokens == expected
        preempted[margin], evicted[margin] = result.counters["preemptions"], result.counters["kv_blocks_evicted"]
        held[margin] = sum(step.admission_held for step in result.steps)
        assert evicted[margin] == sum(step.evicted_blocks for step in result.steps)
    assert preempted[0.0] > preempted[0.5]
    assert preempted[0.0] >= preempted[0.15] >= preempted[0.5]
    assert held[0.0] == 0 < held[0.15] < held[0.5]
    if sharing:
        assert evicted[0.0] >= evicted[0.15] > 0
    else:
        assert set(evicted.values()) == {0}


@pytest.mark.parametrize("sharing", [False, True])
def test_sorted_inputs_find_more(m1: Any, reference: Reference, sharing: bool) -> None:
    """A-req-03: two families of prompts in turn, in a pool that cannot keep the beginnings of both."""
    inputs = [[*prompt(16, 40 * (i % 2)), i] for i in range(10)]
    hits = {}
    for together in (False, True):
        config = ContinuousBatchingConfig(
            page_size=4, num_blocks=7, max_batch_tokens=64, max_requests_per_batch=1, allow_block_sharing=sharing
        )
        manager = ContinuousBatchingManager(m1, GenerationConfig(max_new_tokens=6), config)
        ids = manager.add_requests(inputs) if together else [manager.add_request(ids) for ids in inputs]
        manager.start()
        done = {output.request_id: output.generated_tokens for output in manager}
        assert [done[i] for i in ids] == [reference(m1, p, 6) for p in inputs]
        hits[together] = manager.counters()["prefix_hit_tokens"]
        manager.destroy()
    assert hits[True] == (8 * 16 if sharing else 0), "all but the first of a family"
    assert hits[False] < hits[True] if sharing else hits[False] == 0, "each evicts what the next one needs"


@pytest.mark.parametrize("ahead", [False, True])
def test_membership_changes_at_every_step(m1: Any, run: Run, reference: Reference, ahead: bool) -> None:
    """A-over-01, A-over-02: two places for three prompts of unequal length."""
    prompts = [prompt(3, 1), prompt(11, 2), prompt(6, 3)]
    result = run(
        m1, prompts, 5, page_size=4, num_blocks=40, max_batch_tokens=32, max_requests_per_batch=2, ahead=ahead,
        scheduler_type="prefill_first", allow_block_sharing=False,
    )  # fmt: skip
    assert result.tokens == [reference(m1, p, 5) for p in prompts]
    assert result.counters["prefill_tokens"] == sum(map(len, prompts)), "no prompt is padded"
    assert result.counters["padded_rows"] == 0
    kinds = [(step.decode_rows, step.prefill_rows) for step in result.steps]
    # The last allowed token is known beforehand, so a step ahead wastes no row.
    assert kinds == [(0, 2), *[(2, 0)] * 4, (0, 1), *[(1, 0)] * 4]
    free = [step.free_blocks for step in result.steps]
    assert free[5] > free[4], "what the two held is free when the third comes"


def test_a_step_is_planned_while_the_one_before_it_runs(m1: Any, run: Run) -> None:
    """A-async-01: each step begins before the tokens of the one before it are on the host; never otherwise."""
    for ahead in (False, True):
        steps = run(m1, [prompt(9, 1), prompt(5, 2)], 12, page_size=4, num_blocks=40, ahead=ahead).steps
        overlaps = [after.t_ns < before.t_ns + before.step_ms * 1e6 for before, after in pairwise(steps)]
        assert len(overlaps) >= 11
        assert set(overlaps) == {ahead}
