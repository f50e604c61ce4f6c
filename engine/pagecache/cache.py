"""PageCache: blocks and pages in memory, up to a number of bytes.

What finds no room on the disk is served from here (`tiering/flights.py` puts it, `tiering/hydrate.py` looks it up), and
changed pages wait here until they are persisted.

Invariants
- `used_bytes ≤ capacity_bytes`, always: room is made before a page is held; where there is none it is not held.
- Dirty pages stay. All others go in the order of `policy`. Clean means: another tier holds the same bytes.
- A dirty page is only replaced by a later `put_dirty`, and becomes clean only for the version that was persisted.

Bytes that a caller still refers to (a page it got) are the caller's; they are not counted here. That a block is fetched
once for all who wait is the business of those who fetch (`flights`).

Owner: the trio thread; no locks. A crash leaves nothing: what was dirty comes back from the WAL.
"""

from __future__ import annotations

from collections.abc import Iterable

from aof2.engine.errors import Aof2Error
from aof2.engine.pagecache.policy import EvictionQueues, Page, PageKey


class PageCacheFullError(Aof2Error):
    """A dirty page has no room: all the others are dirty. Persist some (checkpoint), then write again."""


class PageCache:
    """Keys are (object_id, generation, block_index); a page is 1 byte at least. Counts are since the start."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._pages: dict[PageKey, Page] = {}
        self._objects: dict[tuple[int, int], set[PageKey]] = {}
        self._dirty: dict[PageKey, Page] = {}
        self._queues = EvictionQueues(capacity_bytes)
        self._versions = 0
        self.used_bytes = self.dirty_bytes = 0
        self.hits = self.misses = 0
        self.evictions = self.evicted_bytes = 0

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    # -- reading -----------------------------------------------------------------------------------------------

    def peek(self, key: PageKey) -> bytes | None:
        """The page if it is held. Counts for nothing."""
        page = self._pages.get(key)
        return None if page is None else page.data

    def get(self, key: PageKey) -> bytes | None:
        """The page if it is held. A hit or a miss, which the policy sees."""
        self._queues.requested(key)
        page = self._pages.get(key)
        if page is None:
            self.misses += 1
            return None
        self._queues.used(page)
        self.hits += 1
        return page.data

    # -- writing -----------------------------------------------------------------------------------------------

    def put(self, key: PageKey, data: bytes) -> bool:
        """Holds a clean page, if there is room. A dirty page is newer, and stays as it is (False)."""
        page = self._pages.get(key)
        if page is not None and page.version:
            return False
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
                f"no room for {len(data)} changed bytes in a page cache of {self.capacity_bytes}: "
                f"{self.dirty_bytes} are changed; checkpoint, or raise page_cache_bytes"
            )
        page = self._pages[key]
        if not page.version:
            self._dirty[key] = page
            self.dirty_bytes += len(data)
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
        self._queues.enqueue(page)
        return True

    def dirty_pages(self, object_id: int | None = None) -> list[tuple[PageKey, int]]:
        """Keys and versions of what is dirty, in the order it first became so; of one object, or of all."""
        return [(k, p.version) for k, p in self._dirty.items() if object_id is None or k[0] == object_id]

    # -- dropping ----------------------------------------------------------------------------------------------

    def drop(self, keys: Iterable[PageKey]) -> int:
        """Forgets pages, dirty ones too: their bytes are no longer wanted. How many bytes went."""
        dropped_bytes = 0
        for key in keys:
            page = self._pages.get(key)
            if page is not None:
                dropped_bytes += len(page.data)
                self._drop(page)
        return dropped_bytes

    def drop_object(self, object_id: int, generation: int) -> int:
        """Forgets every page of an object at a generation."""
        return self.drop([*self._objects.get((object_id, generation), ())])

    # -- room --------------------------------------------------------------------------------------------------

    def _make_room(self, size_bytes: int) -> bool:
        """Evicts until so many bytes fit; nothing at all if they cannot."""
        missing = self.used_bytes + size_bytes - self.capacity_bytes
        if missing > self._queues.evictable_bytes:
            return False
        while missing > 0:
            page = self._queues.evict()
            self.evicted_bytes += len(page.data)
            missing -= len(page.data)
            self.evictions += 1
            self._remove(page)
        return True

    def _hold(self, key: PageKey, data: bytes) -> bool:
        if not data or not self._make_room(len(data)):
            return False
        page = self._pages[key] = Page(key, data)
        self._objects.setdefault((key[0], key[1]), set()).add(key)
        self.used_bytes += len(data)
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
            self.used_bytes += grown_bytes
            self.dirty_bytes += grown_bytes if page.version else 0
        if was_queued:
            self._queues.enqueue(page)
        return fits

    def _drop(self, page: Page) -> None:
        if page.version:
            self._forget_dirty(page)
        self._queues.dequeue(page)
        self._remove(page)

    def _remove(self, page: Page) -> None:
        del self._pages[page.key]
        self.used_bytes -= len(page.data)
        siblings = self._objects[page.key[0], page.key[1]]
        siblings.discard(page.key)
        if not siblings:
            del self._objects[page.key[0], page.key[1]]

    def _forget_dirty(self, page: Page) -> None:
        del self._dirty[page.key]
        self.dirty_bytes -= len(page.data)
        page.version = 0
