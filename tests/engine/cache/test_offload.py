"""Which pages of a request go to the host, which come back, and when there is no room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine.cache import CacheLayout, HostBlocks, PagedCache
from engine.requests import Request


def build(
    windows: Sequence[int | None], host: int, blocks: int = 20, share: bool = False
) -> tuple[PagedCache, HostBlocks]:
    cache = PagedCache(CacheLayout.build(windows, 4, 2, 8, 4), blocks, share)
    return cache, HostBlocks(cache, host)


def computed(cache: PagedCache, request: Request, end: int) -> Request:
    cache.open(request)
    assert cache.extend(request, end)
    request.num_computed = end
    return request


def test_the_computed_pages_go_and_come_back(make_request: Callable[..., Request]) -> None:
    cache, host = build([None, None], host=4)
    request = computed(cache, make_request(range(10)), 10)
    cache.extend(request, 16)  # a page more than is computed
    old = request.tables[0][:3]
    assert host.keep(request) == list(zip(old, [0, 1, 2], strict=True))
    cache.close(request)
    assert (host.num_free, host.kept_tokens(request)) == (1, 10)
    cache.open(request)
    assert host.restore(request) == list(zip([0, 1, 2], request.tables[0], strict=True))
    assert len(request.tables[0]) == 3
    assert host.num_free == 1, "read by the coming step, so not free yet"
    host.release(request)
    host.release(request)
    assert (host.num_free, host.kept_tokens(request)) == (4, 0)


def test_no_room_and_nothing_computed_keep_nothing(make_request: Callable[..., Request]) -> None:
    cache, host = build([None, None], host=2)
    request = computed(cache, make_request(range(10)), 9)
    assert host.keep(request) is None
    request.num_computed = 0
    assert host.keep(request) is None
    assert host.num_free == 2
    assert host.restore(request) == []
    host.check([request])


def test_pages_behind_a_window_stay_behind(make_request: Callable[..., Request]) -> None:
    """Position 20 sees 13 to 19 with a window of 8: pages 3 and 4 of the sliding group, all 5 of the full one."""
    cache, host = build([None, 8], host=7)
    request = computed(cache, make_request(range(20)), 20)
    pairs = host.keep(request)
    assert pairs is not None
    assert [device for device, _ in pairs] == request.tables[0] + request.tables[1][3:]
    cache.close(request)
    cache.open(request)
    assert len(host.restore(request) or ()) == 7
    assert request.tables[1][:3] == [0, 0, 0]
    assert [len(table) for table in request.tables] == [5, 5]
    cache.check([request])


def test_what_the_prefix_cache_holds_is_not_copied_back(make_request: Callable[..., Request]) -> None:
    cache, host = build([None], host=8, share=True)
    request = computed(cache, make_request(range(11)), 11)
    cache.register(request)
    first = request.tables[0][:2]
    host.keep(request)
    cache.close(request)
    assert cache.open(request) == 8
    assert host.restore(request) == [(2, request.tables[0][2])]
    assert request.tables[0][:2] == first


def test_a_restore_without_device_blocks_takes_none(make_request: Callable[..., Request]) -> None:
    cache, host = build([None], host=3, blocks=3)
    request = computed(cache, make_request(range(10)), 10)
    host.keep(request)
    cache.close(request)
    other = computed(cache, make_request(range(4)), 4)
    cache.open(request)
    assert host.restore(request) is None
    assert cache.pool.num_available == 2
    cache.check([other])


def test_broken_accounts_are_found(make_request: Callable[..., Request]) -> None:
    cache, host = build([None], host=3)
    request = computed(cache, make_request(range(4)), 4)
    host.keep(request)
    host.check([request])
    with pytest.raises(RuntimeError, match="does not wait"):
        host.check([])
    host._free.append(0)
    with pytest.raises(RuntimeError, match="lost or kept twice"):
        host.check([request])


def test_pages_of_old_weights_are_not_offered_after_a_restore(make_request: Callable[..., Request]) -> None:
    cache, host = build([None], host=8, share=True)
    request = computed(cache, make_request(range(11)), 11)
    cache.forget_prefixes([request])
    host.keep(request)
    cache.close(request)
    cache.open(request)
    host.restore(request)
    cache.register(request)
    cache.close(request)
    assert cache.pool.num_cached == 0
