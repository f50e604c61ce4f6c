"""PageCache: blocks and pages in memory, up to a number of bytes.

Invariants
- `used_bytes + inflight_bytes ≤ capacity_bytes`, always. used_bytes are the pages held. inflight_bytes are charged
  before a fetch starts, for what it is expected to bring, so the bound holds when it lands; a fetch for which there is
  no room is not charged, runs all the same, and its page goes to the callers alone.
- Pinned and dirty pages stay. All others go in the order of `policy`. Clean means: another tier holds the same bytes.
- A dirty page is only replaced by a later `put_dirty`, and becomes clean only for the version that was persisted.
- One fetch a page at a time. It runs in the task of the caller that came first. If it raises, everyone who waits gets
  that error, and nothing is kept. If that caller is cancelled, one of those who wait fetches again, with its own fetch;
  so no work goes on for nobody.
- What was dropped or overwritten while a fetch was under way is not brought back by it, and who asks afterwards does
  not join that fetch. Who waits for it gets the newer page, where there is one.

Bytes that a caller still refers to (a page it got, a pin of a page that was dropped) are the caller's; they are not
counted here.

Owner: the trio thread; no locks. A crash leaves nothing: what was dirty comes back from the WAL.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple, NoReturn

import trio

from aof2.engine.errors import Aof2Error
from aof2.engine.pagecache.policy import EvictionQueues, Page, PageKey

EXPECTED_BYTES_DEFAULT: Final = 1 << 20

Fetch = Callable[[], Awaitable[bytes]]


class PageCacheFullError(Aof2Error):
    """A dirty page has no room: all the others are pinned or dirty. Persist some (checkpoint), then write again."""


class CacheStats(NamedTuple):
    """Counts since the start, and bytes now. A caller that joined a fetch missed too; `shared` says how many did."""

    hits: int
    misses: int
    shared: int
    evictions: int
    bypasses: int
    pages: int
    capacity_bytes: int
    used_bytes: int
    dirty_bytes: int
    held_bytes: int
    inflight_bytes: int


class Pin:
    """While it lives its page is not evicted. `data` are the page's bytes, the newest there are."""

    def __init__(self, cache: PageCache, page: Page) -> None:
        self._cache = cache
        self._page: Page | None = page

    @property
    def data(self) -> bytes:
        if self._page is None:
            raise ValueError("the pin was released")
        return self._page.data

    def release(self) -> None:
        """Harmless the second time."""
        if self._page is not None:
            page, self._page = self._page, None
            self._cache._unpin(page)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class _Flight:
    """A fetch under way. Neither data nor error when it landed: its caller was cancelled."""

    __slots__ = ("charged_bytes", "data", "error", "landed")

    def __init__(self, charged_bytes: int) -> None:
        self.charged_bytes = charged_bytes
        self.landed = trio.Event()
        self.data: bytes | None = None
        self.error: Exception | None = None


class PageCache:
    """Keys are (object_id, generation, block_index); a page is 1 byte at least."""

    def __init__(self, capacity_bytes: int, *, expected_bytes: int = EXPECTED_BYTES_DEFAULT) -> None:
        """`expected_bytes` is what a fetch is charged when its caller does not say."""
        self._capacity_bytes = capacity_bytes
        self._expected_bytes = expected_bytes
        self._pages: dict[PageKey, Page] = {}
        self._objects: dict[tuple[int, int], set[PageKey]] = {}
        self._dirty: dict[PageKey, Page] = {}
        self._flights: dict[PageKey, _Flight] = {}
        self._queues = EvictionQueues(capacity_bytes)
        self._versions = 0
        self.evicted_bytes = 0
        self._used_bytes = self._dirty_bytes = self._inflight_bytes = 0
        self._hits = self._misses = self._shared = self._evictions = self._bypasses = 0

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    def stats(self) -> CacheStats:
        return CacheStats(
            self._hits,
            self._misses,
            self._shared,
            self._evictions,
            self._bypasses,
            len(self._pages),
            self._capacity_bytes,
            self._used_bytes,
            self._dirty_bytes,
            self._used_bytes - self._queues.evictable_bytes,
            self._inflight_bytes,
        )

    # -- reading -----------------------------------------------------------------------------------------------

    def peek(self, key: PageKey) -> bytes | None:
        """The page if it is held. Counts for nothing."""
        page = self._pages.get(key)
        return None if page is None else page.data

    def get_nowait(self, key: PageKey) -> bytes | None:
        """The page if it is held, as a hit; a miss is left to be counted by the `get` that follows."""
        page = self._pages.get(key)
        if page is None:
            return None
        self._queues.requested(key)
        self._queues.used(page)
        self._hits += 1
        return page.data

    async def get(self, key: PageKey, fetch: Fetch, expected_bytes: int | None = None) -> bytes:
        """The page, fetched if need be. `expected_bytes` is what the fetch will bring, as far as the caller knows."""
        await trio.lowlevel.checkpoint()
        data = self.get_nowait(key)
        if data is not None:
            return data
        self._misses += 1
        self._queues.requested(key)
        if key in self._flights:
            self._shared += 1
        while (flight := self._flights.get(key)) is not None:
            await flight.landed.wait()
            data = self.peek(key) or flight.data
            if data is not None:
                return data
            if flight.error is not None:
                _raise_again(flight.error)
        return await self._fetch(key, fetch, self._expected_bytes if expected_bytes is None else expected_bytes)

    async def _fetch(self, key: PageKey, fetch: Fetch, expected_bytes: int) -> bytes:
        flight = self._flights[key] = _Flight(self._charge(expected_bytes))
        wanted = False
        try:
            flight.data = await fetch()
        except Exception as e:
            flight.error = e
            raise
        finally:
            self._inflight_bytes -= flight.charged_bytes
            if self._flights.get(key) is flight:
                del self._flights[key]
                wanted = True
            flight.landed.set()
        if not (wanted and self._hold(key, flight.data)):
            self._bypasses += 1
        return self.peek(key) or flight.data

    def _charge(self, expected_bytes: int) -> int:
        if not self._make_room(expected_bytes):
            return 0
        self._inflight_bytes += expected_bytes
        return expected_bytes

    def pin(self, key: PageKey) -> Pin | None:
        """Keeps a page that is held, until the pin is released; None when it is not held."""
        page = self._pages.get(key)
        if page is None:
            return None
        page.pins += 1
        self._queues.dequeue(page)
        return Pin(self, page)

    # -- writing -----------------------------------------------------------------------------------------------

    def put(self, key: PageKey, data: bytes) -> bool:
        """Holds a clean page, if there is room. A dirty page is newer, and stays as it is (False)."""
        page = self._pages.get(key)
        if page is not None and page.version:
            return False
        self._flights.pop(key, None)
        self._queues.requested(key)
        if page is None:
            return self._hold(key, data)
        if self._replace(page, data):
            return True
        self._drop(page)
        return False

    def put_dirty(self, key: PageKey, data: bytes) -> int:
        """Holds a page until `mark_clean` gets the version this returns. PageCacheFullError: nothing has changed."""
        if not data:
            raise ValueError("a page holds a byte at least")
        self._queues.requested(key)
        page = self._pages.get(key)
        held = self._hold(key, data) if page is None else self._replace(page, data)
        if not held:
            raise PageCacheFullError(
                f"no room for {len(data)} changed bytes in a page cache of {self._capacity_bytes}: "
                f"{self._dirty_bytes} are changed, others pinned; checkpoint, or raise page_cache_bytes"
            )
        self._flights.pop(key, None)
        page = self._pages[key]
        if not page.version:
            self._dirty[key] = page
            self._dirty_bytes += len(data)
        self._versions += 1
        page.version = self._versions
        self._queues.dequeue(page)
        return page.version

    def mark_clean(self, key: PageKey, version: int | None = None) -> bool:
        """The page is persisted, in that version (None: whichever it has). False: it was written again, or is gone."""
        page = self._dirty.get(key)
        if page is None or version not in (None, page.version):
            return False
        self._forget_dirty(page)
        self._settle(page)
        return True

    def dirty_pages(self, object_id: int | None = None) -> list[tuple[PageKey, int]]:
        """Keys and versions of what is dirty, in the order it first became so; of one object, or of all."""
        return [(k, p.version) for k, p in self._dirty.items() if object_id is None or k[0] == object_id]

    # -- dropping ----------------------------------------------------------------------------------------------

    def drop(self, keys: Iterable[PageKey]) -> int:
        """Forgets pages, dirty and pinned ones too: their bytes are no longer wanted. How many bytes went."""
        dropped_bytes = 0
        for key in keys:
            self._flights.pop(key, None)
            page = self._pages.get(key)
            if page is not None:
                dropped_bytes += len(page.data)
                self._drop(page)
        return dropped_bytes

    def drop_object(self, object_id: int, generation: int) -> int:
        """Forgets every page of an object at a generation, and whatever is being fetched of it."""
        under_way = [k for k in self._flights if (k[0], k[1]) == (object_id, generation)]
        return self.drop([*under_way, *self._objects.get((object_id, generation), ())])

    # -- room --------------------------------------------------------------------------------------------------

    def _make_room(self, size_bytes: int) -> bool:
        """Evicts until so many bytes fit; nothing at all if they cannot."""
        missing = self._used_bytes + self._inflight_bytes + size_bytes - self._capacity_bytes
        if missing > self._queues.evictable_bytes:
            return False
        while missing > 0:
            page = self._queues.evict()
            self.evicted_bytes += len(page.data)
            missing -= len(page.data)
            self._evictions += 1
            self._remove(page)
        return True

    def _hold(self, key: PageKey, data: bytes) -> bool:
        if not data or not self._make_room(len(data)):
            return False
        page = self._pages[key] = Page(key, data)
        page.resident = True
        self._objects.setdefault((key[0], key[1]), set()).add(key)
        self._used_bytes += len(data)
        self._queues.admit(page)
        self._queues.enqueue(page)
        return True

    def _replace(self, page: Page, data: bytes) -> bool:
        """New bytes for a page that is held. False: no room for more, nothing has changed."""
        was_queued = page.queue is not None
        self._queues.dequeue(page)
        grown_bytes = len(data) - len(page.data)
        fits = bool(data) and (grown_bytes <= 0 or self._make_room(grown_bytes))
        if fits:
            page.data = data
            self._used_bytes += grown_bytes
            self._dirty_bytes += grown_bytes if page.version else 0
        if was_queued:
            self._queues.enqueue(page)
        return fits

    def _drop(self, page: Page) -> None:
        if page.version:
            self._forget_dirty(page)
        self._queues.dequeue(page)
        self._remove(page)

    def _remove(self, page: Page) -> None:
        page.resident = False
        del self._pages[page.key]
        self._used_bytes -= len(page.data)
        siblings = self._objects[page.key[0], page.key[1]]
        siblings.discard(page.key)
        if not siblings:
            del self._objects[page.key[0], page.key[1]]

    def _forget_dirty(self, page: Page) -> None:
        del self._dirty[page.key]
        self._dirty_bytes -= len(page.data)
        page.version = 0

    def _unpin(self, page: Page) -> None:
        page.pins -= 1
        self._settle(page)

    def _settle(self, page: Page) -> None:
        """Lets go of a page that nothing holds any more."""
        if page.resident and page.queue is None and not page.pins and not page.version:
            self._queues.enqueue(page)


def _raise_again(error: Exception) -> NoReturn:
    """The same error in another task. Ours are copied: one exception raised in several would mix their tracebacks."""
    if not isinstance(error, Aof2Error):
        raise error
    copy = type(error).__new__(type(error), *error.args)  # __init__ would word the message again
    copy.__dict__.update(error.__dict__)
    raise copy from error
