"""Room in the KV cache by hand: full, sliding and hybrid models (M-fail-01)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.capacity.memory import kv_capacity, typical_lengths


def test_full_attention_by_hand(by_hand: SimpleNamespace) -> None:
    """64 blocks of 4 tokens; 10 positions take 3 blocks: 21 fit, but there are 8 places."""
    room = kv_capacity(by_hand.setup(), [10]).rooms[0]
    assert (room.blocks, room.requests, room.total_tokens) == (3, 8, 80)
    free = kv_capacity(by_hand.setup(max_requests_per_batch=100), [8, 10])
    assert [r.requests for r in free.rooms] == [32, 21]
    block = 2 * 2 * 8 * 4 * 4 * 2  # keys and values, heads, elements, bytes, tokens, layers
    assert free.rooms[0].bytes_per_token == pytest.approx(2 * block / 8)
    assert free.kind == "full"


def test_m_fail_01_hybrid_has_no_single_figure(by_hand: SimpleNamespace) -> None:
    """M-fail-01: a layer with a window of 8 keeps 7 + 16 tokens at the most (a chunk of 16): 7 pages, however long
    the request is. The full layer keeps all."""
    found = kv_capacity(by_hand.setup((None, 8), num_blocks=200, max_requests_per_batch=100), [20, 100, 200])
    assert found.kind == "hybrid"
    assert [r.blocks for r in found.rooms] == [5 + 5, 25 + 7, 50 + 7]
    assert [r.requests for r in found.rooms] == [20, 6, 3]
    costs = [r.bytes_per_token for r in found.rooms]
    assert costs[0] > costs[1] > costs[2]
    assert "Prefixes are not shared" in found.note


def test_m_fail_01_sliding_layers_hold_any_length(by_hand: SimpleNamespace) -> None:
    setup = by_hand.setup((8, 8), num_blocks=70, max_requests_per_batch=100)
    found = kv_capacity(setup, [100, 10_000])
    assert found.kind == "sliding"
    assert [r.requests for r in found.rooms] == [10, 10]
    assert not setup.scheduler().cache.share_prefixes  # capacity is never computed with prefix hits


def test_typical_lengths(by_hand: SimpleNamespace) -> None:
    workload = by_hand.workload(*[(0.0, n, 1) for n in range(1, 102)])
    assert typical_lengths(workload) == [51, 96, 101]
    with pytest.raises(ValueError, match="at least 1 token"):
        kv_capacity(by_hand.setup(), [0])
