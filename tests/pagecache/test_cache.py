"""PageCache: single flight, cancellation, pins, dirty pages, drops, and the bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.pagecache import PageCache, PageCacheFullError, PageKey
from tests.pagecache.helpers import PAGE, cache_of, check, key, run


class Source:
    """Fetches that wait until they are told to go on."""

    def __init__(self) -> None:
        self.started = 0
        self.go = trio.Event()
        self.error: Exception | None = None
        self.data = b"f" * PAGE

    async def __call__(self) -> bytes:
        self.started += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return self.data


async def never() -> bytes:
    raise AssertionError("fetched what is held")


def page(fill: str = "x", size: int = PAGE) -> bytes:
    return fill.encode() * size


# -- single flight -------------------------------------------------------------------------------------------------


def test_concurrent_callers_share_one_fetch() -> None:
    async def main() -> None:
        cache, source = cache_of(10), Source()
        got: list[bytes] = []

        async def ask() -> None:
            got.append(await cache.get(key(0), source))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert cache.stats().inflight_bytes == PAGE
            check(cache)
            source.go.set()
        assert got == [source.data] * 5
        assert source.started == 1
        assert await cache.get(key(0), never) == source.data
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.shared, stats.inflight_bytes) == (1, 5, 4, 0)

    run(main)


@pytest.mark.parametrize(
    "error",
    [
        CorruptError("bad frame", path="p", offset=3),
        UnsupportedError("version 9", path="p"),
        OSError(5, "Input/output error", "file"),
        KeyError("k"),
    ],
)
def test_an_error_reaches_everyone_and_is_not_kept(error: Exception) -> None:
    async def main() -> None:
        cache, source = cache_of(10), Source()
        source.error = error
        seen: list[Exception] = []

        async def ask() -> None:
            with pytest.raises(type(error)) as caught:
                await cache.get(key(0), source)
            seen.append(caught.value)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            source.go.set()
        assert [str(e) for e in seen] == [str(error)] * 3
        assert [vars(e) for e in seen] == [vars(error)] * 3
        assert getattr(seen[2], "errno", None) == getattr(error, "errno", None)
        assert source.started == 1
        assert cache.stats().inflight_bytes == 0
        source.error = None
        assert await cache.get(key(0), source) == source.data
        check(cache)

    run(main)


def test_the_first_caller_is_cancelled_and_the_others_go_on() -> None:
    async def main() -> None:
        cache = cache_of(10)
        sources = [Source() for _ in range(3)]
        scopes = [trio.CancelScope() for _ in sources]
        got: list[bytes] = []

        async def ask(i: int) -> None:
            with scopes[i]:
                got.append(await cache.get(key(0), sources[i]))

        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(ask, i)
                await trio.testing.wait_all_tasks_blocked()
            assert [s.started for s in sources] == [1, 0, 0]
            scopes[0].cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert sum(s.started for s in sources[1:]) == 1
            check(cache)
            for source in sources:
                source.go.set()
        assert got == [page("f")] * 2
        assert sum(s.started for s in sources) == 2
        assert cache.stats().inflight_bytes == 0
        assert not cache._flights

    run(main)


def test_a_waiter_is_cancelled_and_the_fetch_goes_on() -> None:
    async def main() -> None:
        cache, source = cache_of(10), Source()
        scope = trio.CancelScope()

        async def ask_in_scope() -> None:
            with scope:
                await cache.get(key(0), source)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.get, key(0), source)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask_in_scope)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            source.go.set()
        assert cache.peek(key(0)) == source.data
        assert source.started == 1

    run(main)


def test_everyone_is_cancelled_and_nothing_is_left_running() -> None:
    async def main() -> None:
        cache, source = cache_of(10), Source()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(cache.get, key(0), source)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert not cache._flights
        assert cache.stats().inflight_bytes == 0
        assert key(0) not in cache

    run(main)


@pytest.mark.parametrize("how", ["drop", "drop_object", "put", "put_dirty"])
def test_a_fetch_does_not_bring_back_what_was_dropped_or_overwritten(how: str) -> None:
    def change(cache: PageCache) -> None:
        match how:
            case "drop":
                cache.drop([key(0)])
            case "drop_object":
                cache.drop_object(1, 1)
            case "put":
                cache.put(key(0), page("n"))
            case "put_dirty":
                cache.put_dirty(key(0), page("n"))

    async def main() -> None:
        cache, old, new = cache_of(10), Source(), Source()
        new.data = page("n")
        new.go.set()
        got: list[bytes] = []

        async def ask() -> None:
            got.append(await cache.get(key(0), old))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            change(cache)
            assert await cache.get(key(0), new) == page("n")  # does not join the fetch under way
            check(cache)
            old.go.set()
        assert got == [page("n")] * 2
        assert cache.peek(key(0)) == page("n")
        check(cache)

    run(main)


def test_who_waited_for_a_dropped_page_still_gets_it() -> None:
    async def main() -> None:
        cache, source = cache_of(10), Source()
        got: list[bytes] = []

        async def ask() -> None:
            got.append(await cache.get(key(0), source))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            cache.drop_object(1, 1)
            source.go.set()
        assert got == [source.data] * 2
        assert key(0) not in cache

    run(main)


# -- the bound -----------------------------------------------------------------------------------------------------


def test_fetches_under_way_count() -> None:
    async def main() -> None:
        cache, source = cache_of(3), Source()
        assert all(cache.put(key(i), page()) for i in range(3))
        async with trio.open_nursery() as nursery:
            for i in range(10, 15):
                nursery.start_soon(cache.get, key(i), source)
            await trio.testing.wait_all_tasks_blocked()
            assert cache.stats().inflight_bytes == 3 * PAGE
            assert cache.stats().used_bytes == 0
            assert not cache.put(key(0), page())
            check(cache)
            source.go.set()
        check(cache)
        assert cache.stats().inflight_bytes == 0
        assert cache.stats().pages == 3

    run(main)


def test_a_page_larger_than_the_cache_is_served_but_not_held() -> None:
    async def main() -> None:
        cache, source = cache_of(3), Source()
        cache.put(key(1), page())
        source.data = page(size=31)
        source.go.set()
        assert await cache.get(key(0), source, 31) == source.data
        assert await cache.get(key(0), source) == source.data  # a size nobody foresaw
        assert source.started == 2
        assert key(0) not in cache
        assert key(1) in cache
        assert cache.stats().bypasses == 2
        assert not cache.put(key(0), source.data)
        check(cache)

    run(main)


@pytest.mark.parametrize("size", [1, 5, 29, 30])
def test_a_page_of_another_size_than_expected(size: int) -> None:
    async def main() -> None:
        cache, source = cache_of(3), Source()
        for i in range(1, 4):
            cache.put(key(i), page())
        source.data = page(size=size)
        source.go.set()
        assert await cache.get(key(0), source) == source.data
        assert key(0) in cache
        check(cache)

    run(main)


def test_an_empty_page_is_served_but_not_held() -> None:
    async def main() -> None:
        cache, source = cache_of(3), Source()
        source.data = b""
        source.go.set()
        assert await cache.get(key(0), source) == b""
        assert not cache.put(key(0), b"")
        assert cache.put(key(0), page())
        assert not cache.put(key(0), b"")
        assert key(0) not in cache
        with pytest.raises(ValueError):
            cache.put_dirty(key(0), b"")

    run(main)


def test_all_pinned_or_dirty_leaves_no_room() -> None:
    async def main() -> None:
        cache, source = cache_of(3), Source()
        source.go.set()
        cache.put(key(0), page())
        pin = cache.pin(key(0))
        assert pin is not None
        versions = [cache.put_dirty(key(i), page()) for i in (1, 2)]
        assert await cache.get(key(9), source) == source.data
        assert key(9) not in cache
        assert not cache.put(key(9), page())
        with pytest.raises(
            PageCacheFullError, match="20 are changed, others pinned; checkpoint, or raise page_cache_bytes"
        ):
            cache.put_dirty(key(9), page())
        with pytest.raises(PageCacheFullError):
            cache.put_dirty(key(1), page("n", 11))
        assert cache.peek(key(1)) == page()
        assert cache.dirty_pages() == [(key(1), versions[0]), (key(2), versions[1])]
        assert cache.put_dirty(key(1), page("n")) > versions[1]  # its own room is enough
        pin.release()
        assert cache.put_dirty(key(9), page())
        assert key(0) not in cache
        check(cache)

    run(main)


# -- pins ----------------------------------------------------------------------------------------------------------


def churn(cache: PageCache) -> None:
    for i in range(1000, 1100):
        cache.put(key(i), page())


def test_a_pinned_page_stays() -> None:
    cache = cache_of(5)
    cache.put(key(0), page("p"))
    with cache.pin(key(0)) or pytest.fail("not held"):
        second = cache.pin(key(0))
        assert second is not None
        churn(cache)
        assert second.data == page("p")
    churn(cache)
    assert key(0) in cache
    second.release()
    second.release()
    with pytest.raises(ValueError, match="released"):
        _ = second.data
    churn(cache)
    assert key(0) not in cache
    assert cache.pin(key(0)) is None
    check(cache)


def test_a_pin_of_a_dropped_page_does_not_hold_its_successor() -> None:
    cache = cache_of(5)
    cache.put(key(0), page("o"))
    pin = cache.pin(key(0))
    assert pin is not None
    assert cache.drop([key(0)]) == PAGE
    cache.put(key(0), page("n"))
    assert pin.data == page("o")
    newer = cache.pin(key(0))
    assert newer is not None
    pin.release()
    churn(cache)
    assert cache.peek(key(0)) == page("n")
    check(cache)


# -- dirty pages ---------------------------------------------------------------------------------------------------


def test_a_dirty_page_stays_until_that_version_is_persisted() -> None:
    cache = cache_of(5)
    first = cache.put_dirty(key(0), page("1"))
    second = cache.put_dirty(key(0), page("2", 12))
    assert cache.stats().dirty_bytes == 12
    assert not cache.mark_clean(key(0), first)
    assert not cache.put(key(0), page("o"))  # what was fetched is older
    churn(cache)
    assert cache.peek(key(0)) == page("2", 12)
    assert cache.mark_clean(key(0), second)
    assert not cache.mark_clean(key(0), second)
    assert cache.stats().dirty_bytes == 0
    assert cache.peek(key(0)) == page("2", 12)
    churn(cache)
    assert key(0) not in cache
    check(cache)


def test_a_clean_page_becomes_dirty() -> None:
    cache = cache_of(5)
    cache.put(key(0), page())
    cache.put_dirty(key(0), page("d", 3))
    pin = cache.pin(key(0))
    assert pin is not None
    check(cache)
    assert cache.mark_clean(key(0))
    churn(cache)
    assert key(0) in cache
    pin.release()
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
    assert cache.stats().dirty_bytes == 0
    check(cache)


def test_plain_tuples_are_keys_too() -> None:
    cache = cache_of(3)
    cache.put((1, 2, 3), page())  # type: ignore[arg-type]
    assert PageKey(1, 2, 3) in cache


def test_what_counts_as_use() -> None:
    cache = cache_of(3)
    cache.put(key(0), page())
    uses: list[Callable[[], object]] = [lambda: cache.peek(key(0)), lambda: cache.pin(key(0)), lambda: key(0) in cache]
    for use in uses:
        use()
    assert (cache.stats().hits, cache.stats().misses) == (0, 0)
    assert cache.get_nowait(key(0)) == page()
    assert cache.get_nowait(key(1)) is None
    assert (cache.stats().hits, cache.stats().misses) == (1, 0)
