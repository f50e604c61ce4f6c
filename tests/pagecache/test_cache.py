"""PageCache: dirty pages, drops, and the bound."""

from __future__ import annotations

import pytest

from aof2.engine.pagecache import PageCache, PageCacheFullError, PageKey
from tests.pagecache.helpers import PAGE, cache_of, check, key


def page(fill: str = "x", size: int = PAGE) -> bytes:
    return fill.encode() * size


# -- the bound -----------------------------------------------------------------------------------------------------


def test_a_page_larger_than_the_cache_is_not_held() -> None:
    cache = cache_of(3)
    cache.put(key(1), page())
    assert not cache.put(key(0), page(size=31))
    assert key(0) not in cache
    assert key(1) in cache
    check(cache)


def test_an_empty_page_is_not_held() -> None:
    cache = cache_of(3)
    assert not cache.put(key(0), b"")
    assert cache.put(key(0), page())
    assert not cache.put(key(0), b"")
    assert key(0) not in cache
    with pytest.raises(ValueError):
        cache.put_dirty(key(0), b"")


def test_all_dirty_leaves_no_room() -> None:
    cache = cache_of(3)
    versions = [cache.put_dirty(key(i), page()) for i in range(3)]
    assert not cache.put(key(9), page())
    with pytest.raises(PageCacheFullError, match="30 are changed; checkpoint, or raise page_cache_bytes"):
        cache.put_dirty(key(9), page())
    with pytest.raises(PageCacheFullError):
        cache.put_dirty(key(1), page("n", 11))
    assert cache.peek(key(1)) == page()
    assert cache.dirty_pages() == [(key(i), version) for i, version in enumerate(versions)]
    assert cache.put_dirty(key(1), page("n")) > versions[2]  # its own room is enough
    assert cache.mark_clean(key(0))
    assert cache.put_dirty(key(9), page())
    assert key(0) not in cache
    check(cache)


def churn(cache: PageCache) -> None:
    for i in range(1000, 1100):
        cache.put(key(i), page())


# -- dirty pages ---------------------------------------------------------------------------------------------------


def test_a_dirty_page_stays_until_that_version_is_persisted() -> None:
    cache = cache_of(5)
    first = cache.put_dirty(key(0), page("1"))
    second = cache.put_dirty(key(0), page("2", 12))
    assert cache.dirty_bytes == 12
    assert not cache.mark_clean(key(0), first)
    assert not cache.put(key(0), page("o"))  # what was fetched is older
    churn(cache)
    assert cache.peek(key(0)) == page("2", 12)
    assert cache.mark_clean(key(0), second)
    assert not cache.mark_clean(key(0), second)
    assert cache.dirty_bytes == 0
    assert cache.peek(key(0)) == page("2", 12)
    churn(cache)
    assert key(0) not in cache
    check(cache)


def test_a_clean_page_becomes_dirty() -> None:
    cache = cache_of(5)
    cache.put(key(0), page())
    cache.put_dirty(key(0), page("d", 3))
    check(cache)
    churn(cache)
    assert cache.mark_clean(key(0))
    churn(cache)
    assert key(0) not in cache


def test_dirty_pages_of_an_object() -> None:
    cache = cache_of(5)
    a = cache.put_dirty(PageKey(1, 1, 0), page())
    b = cache.put_dirty(PageKey(2, 1, 0), page())
    assert cache.dirty_pages(1) == [(PageKey(1, 1, 0), a)]
    assert cache.dirty_pages() == [(PageKey(1, 1, 0), a), (PageKey(2, 1, 0), b)]


# -- dropping ------------------------------------------------------------------------------------------------------


def test_drop_object_takes_that_generation_only() -> None:
    cache = cache_of(10)
    for object_id, generation in [(1, 1), (1, 2), (2, 1)]:
        for block in range(2):
            cache.put(PageKey(object_id, generation, block), page())
    cache.put_dirty(PageKey(1, 1, 5), page())
    assert cache.drop_object(1, 1) == 3 * PAGE
    assert cache.drop_object(1, 1) == 0
    assert sorted(cache._pages) == [(1, 2, 0), (1, 2, 1), (2, 1, 0), (2, 1, 1)]
    assert cache.dirty_bytes == 0
    check(cache)


def test_plain_tuples_are_keys_too() -> None:
    cache = cache_of(3)
    cache.put((1, 2, 3), page())  # type: ignore[arg-type]
    assert PageKey(1, 2, 3) in cache


def test_what_counts() -> None:
    cache = cache_of(3)
    cache.put(key(0), page())
    assert cache.peek(key(0)) == page()
    assert key(0) in cache
    assert (cache.hits, cache.misses) == (0, 0)
    assert cache.get(key(0)) == page()
    assert cache.get(key(1)) is None
    assert (cache.hits, cache.misses) == (1, 1)
