"""Sizes of captured steps and the one that a step is replayed on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from engine.runner.batch import StepShape
from engine.runner.buckets import MIXED_TOKENS, StepBuckets, decode_sizes, mixed_decodes, mixed_sizes, table_widths


def plan(**settings: Any) -> StepBuckets:
    given = {
        "max_rows": 64,
        "max_tokens": 8192,
        "table_pages": 32,
        "page_size": 256,
        "groups": 1,
        "mixed": True,
        "decode": True,
        "any_lengths": True,
    }
    return StepBuckets.plan(**given | settings)


def step(decodes: int, prefills: int = 0, tokens: int = 0, width: int = 1) -> StepShape:
    return StepShape(decodes, prefills, tokens, decodes + prefills, width, 1)


def test_decode_rows_are_close_together_and_end_with_the_largest_batch() -> None:
    assert decode_sizes(1) == (1,)
    assert decode_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert decode_sizes(400)[-4:] == (256, 320, 384, 400)


def test_tokens_of_steps_with_prefills_are_multiples_of_the_interval() -> None:
    """A-graph-03, A-graph-04."""
    assert mixed_sizes(300) == (64, 128, 192, 256, 300)
    assert mixed_sizes(7) == (7,)
    assert mixed_sizes(1600, 256) == (256, 512, 768, 1024, 1280, 1536)
    assert mixed_sizes(200, 64) == (64, 128, 192)
    assert mixed_sizes(8192, 3000) == (3000, 6000)
    assert mixed_sizes(2000, 3000) == ()


@pytest.mark.parametrize("largest", [2048, 8192, 10_000])
def test_large_steps_are_padded_by_an_eighth_at_most(largest: int) -> None:
    sizes = mixed_sizes(largest)
    assert sizes[: len(MIXED_TOKENS)] == MIXED_TOKENS
    assert sizes[-1] == largest
    large = sizes[len(MIXED_TOKENS) - 1 :]
    assert all(low < high <= low * 9 / 8 for low, high in itertools.pairwise(large))
    assert len(mixed_sizes(8192)) == 31


def test_every_number_of_decode_rows_beside_prefills_has_room() -> None:
    for tokens, rows in itertools.product((64, 300, 640, 1152, 8192), (1, 8, 40, 256, 300, 1024)):
        sizes = mixed_decodes(tokens, rows)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == min(tokens, rows)
    assert mixed_decodes(256, 256) == (16, 64, 256)
    assert mixed_decodes(1024, 1024) == (32, 256, 1024)
    assert mixed_decodes(8192, 256) == (256,)


def test_widths_are_whole_pages_and_end_with_the_widest() -> None:
    assert table_widths(32, 256) == (32,)
    assert table_widths(32, 256, 2048) == (8, 16, 24, 32)
    assert table_widths(10, 16, 50) == (4, 8, 10)
    assert table_widths(32, 256, 16384) == (32,)


@pytest.mark.parametrize(("small", "large"), [({"q_interval": 64}, {"q_interval": 256})])
def test_a_smaller_q_interval_captures_more_and_pads_less(small: dict[str, int], large: dict[str, int]) -> None:
    """A-graph-04."""
    fine, coarse = plan(**small), plan(**large)
    assert len(fine.shapes()) > len(coarse.shapes())
    padded = {}
    for name, buckets in (("fine", fine), ("coarse", coarse)):
        steps = [step(3, 2, tokens) for tokens in range(2, 1025)]
        found = [buckets.find(s) for s in steps]
        assert all(f is not None and f.tokens % buckets.mixed_tokens[0] == 0 for f in found)
        padded[name] = sum(f.tokens - s.tokens for f, s in zip(found, steps, strict=True) if f is not None)
    assert padded["fine"] < padded["coarse"]


def test_a_smaller_kv_interval_captures_more_and_narrower_tables() -> None:
    """A-graph-04: 4096 and 16384 tokens of tables that span 32768."""
    fine, coarse = plan(table_pages=128, kv_interval=4096), plan(table_pages=128, kv_interval=16_384)
    assert (len(fine.widths), len(coarse.widths)) == (8, 2)
    assert len(fine.shapes()) == 4 * len(coarse.shapes())
    for width in (1, 16, 17, 64, 128):
        narrow, wide = fine.find(step(4, width=width)), coarse.find(step(4, width=width))
        assert narrow is not None
        assert wide is not None
        assert width <= narrow.width <= wide.width
    assert fine.find(step(4, width=17)) == step(4, width=32)


@pytest.mark.parametrize("settings", [{}, {"q_interval": 96, "kv_interval": 1000}, {"max_rows": 300}, {"mixed": False}])
def test_what_is_found_is_captured_is_the_smallest_and_has_room(settings: dict[str, Any]) -> None:
    buckets = plan(**settings)
    captured = buckets.shapes()
    assert len(set(captured)) == len(captured)
    sizes = [(s.tokens, s.rows) for s in captured]
    assert sizes == sorted(sizes, reverse=True), "captured largest first"
    mixed = [(1, 2), (2, 63), (8, 64), (8, 500), (9, 500), (60, 500), (3, 1025), (290, 4000), (1, 8192)]
    for decodes, (prefills, tokens), width in itertools.product((0, 1, 3, 40, 299), [(0, 0), *mixed], (1, 8, 32, 33)):
        wanted = step(decodes, prefills, tokens, width)
        if not wanted.rows:
            continue
        room = [
            s
            for s in captured
            if (s.prefills > 0) == (prefills > 0)
            and s.prefills >= prefills
            and s.decodes >= decodes
            and s.tokens >= decodes + tokens
            and s.width >= width
        ]
        found = buckets.find(wanted)
        if found is None:
            assert not room
        else:
            assert found == min(room, key=lambda s: (s.width, s.tokens, s.decodes))
            assert found.samples >= min(wanted.rows, settings.get("max_rows", 64))


def test_a_longer_request_or_more_prefills_are_launched_instead() -> None:
    """A-fast-03: only the step that holds it."""
    buckets = plan()
    assert buckets.find(step(4, width=32)) is not None
    assert buckets.find(step(4, width=33)) is None
    assert plan(decode=False).find(step(4)) is None
    assert plan(any_lengths=False).find(step(4, 8, 100)) is not None
    assert plan(any_lengths=False).find(step(4, 9, 100)) is None
    assert plan(any_lengths=False).largest == 1024


def test_many_prefill_rows_or_few_rows_in_all_are_replayed_too() -> None:
    found = plan(max_rows=256).find(step(0, 100, 300))
    assert found is not None
    assert (found.tokens, found.prefills) == (1728, 108), "the smallest size with room for 100 rows"
    small = plan(max_rows=4).find(step(1, 1, 10))
    assert small is not None
    assert (small.decodes, small.prefills, small.samples) == (4, 4, 4), "either kind may be all four rows"
    assert plan(max_rows=256).find(step(255, 1, 7937)) is not None, "a whole budget"
    tiny = plan(max_rows=16, max_tokens=4).find(step(1, 1, 2))
    assert tiny is not None
    assert (tiny.decodes, tiny.prefills, tiny.samples) == (4, 4, 4), "no more samples than tokens"


def test_what_is_beyond_the_limit_is_launched() -> None:
    buckets = plan(max_rows=256).up_to(2048)
    assert buckets.largest == 1920
    assert buckets.find(step(0, 1, 1920)) is not None
    assert buckets.find(step(0, 1, 1921)) is None
    assert buckets.find(step(256)) is not None
