"""Block tables: grow, share, slide, give back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.cache import TRASH_BLOCK, CacheLayout, PagedCache
from engine.requests import Request

Make = Callable[..., Request]


def full(num_blocks: int = 16, share: bool = True) -> PagedCache:
    return PagedCache(CacheLayout.build([None, None], 4, 2, 8, 4), num_blocks, share)


def computed(cache: PagedCache, request: Request) -> Request:
    """Let all of the request's tokens be computed."""
    request.num_computed = cache.open(request)
    assert cache.extend(request, request.num_tokens)
    request.num_computed = request.num_tokens
    cache.register(request)
    return request


def test_tables_grow_by_whole_pages(make_request: Make) -> None:
    cache, request = full(), make_request(range(20))
    cache.open(request)
    for end, pages in ((1, 1), (4, 1), (5, 2), (13, 4)):
        assert cache.extend(request, end)
        assert len(request.tables[0]) == pages
        cache.check([request])
    cache.close(request)
    assert cache.pool.num_available == 16
    cache.close(request)  # harmless
    cache.check([])


def test_extend_takes_all_or_nothing(make_request: Make) -> None:
    cache, request = full(num_blocks=2), make_request(range(20))
    cache.open(request)
    assert not cache.extend(request, 12)
    assert request.tables == ([],)
    assert cache.extend(request, 8)
    cache.check([request])


@pytest.mark.parametrize(("length", "hits"), [(3, 0), (4, 0), (5, 4), (8, 4), (11, 8), (12, 8), (13, 12)])
def test_a_hit_leaves_at_least_one_token_to_compute(length: int, hits: int, make_request: Make) -> None:
    """B21: a prompt that is cached to its last token still computes one."""
    cache = full()
    first = computed(cache, make_request(range(length)))
    assert cache.open(make_request(range(length))) == hits
    assert first.num_registered == length // 4


def test_shared_pages_are_held_by_both(make_request: Make) -> None:
    cache = full()
    a, b = computed(cache, make_request(range(9))), make_request([*range(8), 50])
    assert cache.open(b) == 8
    assert b.tables[0] == a.tables[0][:2]
    cache.check([a, b])
    cache.close(a)
    cache.check([b])
    assert cache.extend(b, 9)
    assert len(set(b.tables[0])) == 3
    cache.check([b])


def test_sharing_off_finds_nothing(make_request: Make) -> None:
    cache = full(share=False)
    computed(cache, make_request(range(9)))
    assert cache.open(make_request(range(9))) == 0


def test_only_ids_known_on_the_host_are_registered(make_request: Make) -> None:
    cache, request = full(), make_request(range(7))
    cache.open(request)
    assert cache.extend(request, 8)
    request.num_computed, request.num_in_flight = 8, 1  # the eighth id is still on the device
    cache.register(request)
    assert request.num_registered == 1
    request.tokens.append(7)
    cache.register(request)
    assert request.num_registered == 2
    assert cache.open(make_request(range(9))) == 8


def test_pages_behind_the_window_are_given_back(make_request: Make) -> None:
    cache = PagedCache(CacheLayout.build([6], 4, 2, 8, 4), 8)
    request = make_request(range(40))
    cache.open(request)
    for end in range(1, 41):
        assert cache.extend(request, end)
        request.num_computed = end - 1
        cache.check([request])
        held = [b for b in request.tables[0] if b != TRASH_BLOCK]
        assert len(held) <= 3
        request.num_computed = end
    assert request.tables[0][:8] == [TRASH_BLOCK] * 8  # position 39 looks back to 34, on page 8
    assert not cache.share_prefixes
    cache.close(request)
    assert cache.pool.num_available == 8


def test_room_counts_what_is_held_already(make_request: Make) -> None:
    cache = full(num_blocks=4)
    computed(cache, make_request(range(8)))
    other = make_request([*range(4), 60, 61, 62, 63, 64])
    assert cache.open(other) == 4
    assert cache.has_room(other, 9, 16)  # 3 pages, 1 of them shared, 2 free
    assert not cache.has_room(other, 13, 16)


def test_forgotten_prefixes_are_never_found_again(make_request: Make) -> None:
    cache = full()
    old, running = computed(cache, make_request(range(9))), computed(cache, make_request(range(20, 29)))
    cache.close(old)
    cache.forget_prefixes([running])
    assert cache.open(make_request(range(9))) == 0
    running.tokens += [1, 2, 3, 4]
    assert cache.extend(running, 13)
    running.num_computed = 13
    cache.register(running)  # pages that mix old and new weights stay out
    assert cache.open(make_request(running.tokens)) == 0
