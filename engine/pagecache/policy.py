"""Which page goes: S3-FIFO, with quick repeats counted once.

Why S3-FIFO. A page that is read once must not cost a page that is read often, because Spark scans are larger than any
cache. LRU fails that. SLRU and 2Q pass, but move a page on every hit, and 2Q makes every hot page miss twice. S3-FIFO
(Yang et al., SOSP '23) keeps new pages in a small FIFO, a tenth of the cache; what is not asked for again while in
there leaves through it, and only its key is remembered; what is asked for again, or comes back while its key is
remembered, goes to the main FIFO, where a page survives a round for each time it was used. A hit is one addition.

What is added. One read of a block arrives as several requests (the kernel asks for 128 KiB to 1 MiB at a time), and
several scans run side by side, so every page of a scan would look used again. A repeat therefore counts only when,
since the page came or last counted, a sixteenth as many pages came in as are held, or as many requests for other pages
were made as pages are held. Hot pages pass one of the two sooner or later; the pieces of one block pass neither, up to
about thirty scans side by side in a cache of 512 pages.

Invariants
- Only pages in a queue can be evicted. Dirty pages are in none; clean again, they return to the end of theirs.
- `evictable_bytes` is what the queues hold.
- Remembered keys stand for no more bytes than the cache has, and are at most GHOSTS_MAX.

Owner: the PageCache. Crash: memory only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

SMALL_SHARE: Final = 0.1
USES_MAX: Final = 3
GHOSTS_MAX: Final = 1 << 17
REPEAT_SHARE: Final = 16


class PageKey(NamedTuple):
    """A block of an object at a generation. A plain tuple of the three is as good."""

    object_id: int
    generation: int
    block_index: int


class Page:
    """A page held. `version` 0: clean; `queue` None: dirty or dropped."""

    __slots__ = (
        "admissions_mark",
        "data",
        "in_main",
        "key",
        "queue",
        "requests_mark",
        "uses",
        "version",
    )

    def __init__(self, key: PageKey, data: bytes) -> None:
        self.key = key
        self.data = data
        self.version = 0
        self.queue: Queue | None = None
        self.in_main = False
        self.uses = 0
        self.admissions_mark = 0
        self.requests_mark = 0


class Queue:
    """Pages in the order they came, and their bytes."""

    __slots__ = ("pages", "size_bytes")

    def __init__(self) -> None:
        self.pages: OrderedDict[PageKey, Page] = OrderedDict()
        self.size_bytes = 0

    def append(self, page: Page) -> None:
        self.pages[page.key] = page
        self.size_bytes += len(page.data)
        page.queue = self

    def remove(self, page: Page) -> None:
        del self.pages[page.key]
        self.size_bytes -= len(page.data)
        page.queue = None

    def pop_oldest(self) -> Page:
        page = next(iter(self.pages.values()))
        self.remove(page)
        return page


class EvictionQueues:
    """The pages that may go, and in which order."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._small = Queue()
        self._main = Queue()
        self._ghosts: OrderedDict[PageKey, int] = OrderedDict()
        self._ghost_bytes = 0
        self._admissions = 0
        self._requests = 0  # a run of requests for one page is one
        self._last_key: PageKey | None = None

    @property
    def evictable_bytes(self) -> int:
        return self._small.size_bytes + self._main.size_bytes

    def requested(self, key: PageKey) -> None:
        """A caller gets or puts a page, held or not."""
        if key != self._last_key:
            self._requests += 1
            self._last_key = key

    def admit(self, page: Page) -> None:
        """A page that was not held. One that left not long ago goes to the main queue at once."""
        size_bytes = self._ghosts.pop(page.key, None)
        self._ghost_bytes -= size_bytes or 0
        page.in_main = size_bytes is not None
        self._admissions += 1
        self._mark(page)

    def enqueue(self, page: Page) -> None:
        """The page may be evicted from now on."""
        (self._main if page.in_main else self._small).append(page)

    def dequeue(self, page: Page) -> None:
        """The page may not be evicted for now. Its bytes may change only while it is in no queue."""
        if page.queue is not None:
            page.queue.remove(page)

    def used(self, page: Page) -> None:
        """A hit."""
        held = len(self._small.pages) + len(self._main.pages)
        came = self._admissions - page.admissions_mark
        asked = self._requests - page.requests_mark
        if came > held // REPEAT_SHARE or asked >= max(1, held):
            page.uses = min(USES_MAX, page.uses + 1)
            self._mark(page)

    def _mark(self, page: Page) -> None:
        page.admissions_mark = self._admissions
        page.requests_mark = self._requests

    def evict(self) -> Page:
        """Takes out the page that goes next. There must be one."""
        while True:
            if self._small.size_bytes > self._capacity_bytes * SMALL_SHARE or not self._main.pages:
                page = self._small.pop_oldest()
                if not page.uses:
                    self._remember(page)
                    return page
                page.in_main, page.uses = True, 0
            else:
                page = self._main.pop_oldest()
                if not page.uses:
                    return page
                page.uses -= 1
            self._main.append(page)

    def _remember(self, page: Page) -> None:
        self._ghosts[page.key] = len(page.data)
        self._ghost_bytes += len(page.data)
        while self._ghost_bytes > self._capacity_bytes or len(self._ghosts) > GHOSTS_MAX:
            _, size_bytes = self._ghosts.popitem(last=False)
            self._ghost_bytes -= size_bytes
