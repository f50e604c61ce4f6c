"""Reading objects: from the backing file where the blocks are here, from the remote where they are not.

    PageCache → hot_cache → warm → remote

Single flight a block: whoever comes second waits for the first. A sequential reader is kept supplied in the background,
up to a whole chunk ahead; random reading fetches just the blocks asked for. Blocks that find room land in the backing
file; those that do not are served from the PageCache alone, so a read never fails for lack of room.

Invariants
- Nothing unverified is returned: a fetched block matches the crc64 of its seal, a local one is trusted (see `handles`)
  or checked now. A local block that fails is given up, in the catalog first, and fetched again.
- A residency bit is recorded only after fdatasync of its bytes, by `settle`.
- A fetch that fails leaves no bit, no reservation and nobody waiting.

Owner: the trio thread; downloads and file work on worker threads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import msgspec
import trio

from aof2 import native
from aof2.engine import objects
from aof2.engine.aio import open_nursery, result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import BlobRow, ChunkRow
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import Aof2Error, CorruptError, FatalIOError, ReadOnlyError, TransientError
from aof2.engine.local.handles import HandleTable, Key, ObjectHandle, load_handle
from aof2.engine.local.hot import HotCache, clear_range, read_cached, read_exactly
from aof2.engine.local.warm import WarmStore
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.observe.metrics import FetchTier, ReadMode, Result, StorageMetrics
from aof2.engine.pagecache import PageCache, PageKey
from aof2.engine.quota import Reservation
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.tiering.fetch import BlobFetcher, Place, is_plain
from aof2.engine.tiering.hashing import block_crc

log = logging.getLogger(__name__)

REQUEST_BYTES: Final = 8 << 20
REQUESTS_MAX: Final = 4
# Losing what was not recorded yet means fetching it again: not worth an fsync more often than this.
SETTLE_PERIOD_S: Final = 1.0
SETTLE_AGE_MAX_S: Final = 5.0
WRITEBACK_BYTES_MIN: Final = 1 << 20
BEHIND_BLOCKS: Final = 4
GLANCE_BYTES_MAX: Final = 128 << 10
GLANCES_KEPT_S: Final = 60.0
ATTEMPTS: Final = 2
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

CRASH_POINTS: Final = ("hydrate.written", "hydrate.synced", "hydrate.recorded")


class Room(Protocol):
    """Where fetched blocks may land."""

    async def take(self, tenant: str, size_bytes: int) -> Reservation | None:
        """Room for so many bytes, made by eviction if need be; None when there is none to be had."""

    def give_back(self, tenant: str, size_bytes: int) -> None:
        """Bytes that had landed turned out not to be there."""


Land = Callable[[Sequence[bytes | memoryview]], None]
_Said = set[tuple[int, int]]  # chunks, and the tiers that the log knows they are being fetched from


class NotAvailableError(CorruptError):
    """The bytes are neither here nor in the remote. `NeedsRepair` in the log; other copies may still have them."""


class _Run(NamedTuple):
    """Neighbouring blocks of one chunk, fetched by one request."""

    chunk: int
    first: int  # block of the object
    length: int

    @property
    def blocks(self) -> range:
        return range(self.first, self.first + self.length)

    def tail(self, first: int) -> _Run:
        return self._replace(first=first, length=self.first + self.length - first)


class Hydrator:
    """Reads and hydrates."""

    def __init__(
        self,
        catalog: Catalog,
        writer: CatalogWriter,
        hot: HotCache,
        handles: HandleTable,
        fetcher: BlobFetcher,
        room: Room,
        pages: PageCache,
        *,
        block_bytes: int,
        parallel: int = 16,
        warm: WarmStore | None = None,
        metrics: StorageMetrics | None = None,
        recently_evicted: Callable[[tuple[int, int]], bool] = lambda _: False,
    ) -> None:
        self.catalog = catalog
        self.writer = writer
        self.hot = hot
        self.fetcher = fetcher
        self.room = room
        self.pages = pages
        self.handles = handles
        self.warm = warm
        self.block_bytes = block_bytes
        self.fetched_bytes = 0
        self.on_landed: Callable[[Key, int, int], None] | None = None  # object, first block, how many
        self._metrics = metrics or StorageMetrics()
        self._recently_evicted = recently_evicted
        # A request may hold its bytes in memory; a handful of large ones keeps a link busy.
        self._limiter = trio.CapacityLimiter(min(parallel, REQUESTS_MAX))
        # A reader that waits does not queue behind what is fetched for later.
        self._urgent = trio.CapacityLimiter(min(parallel, REQUESTS_MAX))
        self._nursery: trio.Nursery | None = None
        self._in_flight: dict[tuple[Key, int], trio.Event] = {}
        self._settle_wanted = trio.Event()

    # -- handles -----------------------------------------------------------------------------------------------

    async def open(self, key: Key, tenant: str) -> ObjectHandle:
        """The object in use; `close` it. Its backing file is compared with what the catalog knows of it."""
        while (event := self.handles.evicting.get(key)) is not None:
            await event.wait()
        handle = self.handles.get(key)
        if handle is None:
            with self.catalog.view() as view:
                handle = load_handle(view, self.hot, key, tenant, self.block_bytes)
            self.handles.put(handle)
        handle.users += 1
        return handle

    def close(self, handle: ObjectHandle) -> None:
        handle.users -= 1

    # -- reading -----------------------------------------------------------------------------------------------

    async def read(self, handle: ObjectHandle, offset: int, length: int) -> bytes:
        """The bytes, verified, from wherever they are; short only at the end of the object."""
        end = min(offset + length, handle.size)
        if offset >= end:
            return b""
        started_s = self.hot.env.monotonic_s()
        tier, data = await self._read(handle, offset, end)
        self._metrics.page_fetch_latency_seconds[tier].observe(self.hot.env.monotonic_s() - started_s)
        return data

    async def _read(self, handle: ObjectHandle, offset: int, end: int) -> tuple[FetchTier, bytes]:
        """The bytes, and the furthest tier that had to be asked."""
        await self.attach(handle)
        tier = FetchTier.LOCAL
        first, last = offset // self.block_bytes, (end - 1) // self.block_bytes
        self._read_ahead(handle, offset, end)
        for _ in range(8):
            absent = handle.not_ready(first, last)
            if not absent:
                data = await self._read_local(handle, offset, end - offset)
                if data is not None:
                    return tier, data
                continue
            pages, from_remote = await self.obtain(handle, absent)
            if from_remote:
                tier = FetchTier.REMOTE
            if any(block in pages for block in absent):
                tier = tier if tier is FetchTier.REMOTE else FetchTier.PAGE_CACHE
                return tier, await self._assemble(handle, offset, end, pages)
        raise CorruptError("local copies keep failing their checksums", path=str(handle.path), offset=offset)

    async def glance(self, handle: ObjectHandle, offset: int, length: int) -> bytes | None:
        """A few bytes somewhere in a cold file, and nothing around them: fetched by themselves, checked, not kept.

        Who looks at a block again gets all of it. None: read as usual.
        """
        end = min(offset + length, handle.size)
        if length > GLANCE_BYTES_MAX or offset >= end or self._goes_on(handle, offset):
            return None
        first, last = offset // self.block_bytes, (end - 1) // self.block_bytes
        if not all(self._untouched(handle, block) for block in range(first, last + 1)):
            return None
        chunk_index, at = divmod(offset, handle.row.chunk_bytes)
        chunk = handle.chunks[chunk_index]
        blob = self._plain_blob(handle, chunk)
        with self.catalog.view() as view:
            piece_crcs = view.get(handle.key[0], t.PIECES, chunk.chunk_id)
        if blob is None or piece_crcs is None or at + end - offset > chunk.length:
            return None
        self._note_read(handle, offset, end)
        now_s = self.hot.env.monotonic_s()
        if now_s - handle.glanced_since_s > GLANCES_KEPT_S:
            handle.forget_glances(now_s)
        handle.glanced.update(range(first, last + 1))
        return await self._glance(handle, chunk, partial(self.fetcher.glance, blob, piece_crcs, at, end - offset))

    def _untouched(self, handle: ObjectHandle, block: int) -> bool:
        return not (
            handle.is_resident(block)
            or block in handle.glanced
            or (handle.key, block) in self._in_flight
            or self.pages.peek(PageKey(handle.key[1], handle.key[2], block)) is not None
        )

    async def _glance(self, handle: ObjectHandle, chunk: ChunkRow, fetch: Callable[[], bytes | None]) -> bytes | None:
        started_s = self.hot.env.monotonic_s()
        try:
            data = await trio.to_thread.run_sync(fetch, limiter=self._urgent)
        except (CorruptError, TransientError):
            return None  # met again, and recorded, by reading as usual
        if data is not None:
            self._say_started(handle.key[0], chunk.chunk_id, 2, handle.glances_said)
            self._count_fetched((handle.key[0], chunk.chunk_id), len(data))
            self._metrics.page_fetch_latency_seconds[FetchTier.REMOTE].observe(self.hot.env.monotonic_s() - started_s)
        return data

    async def make_ready(self, handle: ObjectHandle, offset: int, length: int) -> bool:
        """The range is in the backing file, verified, for others to read; False when there is no room for it there."""
        end = min(offset + length, handle.size)
        if offset >= end:
            return True
        await self.attach(handle)
        first, last = offset // self.block_bytes, (end - 1) // self.block_bytes
        self._read_ahead(handle, offset, end)
        for _ in range(8):
            absent = handle.not_ready(first, last)
            if not absent:
                return True
            pages, _ = await self.obtain(handle, absent)
            if pages:
                return False
        return False

    async def fill(self, handle: ObjectHandle) -> None:
        """Brings the whole object to this disk, as far as there is room, and records it: `warm`."""
        await self.attach(handle)
        step = 4 * handle.blocks_per_chunk
        handle.filling += 1
        try:
            for first in range(0, handle.block_count, step):
                absent = handle.not_ready(first, min(first + step, handle.block_count) - 1)
                if absent:
                    await self.obtain(handle, absent, wanted=False)
        finally:
            handle.filling -= 1
        await self.settle()

    async def attach(self, handle: ObjectHandle) -> None:
        """Opens the backing file if there should be one, and decides what of it may be trusted."""
        if handle.fd >= 0 or not any(handle.masks):
            return
        try:
            fd = self.hot.open(handle.path)
        except FileNotFoundError:
            log.warning("backing file is missing", extra={"path": str(handle.path)})
            await self.give_up(handle, [b for b in range(handle.block_count) if handle.is_resident(b)])
            return
        handle.fd = fd
        handle.accept(self.hot.identity(fd))

    def ensure_backing(self, handle: ObjectHandle) -> None:
        """The backing file, open; a new, sparse one where nothing of the object is here."""
        if handle.fd < 0:
            handle.fd = self.hot.create(handle.path, handle.size)

    async def prove(self, handle: ObjectHandle) -> None:
        """Whatever of the object is here but not trusted is checked; what fails is given up."""
        await self._recheck(handle, [b for b in range(handle.block_count) if handle.is_resident(b)])

    async def _read_local(self, handle: ObjectHandle, offset: int, length: int) -> bytes | None:
        data = read_cached(handle.fd, offset, length)
        if data is not None:
            return data
        try:
            return await trio.to_thread.run_sync(read_exactly, handle.fd, offset, length)
        except CorruptError:
            # Shorter than it was: whatever is left of it must prove itself again.
            handle.trusted = [0] * len(handle.chunks)
            return None

    async def _assemble(self, handle: ObjectHandle, offset: int, end: int, pages: dict[int, bytes]) -> bytes:
        parts: list[bytes] = []
        for block in range(offset // self.block_bytes, (end - 1) // self.block_bytes + 1):
            start = block * self.block_bytes
            low, high = max(offset, start), min(end, start + self.block_bytes)
            page = pages.get(block)
            if page is not None:
                parts.append(page[low - start : high - start])
            else:
                parts.append((await self._read(handle, low, high))[1])
        return b"".join(parts)

    # -- what to fetch -----------------------------------------------------------------------------------------

    def _read_ahead(self, handle: ObjectHandle, offset: int, end: int) -> None:
        """Keeps a sequential reader supplied: fetches on, in the background, before it gets there."""
        self._note_read(handle, offset, end)
        last = (end - 1) // self.block_bytes
        if end - handle.run_start < self.block_bytes:
            return  # a look here and there, in pieces perhaps, is not a reader that goes on
        handle.frontier = max(handle.frontier, last + 1)
        if handle.frontier - last > handle.window_blocks // 2 + 1 or handle.frontier >= handle.block_count:
            return
        # Twice as much each time, up to a chunk: a short look costs little, a long read gets all there is.
        handle.window_blocks = min(handle.window_blocks * 2, handle.blocks_per_chunk)
        stop = min(handle.frontier + handle.window_blocks, handle.block_count)
        ahead = handle.not_ready(handle.frontier, stop - 1)
        handle.frontier = stop
        self._prefetch_soon(handle, ahead)

    def _goes_on(self, handle: ObjectHandle, offset: int) -> bool:
        """Whether somebody who reads there goes on from where the last one was."""
        # Not every read comes here: what has landed may be read without asking (`files`), up to the frontier.
        reach = max(handle.next_offset + self.block_bytes, handle.frontier * self.block_bytes)
        # And several are on their way at once, in any order.
        return handle.next_offset - BEHIND_BLOCKS * self.block_bytes <= offset <= reach

    def _note_read(self, handle: ObjectHandle, offset: int, end: int) -> None:
        if self._goes_on(handle, offset):
            handle.next_offset = max(handle.next_offset, end)
        else:
            handle.window_blocks, handle.next_offset, handle.run_start = 1, end, offset
            handle.frontier = (end - 1) // self.block_bytes + 1

    def _prefetch_soon(self, handle: ObjectHandle, blocks: list[int]) -> None:
        if blocks and self._nursery is not None:
            self._nursery.start_soon(self._prefetch, handle, blocks)

    async def _prefetch(self, handle: ObjectHandle, blocks: list[int]) -> None:
        handle.users += 1
        try:
            await self.obtain(handle, blocks, wanted=False)
        except (Aof2Error, OSError) as e:
            # Whoever really reads there meets the error again, and is told.
            log.debug("read-ahead failed", extra={"path": str(handle.path), "error": str(e)})
        finally:
            handle.users -= 1

    def _runs(self, blocks: list[int], handle: ObjectHandle) -> list[_Run]:
        runs: list[_Run] = []
        most: dict[int, int] = {}
        for block in blocks:
            chunk = handle.locate(block)[0]
            if chunk not in most:
                most[chunk] = self._run_max(handle, handle.chunks[chunk])
            if (
                runs
                and runs[-1].chunk == chunk
                and runs[-1].first + runs[-1].length == block
                and runs[-1].length < most[chunk]
            ):
                runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
            else:
                runs.append(_Run(chunk, block, 1))
        return runs

    def _run_max(self, handle: ObjectHandle, chunk: ChunkRow) -> int:
        """A whole chunk where its blocks land one by one as they come; less where a request is held in memory."""
        if self._plain_blob(handle, chunk) is not None:
            return handle.blocks_per_chunk
        return self._held_max

    @property
    def _held_max(self) -> int:
        return max(1, REQUEST_BYTES // self.block_bytes)

    def _plain_blob(self, handle: ObjectHandle, chunk: ChunkRow) -> BlobRow | None:
        """The remote copy, if that is where the blocks come from and they can go straight into the file."""
        if self.warm is not None and self.warm.has((handle.key[0], chunk.chunk_id)):
            return None
        with self.catalog.view() as view:
            blob = view.get(handle.key[0], t.BLOBS, chunk.sha256)
        return blob if blob is not None and is_plain(chunk, blob) else None

    # -- fetching ----------------------------------------------------------------------------------------------

    async def obtain(
        self, handle: ObjectHandle, blocks: list[int], *, wanted: bool = True
    ) -> tuple[dict[int, bytes], bool]:
        """Makes the blocks ready: those that found no room on disk, and whether the remote had to be waited for.

        Not `wanted`: for later. What finds no room is in the PageCache then, as long as that keeps it.
        """
        blocks = await self._recheck(handle, blocks)
        pages: dict[int, bytes] = {}
        missing: list[int] = []
        for block in blocks:
            page = self.pages.peek(PageKey(handle.key[1], handle.key[2], block))
            if page is not None:
                pages[block] = page
            else:
                missing.append(block)
        waiting = [event for b in missing if (event := self._in_flight.get((handle.key, b))) is not None]
        mine = [b for b in missing if (handle.key, b) not in self._in_flight]
        said: _Said = set()
        runs = self._runs(mine, handle)
        for block in mine:
            self._in_flight[handle.key, block] = trio.Event()
        async with open_nursery() as nursery:
            for run in runs:
                nursery.start_soon(self._fly, handle, run, pages if wanted else None, said)
        for event in waiting:
            await event.wait()
        return pages, bool(mine or waiting)

    async def _fly(self, handle: ObjectHandle, run: _Run, pages: dict[int, bytes] | None, said: _Said) -> None:
        """One run; whoever waits for a block of it goes on when that is here, whatever else is fetched with it."""
        try:
            await self._fetch_run(handle, run, pages, said)
        finally:
            for block in run.blocks:
                self._arrived(handle.key, block)

    def _arrived(self, key: Key, block: int) -> None:
        """Here, or given up: who waited looks for himself."""
        event = self._in_flight.pop((key, block), None)
        if event is not None:
            event.set()

    async def _recheck(self, handle: ObjectHandle, blocks: list[int]) -> list[int]:
        """Resident but untrusted blocks prove themselves; those that fail are given up."""
        suspects = [b for b in blocks if handle.is_resident(b) and not handle.is_ready(b)]
        bad: list[int] = []
        for block in suspects:
            if await trio.to_thread.run_sync(self._check_block, handle, block):
                handle.trust(block)
            else:
                bad.append(block)
        if bad:
            log.warning("local copy is damaged and fetched again", extra={"path": str(handle.path), "blocks": bad})
            await self.give_up(handle, bad)
        return [b for b in blocks if not handle.is_ready(b)]

    def _check_block(self, handle: ObjectHandle, block: int) -> bool:
        chunk, index = handle.locate(block)
        try:
            data = read_exactly(handle.fd, block * self.block_bytes, handle.block_len(block))
        except CorruptError:
            return False
        return native.crc64(data) == block_crc(handle.chunks[chunk].block_crcs, index)

    async def give_up(self, handle: ObjectHandle, blocks: list[int]) -> None:
        by_chunk: dict[int, int] = {}
        for block in blocks:
            chunk, bit = handle.locate(block)
            by_chunk[chunk] = by_chunk.get(chunk, 0) | 1 << bit
            handle.remove(block)
        for chunk, bits in by_chunk.items():
            chunk_id = handle.chunks[chunk].chunk_id
            work = partial(objects.lost, chunk_id=chunk_id, bad=bits, block_bytes=self.block_bytes)
            self.room.give_back(handle.tenant, await result_of(self.writer.submit(handle.key[0], work)))

    async def _fetch_run(self, handle: ObjectHandle, run: _Run, pages: dict[int, bytes] | None, said: _Said) -> None:
        size = sum(objects.on_disk(handle.block_len(b)) for b in run.blocks)
        reservation = await self.room.take(handle.tenant, size)
        if reservation is None and run.length > self._held_max:
            for first in range(run.first, run.first + run.length, self._held_max):
                some = run._replace(first=first, length=min(self._held_max, run.first + run.length - first))
                await self._fetch_run(handle, some, pages, said)
            return
        if reservation is not None:
            try:
                if await self._land_run(handle, run, said, urgent=pages is not None):
                    return
            finally:
                here = sum(objects.on_disk(handle.block_len(b)) for b in run.blocks if handle.is_resident(b))
                reservation.commit(here)
                reservation.release()
        rest = run.tail(next(b for b in run.blocks if not handle.is_resident(b)))
        await self._hold_run(handle, rest, pages, said)

    async def _hold_run(self, handle: ObjectHandle, run: _Run, pages: dict[int, bytes] | None, said: _Said) -> None:
        """In memory: there is no room on the disk."""
        for i, data in enumerate(await self._fetch(handle, run, None, said, urgent=pages is not None)):
            self.pages.put(PageKey(handle.key[1], handle.key[2], run.first + i), data)
            if pages is not None:
                pages[run.first + i] = data

    async def _land_run(self, handle: ObjectHandle, run: _Run, said: _Said, *, urgent: bool) -> bool:
        """The run is in the backing file; False when the disk is full, whatever the quota thinks."""
        try:
            self.ensure_backing(handle)
            if self._plain_blob(handle, handle.chunks[run.chunk]) is not None:
                await self._receive(handle, run, said, urgent=urgent)
            else:
                await self._fetch(handle, run, partial(self._write_blocks, handle, run.first), said, urgent=urgent)
                self._landed(handle, run.first, run.length)
        except OSError as e:
            if e.errno not in NO_ROOM:
                raise
            log.warning("the disk is full: blocks are served from memory", extra={"path": str(handle.path)})
            return False
        return True

    def _landed(self, handle: ObjectHandle, first: int, count: int) -> None:
        """Blocks are in the file, and right."""
        if not handle.added:
            handle.added_since_s = self.hot.env.monotonic_s()
        handle.add(range(first, first + count))
        self._settle_wanted.set()
        if self.on_landed is not None:
            self.on_landed(handle.key, first, count)
        for block in range(first, first + count):
            self._arrived(handle.key, block)

    def _write_blocks(self, handle: ObjectHandle, first: int, blocks: Sequence[bytes | memoryview]) -> None:
        self.hot.env.files.pwritev(handle.fd, blocks, first * self.block_bytes)
        self._written(handle, first * self.block_bytes, sum(map(len, blocks)))
        self.hot.env.failpoint("hydrate.written")

    def _written(self, handle: ObjectHandle, offset: int, size: int) -> bool:
        """The disk works while more comes in; otherwise all of it waits for the fsync. Not while somebody waits for the
        bytes alone: writing them out takes processors, too. On the worker thread; True: it is on its way."""
        if not handle.filling or size < WRITEBACK_BYTES_MIN:
            return False
        self.hot.env.files.start_writeback(handle.fd, offset, size)
        return True

    async def _receive(self, handle: ObjectHandle, run: _Run, said: _Said, *, urgent: bool) -> None:
        """Blocks of a plain blob from the connection into the file; each is told as it lands.

        Bytes can be damaged on the way: they are asked for once more before the remote copy is called damaged.
        """
        token = trio.lowlevel.current_trio_token()
        base = run.chunk * handle.blocks_per_chunk
        kept_back = range(0)  # blocks the disk was not told of yet

        def landed(index: int) -> None:
            nonlocal kept_back
            block = base + index
            kept_back = range(kept_back.start if kept_back.stop == block else block, block + 1)
            size = (len(kept_back) - 1) * self.block_bytes + handle.block_len(block)
            if self._written(handle, kept_back.start * self.block_bytes, size):
                kept_back = range(0)
            self.hot.env.failpoint("hydrate.written")
            token.run_sync_soon(self._landed, handle, block, 1)

        async def from_blob(blob: BlobRow) -> int:
            for attempt in range(1, ATTEMPTS + 1):
                rest = run.tail(next(b for b in run.blocks if not handle.is_resident(b)))
                place = Place(self.hot.env.files, handle.fd, rest.first * self.block_bytes)
                try:
                    work = partial(self.fetcher.receive, chunk, blob, rest.first - base, rest.length, place, landed)
                    return await trio.to_thread.run_sync(work, limiter=self._urgent if urgent else self._limiter)
                except BaseException as e:
                    self._clear_away(handle, run)
                    if not isinstance(e, CorruptError) or attempt == ATTEMPTS:
                        raise
            raise AssertionError("unreachable: the last attempt returns or raises")

        chunk = handle.chunks[run.chunk]
        await self._asking_remote(handle, chunk, said, from_blob)

    def _clear_away(self, handle: ObjectHandle, run: _Run) -> None:
        """What came of a block that is not whole, or not right: it would take room that nobody accounts for."""
        block = next((b for b in run.blocks if not handle.is_resident(b)), None)
        if block is not None:
            with contextlib.suppress(OSError):
                clear_range(handle.fd, block * self.block_bytes, handle.block_len(block))

    async def _fetch(
        self, handle: ObjectHandle, run: _Run, land: Land | None, said: _Said, *, urgent: bool
    ) -> list[bytes]:
        """The run's blocks from the nearest tier that has them: given to `land` on the worker thread, or returned."""
        chunk = handle.chunks[run.chunk]
        first = run.first - run.chunk * handle.blocks_per_chunk
        warm = await self._from_warm(handle, chunk, first, run.length, land, said)
        if warm is not None:
            return warm
        blocks: list[bytes] = []

        async def from_blob(blob: BlobRow) -> int:
            size, found = await self._verified(chunk, blob, first, run.length, land, urgent=urgent)
            blocks.extend(found)
            return size

        await self._asking_remote(handle, chunk, said, from_blob)
        return blocks

    async def _in_thread(
        self, fetch: Callable[[], Sequence[bytes | memoryview]], land: Land | None, *, urgent: bool
    ) -> tuple[int, list[bytes]]:
        """One hop for fetching and writing: bytes that land are not passed around."""

        def work() -> tuple[int, list[bytes]]:
            blocks = fetch()
            size = sum(map(len, blocks))
            if land is None:
                return size, [bytes(block) for block in blocks]
            land(blocks)
            return size, []

        return await trio.to_thread.run_sync(work, limiter=self._urgent if urgent else self._limiter)

    async def _asking_remote(
        self, handle: ObjectHandle, chunk: ChunkRow, said: _Said, work: Callable[[BlobRow], Awaitable[int]]
    ) -> None:
        """`work` gets so many bytes from the chunk's blob. What goes wrong is recorded."""
        stream_id = handle.key[0]
        with self.catalog.view() as view:
            blob = view.get(stream_id, t.BLOBS, chunk.sha256)
        if blob is None:
            raise NotAvailableError(f"chunk {chunk.chunk_id} has no copy anywhere", path=str(handle.path))
        self._say_started(stream_id, chunk.chunk_id, 2, said)
        try:
            size = await work(blob)
        except RemoteMissingError as e:
            await self._failed(stream_id, chunk, ReasonCode.OBJECT_MISSING)
            raise NotAvailableError(f"chunk {chunk.chunk_id} is missing in the remote", path=blob.key) from e
        except CorruptError:
            await self._failed(stream_id, chunk, ReasonCode.OBJECT_MISSING)
            raise
        except TransientError:
            await self._failed(stream_id, chunk, ReasonCode.TRANSIENT)
            raise
        self._count_fetched((stream_id, chunk.chunk_id), size)

    def _say_started(self, stream_id: int, chunk_id: int, tier: int, said: _Said) -> None:
        """Once a chunk and tier for what is fetched together: a commit for each of its runs would take their time."""
        if (chunk_id, tier) not in said:
            said.add((chunk_id, tier))
            self.writer.submit(stream_id, lambda b: b.record(p.HydrationStarted(tier), segment_id=chunk_id))

    def _count_fetched(self, slot: tuple[int, int], size: int) -> None:
        self.fetched_bytes += size
        self._metrics.remote_bytes_read_total[ReadMode.NORMAL].inc(size)
        self._metrics.hydrated_bytes_total.inc(size)
        self._metrics.hydrations_total[Result.OK].inc()
        if self._recently_evicted(slot):
            self._metrics.thrash_total.inc()

    async def _from_warm(
        self, handle: ObjectHandle, chunk: ChunkRow, first: int, count: int, land: Land | None, said: _Said
    ) -> list[bytes] | None:
        """The blocks from the compressed copy on this disk, if there is one that holds."""
        slot = (handle.key[0], chunk.chunk_id)
        if self.warm is None or not self.warm.has(slot):
            return None
        self._say_started(*slot, 1, said)
        try:
            fetch = partial(self.warm.blocks, handle.tenant, chunk, slot, first, count)
            return (await self._in_thread(fetch, land, urgent=True))[1]
        except (CorruptError, FileNotFoundError) as e:
            log.warning("warm copy is damaged and given up", extra={"chunk_id": chunk.chunk_id, "error": str(e)})
            work = partial(objects.cooled, chunk_ids=[chunk.chunk_id])
            await result_of(self.writer.submit(slot[0], work, sync=True))
            await trio.to_thread.run_sync(self.warm.drop, [slot])
            return None

    async def _verified(
        self, chunk: ChunkRow, blob: BlobRow, first: int, count: int, land: Land | None, *, urgent: bool
    ) -> tuple[int, list[bytes]]:
        """Bytes can be damaged on the way: they are asked for once more before the remote copy is called damaged."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                fetch = partial(self.fetcher.blocks, chunk, blob, first, count)
                return await self._in_thread(fetch, land, urgent=urgent)
            except CorruptError:
                self.fetcher.forget(blob.key)
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _failed(self, stream_id: int, chunk: ChunkRow, reason: ReasonCode) -> None:
        self._metrics.hydrations_total[Result.ERROR].inc()
        work = partial(objects.hydration_failed, chunk_id=chunk.chunk_id, reason_code=int(reason))
        with contextlib.suppress(ReadOnlyError, FatalIOError, OSError):  # the reader is told what happened either way
            await result_of(self.writer.submit(stream_id, work))

    # -- recording ---------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Records what came in, a little later and for many blocks at once."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await self._run_settling()

    async def _run_settling(self) -> None:
        while True:
            await self._settle_wanted.wait()
            await trio.sleep(SETTLE_PERIOD_S)
            self._settle_wanted = trio.Event()
            try:
                await self._settle_quiet_ones()
            except (ReadOnlyError, FatalIOError):
                # Said where it happened. What is here is served; that it is here is forgotten with the process.
                return
            except OSError as e:
                log.warning("hydrated blocks are not recorded yet", extra={"error": str(e)})
                self._settle_wanted.set()

    async def quiesce(self) -> None:
        """Everything that was being fetched is here and recorded."""
        while self._in_flight:
            await next(iter(self._in_flight.values())).wait()
            await trio.lowlevel.checkpoint()
        await self.settle()

    async def quiesce_object(self, key: Key) -> None:
        """What was being fetched of one object is here and recorded."""
        while (event := next((e for (k, _), e in self._in_flight.items() if k == key), None)) is not None:
            await event.wait()
            await trio.lowlevel.checkpoint()
        handle = self.handles.peek(key)
        if handle is not None and handle.added:
            await self._settle_held(handle)

    async def _settle_quiet_ones(self) -> None:
        """What is still coming in is left alone for a while: an fsync under its writes would stall them."""
        arriving = {key for key, _ in self._in_flight}
        now_s = self.hot.env.monotonic_s()
        for handle in self.handles.dirty():
            if handle.key in arriving and now_s - handle.added_since_s < SETTLE_AGE_MAX_S:
                self._settle_wanted.set()
            else:
                await self._settle_held(handle)

    async def settle(self) -> None:
        """Makes the blocks that came in durable and known to the catalog."""
        for handle in self.handles.dirty():
            await self._settle_held(handle)

    async def _settle_held(self, handle: ObjectHandle) -> None:
        handle.users += 1  # not to be evicted under the sync
        try:
            await self._settle_one(handle)
        finally:
            handle.users -= 1

    async def _settle_one(self, handle: ObjectHandle) -> None:
        added, handle.added = handle.added, {}
        identity = await trio.to_thread.run_sync(self._sync_file, handle.fd)
        masks = {handle.chunks[c].chunk_id: bits for c, bits in added.items() if bits}
        # Blocks that landed while we synced make the identity stale: the next settle records it.
        backing = None if handle.added else identity
        stream_id, ino, generation = handle.key
        work = partial(
            objects.resident,
            ino=ino,
            generation=generation,
            masks=masks,
            backing=backing,
            block_bytes=self.block_bytes,
        )
        try:
            await result_of(self.writer.submit(stream_id, work))
        except OSError:  # the log has no room: the next settle tries again
            for chunk, bits in added.items():
                handle.added[chunk] = handle.added.get(chunk, 0) | bits & handle.masks[chunk]
            raise
        if backing is not None:
            handle.row = msgspec.structs.replace(handle.row, backing=backing)
        self.hot.env.failpoint("hydrate.recorded")

    def _sync_file(self, fd: int) -> tuple[int, int, int]:
        self.hot.env.files.fsync(fd)
        self.hot.env.failpoint("hydrate.synced")
        return self.hot.identity(fd)
