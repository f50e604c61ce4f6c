"""Blocks on their way here: one request for neighbours, one flight a block, each told to its readers as it lands.

Blocks that find room land in the backing file: those of a raw blob go from the connection into it, half a chunk by
one request; those of a compressed one, and of the warm copy, are unpacked in memory first, some 8 MiB at a time. What
finds no room is in memory alone, so a read never fails for lack of room.

Invariants
- Nothing unverified is told: a block's bytes match the crc64 of its seal before a reader gets them.
- A fetch that fails leaves no bit, no reservation, no bytes and no waiter.

Owner: the trio thread; downloads and file work on worker threads. A crash leaves bytes in backing files that no bit
speaks of.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import trio

from aof2.engine import objects, residency, segments
from aof2.engine.aio import open_nursery, result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import BlobRow, ChunkRow
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import CorruptError, FatalIOError, ReadOnlyError, TransientError
from aof2.engine.local.handles import Key, ObjectHandle
from aof2.engine.local.hot import HotCache, clear_range
from aof2.engine.local.warm import WarmStore
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.observe.metrics import ReadMode, Result, StorageMetrics
from aof2.engine.pagecache import PageCache, PageKey
from aof2.engine.quota import Reservation
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.keys import is_pack
from aof2.engine.residency import REMOTE_TIER
from aof2.engine.runs import runs_of
from aof2.engine.tiering.fetch import BlobFetcher, Place, is_plain
from aof2.engine.tiering.windows import Window

log = logging.getLogger(__name__)

REQUEST_BYTES: Final = 8 << 20  # of what is held in memory
AT_ONCE_BYTES: Final = 64 << 10
STREAM_BYTES: Final = 32 << 20  # of what lands as it comes: two of them at once keep a reader ahead of a chunk
REQUESTS_MAX: Final = 4
WRITEBACK_BYTES_MIN: Final = 1 << 20
ATTEMPTS: Final = 2
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

CRASH_POINTS: Final = ("hydrate.written",)


class Room(Protocol):
    """Where fetched blocks may land."""

    async def take(self, tenant: str, size_bytes: int) -> Reservation | None:
        """Room for so many bytes, made by eviction if need be; None when there is none to be had."""

    def give_back(self, tenant: str, size_bytes: int) -> None:
        """Bytes that had landed turned out not to be there."""


Block = bytes | memoryview
Land = Callable[[Sequence[Block]], None]
Said = set[tuple[int, int]]  # chunks, and the tiers that the log knows they are being fetched from


class Neighbours(NamedTuple):
    """A stretch of a pack that came for one of its members."""

    stream_id: int
    tenant: str
    chunk_id: int
    window: Window
    data: bytes


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


def _fetched(fetch: Callable[[], Sequence[bytes | memoryview]], land: Land | None) -> tuple[int, list[bytes]]:
    """How many bytes, and the blocks where they did not land."""
    blocks = fetch()
    size = sum(map(len, blocks))
    if land is None:
        return size, [bytes(block) for block in blocks]
    land(blocks)
    return size, []


class Flights:
    """What is being fetched. `on_landed(handle, first block, count)` for what is in a backing file now, `on_neighbours`
    for what came with a small file."""

    def __init__(
        self,
        catalog: Catalog,
        writer: CatalogWriter,
        hot: HotCache,
        fetcher: BlobFetcher,
        room: Room,
        pages: PageCache,
        *,
        block_bytes: int,
        parallel: int,
        warm: WarmStore | None,
        metrics: StorageMetrics,
        recently_evicted: Callable[[tuple[int, int]], bool],
        on_landed: Callable[[ObjectHandle, int, int], None],
        on_neighbours: Callable[[Neighbours], None],
    ) -> None:
        self.fetched_bytes = 0
        self._catalog = catalog
        self._writer = writer
        self._hot = hot
        self._fetcher = fetcher
        self._room = room
        self._pages = pages
        self._warm = warm
        self._block_bytes = block_bytes
        self._metrics = metrics
        self._recently_evicted = recently_evicted
        self._on_landed = on_landed
        self._on_neighbours = on_neighbours
        # A request may hold its bytes in memory; a handful of large ones keeps a link busy.
        self._limiter = trio.CapacityLimiter(min(parallel, REQUESTS_MAX))
        # A reader that waits does not queue behind what is fetched for later.
        self.urgent = trio.CapacityLimiter(min(parallel, REQUESTS_MAX))
        self._in_flight: dict[tuple[Key, int], trio.Event] = {}

    # -- who waits for what ------------------------------------------------------------------------------------

    def awaits(self, key: Key, block: int) -> bool:
        return (key, block) in self._in_flight

    def arriving(self) -> set[Key]:
        """Objects of which something is on its way."""
        return {key for key, _ in self._in_flight}

    async def landed_all(self, key: Key | None = None) -> None:
        """What was on its way, of one object or of all, is here or given up."""
        while (event := next((e for (k, _), e in self._in_flight.items() if key in (None, k)), None)) is not None:
            await event.wait()
            await trio.lowlevel.checkpoint()

    async def bring(self, handle: ObjectHandle, blocks: list[int], pages: dict[int, bytes] | None) -> bool:
        """The blocks are here, or in `pages`; True when the remote had to be waited for, as far as this call can see.

        Without `pages` they are for later: what finds no room is in the PageCache then, as long as that keeps it.
        """
        waiting = [event for b in blocks if (event := self._in_flight.get((handle.key, b))) is not None]
        mine = [b for b in blocks if (handle.key, b) not in self._in_flight]
        from_remote = bool(waiting)
        if mine:
            from_remote |= await self._start(handle, mine, pages)
        for event in waiting:
            await event.wait()
        return from_remote

    async def _start(self, handle: ObjectHandle, blocks: list[int], pages: dict[int, bytes] | None) -> bool:
        """Whether any of them was asked for in the remote: what is warm is on this disk."""
        said: Said = set()
        runs = self._runs(blocks, handle)
        for block in blocks:
            self._in_flight[handle.key, block] = trio.Event()
        if len(runs) == 1:
            await self._fly(handle, runs[0], pages, said)
        else:
            async with open_nursery() as nursery:
                for run in runs:
                    nursery.start_soon(self._fly, handle, run, pages, said)
        return any(tier == REMOTE_TIER for _, tier in said)

    def _runs(self, blocks: list[int], handle: ObjectHandle) -> list[_Run]:
        runs: list[_Run] = []
        for first, count in runs_of(blocks, lambda block: handle.locate(block)[0]):
            chunk, end = handle.locate(first)[0], first + count
            most = self._run_max(handle, handle.chunks[chunk])
            runs += [_Run(chunk, at, min(most, end - at)) for at in range(first, end, most)]
        return runs

    def _run_max(self, handle: ObjectHandle, chunk: ChunkRow) -> int:
        """More where blocks land as they come than where a request is held in memory."""
        if self.plain_blob(handle, chunk) is not None:
            return max(1, STREAM_BYTES // self._block_bytes)
        return self._held_max

    @property
    def _held_max(self) -> int:
        return max(1, REQUEST_BYTES // self._block_bytes)

    def plain_blob(self, handle: ObjectHandle, chunk: ChunkRow) -> BlobRow | None:
        """The remote copy, if that is where the blocks come from and they can go straight into the file."""
        if handle.written_to:
            return None
        if self._warm is not None and self._warm.has((handle.key[0], chunk.chunk_id)):
            return None
        with self._catalog.view() as view:
            blob = view.get(handle.key[0], t.BLOBS, chunk.sha256)
        # A member of a pack comes with its neighbours.
        return blob if blob is not None and is_plain(chunk, blob) and not is_pack(blob.key) else None

    async def _fly(self, handle: ObjectHandle, run: _Run, pages: dict[int, bytes] | None, said: Said) -> None:
        """One run; a reader that waits for a block goes on when that is here, whatever else is fetched with it."""
        try:
            await self._fetch_run(handle, run, pages, said)
        finally:
            for block in run.blocks:
                self._arrived(handle.key, block)

    def _arrived(self, key: Key, block: int) -> None:
        """Here, or given up: each waiter looks which it is."""
        event = self._in_flight.pop((key, block), None)
        if event is not None:
            event.set()

    async def _fetch_run(self, handle: ObjectHandle, run: _Run, pages: dict[int, bytes] | None, said: Said) -> None:
        size = sum(objects.on_disk(handle.block_len(b)) for b in run.blocks)
        reservation = await self._room.take(handle.tenant, size)
        handle.crowded = reservation is None
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
        left = next((b for b in run.blocks if not handle.is_resident(b)), None)
        if left is not None:
            await self._hold_run(handle, run.tail(left), pages, said)

    async def _hold_run(self, handle: ObjectHandle, run: _Run, pages: dict[int, bytes] | None, said: Said) -> None:
        """In memory: there is no room on the disk."""
        for i, data in enumerate(await self._fetch(handle, run, None, said, urgent=pages is not None)):
            self._pages.put(PageKey(handle.key[1], handle.key[2], run.first + i), data)
            if pages is not None:
                pages[run.first + i] = data

    async def _land_run(self, handle: ObjectHandle, run: _Run, said: Said, *, urgent: bool) -> bool:
        """The run is in the backing file; False when the disk is full, whatever the quota thinks."""
        try:
            handle.ensure_file(self._hot)
            if self.plain_blob(handle, handle.chunks[run.chunk]) is not None:
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
            handle.added_since_s = self._hot.env.monotonic_s()
        handle.add(range(first, first + count))
        self._on_landed(handle, first, count)
        for block in range(first, first + count):
            self._arrived(handle.key, block)

    def _write_blocks(self, handle: ObjectHandle, first: int, blocks: Sequence[bytes | memoryview]) -> None:
        self._hot.env.files.pwritev(handle.fd, blocks, first * self._block_bytes)
        self._written(handle, first * self._block_bytes, sum(map(len, blocks)))
        self._hot.env.failpoint("hydrate.written")

    def _written(self, handle: ObjectHandle, offset: int, size: int) -> bool:
        """The disk works while more comes in; otherwise all of it waits for the fsync. Only for a `fill`: a reader
        waits for the bytes alone, and writing out takes processors, too. On the worker thread; True: it began."""
        if not handle.filling or size < WRITEBACK_BYTES_MIN:
            return False
        self._hot.env.files.start_writeback(handle.fd, offset, size)
        return True

    async def _receive(self, handle: ObjectHandle, run: _Run, said: Said, *, urgent: bool) -> None:
        """Blocks of a plain blob from the connection into the file; each is told as it lands, and all that landed are
        before anything is made of how the fetch ended: what is not told is cleared away.

        Bytes can be damaged on the way: they are asked for once more before the remote copy is called damaged.
        """
        token = trio.lowlevel.current_trio_token()
        base = run.chunk * handle.blocks_per_chunk
        kept_back = range(0)  # blocks the disk was not told of yet
        came: deque[tuple[int, int]] = deque()  # (first block, count) that landed and were not told

        def tell() -> None:
            while came:
                self._landed(handle, *came.popleft())

        def landed(index: int, count: int) -> None:
            nonlocal kept_back
            block, last = base + index, base + index + count - 1
            kept_back = range(kept_back.start if kept_back.stop == block else block, last + 1)
            size = (len(kept_back) - 1) * self._block_bytes + handle.block_len(last)
            if self._written(handle, kept_back.start * self._block_bytes, size):
                kept_back = range(0)
            self._hot.env.failpoint("hydrate.written")
            came.append((block, count))
            token.run_sync_soon(tell)  # which may come after the thread's answer, and then has nothing to tell

        async def from_blob(blob: BlobRow) -> int:
            for attempt in range(1, ATTEMPTS + 1):
                rest = run.tail(next(b for b in run.blocks if not handle.is_resident(b)))
                place = Place(self._hot.env.files, handle.fd, rest.first * self._block_bytes)
                try:
                    work = partial(self._fetcher.receive, chunk, blob, rest.first - base, rest.length, place, landed)
                    size = await trio.to_thread.run_sync(work, limiter=self.urgent if urgent else self._limiter)
                except BaseException as e:
                    tell()
                    self._clear_away(handle, run)
                    if not isinstance(e, CorruptError) or attempt == ATTEMPTS:
                        raise
                else:
                    tell()
                    return size
            raise AssertionError("unreachable: the last attempt returns or raises")

        chunk = handle.chunks[run.chunk]
        await self._asking_remote(handle, chunk, said, from_blob)

    def _clear_away(self, handle: ObjectHandle, run: _Run) -> None:
        """What came of blocks that are not whole, or not right: it would take room that the quota does not count."""
        first = next((b for b in run.blocks if not handle.is_resident(b)), None)
        if first is not None:
            start, last = first * self._block_bytes, run.first + run.length - 1
            with contextlib.suppress(OSError):
                clear_range(handle.fd, start, last * self._block_bytes + handle.block_len(last) - start)

    async def _fetch(
        self, handle: ObjectHandle, run: _Run, land: Land | None, said: Said, *, urgent: bool
    ) -> list[bytes]:
        """The run's blocks from the nearest tier that has them: given to `land` on the worker thread, or returned."""
        chunk = handle.chunks[run.chunk]
        first = run.first - run.chunk * handle.blocks_per_chunk
        warm = await self._from_warm(handle, chunk, first, run.length, land, said)
        if warm is not None:
            return warm
        blocks: list[bytes] = []

        async def from_blob(blob: BlobRow) -> int:
            pack_bytes = self._pack_bytes(handle.key[0], blob)
            came: list[tuple[Window, bytes]] = []
            fetch = partial(
                self._fetcher.blocks,
                chunk,
                blob,
                first,
                run.length,
                pack_bytes=pack_bytes,
                came=lambda window, data: came.append((window, data)),
            )
            size, found = await self._verified(blob, fetch, land, in_pack=pack_bytes > 0, urgent=urgent)
            for window, data in came:
                self._on_neighbours(Neighbours(handle.key[0], handle.tenant, chunk.chunk_id, window, data))
            blocks.extend(found)
            return size

        await self._asking_remote(handle, chunk, said, from_blob)
        return blocks

    async def _in_thread(
        self, fetch: Callable[[], Sequence[bytes | memoryview]], land: Land | None, *, urgent: bool
    ) -> tuple[int, list[bytes]]:
        """One hop for fetching and writing: bytes that land are not passed around."""
        return await trio.to_thread.run_sync(_fetched, fetch, land, limiter=self.urgent if urgent else self._limiter)

    # -- the tiers ---------------------------------------------------------------------------------------------

    async def _asking_remote(
        self, handle: ObjectHandle, chunk: ChunkRow, said: Said, work: Callable[[BlobRow], Awaitable[int]]
    ) -> None:
        """`work` gets so many bytes from the chunk's blob. What goes wrong is recorded."""
        stream_id = handle.key[0]
        with self._catalog.view() as view:
            blob = view.get(stream_id, t.BLOBS, chunk.sha256)
        if blob is None:
            raise NotAvailableError(f"chunk {chunk.chunk_id} has no copy anywhere", path=str(handle.path))
        self.say_started(stream_id, chunk.chunk_id, REMOTE_TIER, said)
        try:
            size = await self._at_its_place(stream_id, chunk, blob, work)
        except RemoteMissingError as e:
            await self._failed(stream_id, chunk, ReasonCode.OBJECT_MISSING)
            raise NotAvailableError(f"chunk {chunk.chunk_id} is missing in the remote", path=blob.key) from e
        except CorruptError:
            await self._failed(stream_id, chunk, ReasonCode.OBJECT_MISSING)
            raise
        except TransientError:
            await self._failed(stream_id, chunk, ReasonCode.TRANSIENT)
            raise
        self.count_fetched((stream_id, chunk.chunk_id), size)

    async def _at_its_place(
        self, stream_id: int, chunk: ChunkRow, blob: BlobRow, work: Callable[[BlobRow], Awaitable[int]]
    ) -> int:
        """The blob may be moved to another pack, and the old one deleted, while a reader is on its way to it."""
        try:
            return await work(blob)
        except RemoteMissingError:
            with self._catalog.view() as view:
                now = view.get(stream_id, t.BLOBS, chunk.sha256)
            if now is None or now.location == blob.location:
                raise
            return await work(now)

    def say_started(self, stream_id: int, chunk_id: int, tier: int, said: Said) -> None:
        """Once a chunk and tier for what is fetched together: a commit for each of its runs would take their time."""
        if (chunk_id, tier) not in said:
            said.add((chunk_id, tier))
            self._writer.submit(stream_id, partial(residency.hydration_started, chunk_id=chunk_id, tier=tier))

    def count_fetched(self, slot: tuple[int, int], size: int) -> None:
        self.fetched_bytes += size
        self._metrics.remote_bytes_read_total[ReadMode.NORMAL].inc(size)
        self._metrics.hydrated_bytes_total.inc(size)
        self._metrics.hydrations_total[Result.OK].inc()
        if self._recently_evicted(slot):
            self._metrics.thrash_total.inc()

    async def _from_warm(
        self, handle: ObjectHandle, chunk: ChunkRow, first: int, count: int, land: Land | None, said: Said
    ) -> list[bytes] | None:
        """The blocks from the compressed copy on this disk, if there is one that holds."""
        slot = (handle.key[0], chunk.chunk_id)
        if self._warm is None or not self._warm.has(slot):
            return None
        self.say_started(*slot, 1, said)
        try:
            fetch = partial(self._warm.blocks, handle.tenant, chunk, slot, first, count)
            return (await self._in_thread(fetch, land, urgent=True))[1]
        except (CorruptError, FileNotFoundError) as e:
            log.warning("warm copy is damaged and given up", extra={"chunk_id": chunk.chunk_id, "error": str(e)})
            work = partial(segments.cooled, chunk_ids=[chunk.chunk_id])
            await result_of(self._writer.submit(slot[0], work, sync=True))
            await trio.to_thread.run_sync(self._warm.drop, [slot])
            return None

    def _pack_bytes(self, stream_id: int, blob: BlobRow) -> int:
        """Of the pack that the blob is in; 0: it is in none."""
        if not is_pack(blob.key):
            return 0
        with self._catalog.view() as view:
            row = view.get(stream_id, t.PACKS, blob.key)
        return row.pack_bytes if row is not None else 0

    async def _verified(
        self, blob: BlobRow, fetch: Callable[[], Sequence[Block]], land: Land | None, *, in_pack: bool, urgent: bool
    ) -> tuple[int, list[bytes]]:
        """Bytes can be damaged on the way: they are asked for once more before the remote copy is called damaged."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if in_pack and blob.raw_bytes <= AT_ONCE_BYTES and self._fetcher.windows.holds(blob.location):
                    return _fetched(fetch, land)  # in memory, and short: a thread would take longer
                return await self._in_thread(fetch, land, urgent=urgent)
            except CorruptError:
                self._fetcher.forget(blob.key)
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _failed(self, stream_id: int, chunk: ChunkRow, reason: ReasonCode) -> None:
        self._metrics.hydrations_total[Result.ERROR].inc()
        work = partial(residency.hydration_failed, chunk_id=chunk.chunk_id, reason_code=int(reason))
        with contextlib.suppress(ReadOnlyError, FatalIOError, OSError):  # the reader is told what happened either way
            await result_of(self._writer.submit(stream_id, work))
