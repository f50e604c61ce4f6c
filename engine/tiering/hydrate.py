"""Reading objects: from the backing file where the blocks are here, from the remote where they are not.

    PageCache → hot_cache → warm → remote

A sequential reader is kept supplied in the background, up to a whole chunk ahead; random reading fetches just the
blocks asked for, and of a block that is looked at for the first time just the pieces (`glance`). How blocks get here:
`flights`; when that is recorded: `settle`.

Invariants
- Nothing unverified is returned: a fetched block matches the crc64 of its seal, a local one is trusted (see `handles`)
  or checked now. A local block that fails is given up, in the catalog first, and fetched again.
- A residency bit is recorded only after fdatasync of its bytes, by `settle`.
- A fetch that fails leaves no bit, no reservation and no waiter.

Owner: the trio thread; downloads and file work on worker threads.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple, Protocol

import trio

from aof2 import native
from aof2.engine import residency
from aof2.engine.aio import Tasks, result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import BlobRow, ChunkRow
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import Aof2Error, CorruptError, TransientError
from aof2.engine.local.handles import Glances, HandleTable, Key, ObjectHandle, ReadAhead, load_handle
from aof2.engine.local.hot import HotCache, read_cached, read_exactly
from aof2.engine.local.warm import WarmStore
from aof2.engine.locks import Rank, waits_for
from aof2.engine.observe.metrics import FetchTier, StorageMetrics
from aof2.engine.pagecache import PageCache, PageKey
from aof2.engine.recency import EvictionPolicy
from aof2.engine.tiering import flights, settle
from aof2.engine.tiering.fetch import BlobFetcher
from aof2.engine.tiering.flights import Flights, Room
from aof2.engine.tiering.hashing import block_crc
from aof2.engine.tiering.landing import Lander
from aof2.engine.tiering.recent import units_of
from aof2.engine.tiering.settle import Settler

log = logging.getLogger(__name__)

BEHIND_BLOCKS: Final = 4
GLANCE_BYTES_MAX: Final = 128 << 10
# A block takes as long as about three of its pieces: a reader that comes back that often might have had it all.
GLANCES_A_BLOCK: Final = 3
GLANCES_KEPT_S: Final = 60.0
# Of the PageCache, what one reader without room on the disk may have fetched ahead.
AHEAD_SHARE: Final = 8

CRASH_POINTS: Final = (*flights.CRASH_POINTS, *settle.CRASH_POINTS)


class _Glance(NamedTuple):
    blob: BlobRow
    piece_crcs: bytes
    offset: int  # in the chunk
    length: int


class Listener(Protocol):
    """Tells the kernel, or the channel, of what comes and goes."""

    def landed(self, key: Key, first: int, count: int) -> None:
        """Blocks came in."""

    async def lost(self, key: Key, blocks: list[int]) -> None:
        """Blocks turned out bad, or gone: they are not to be answered for any more."""


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
        policy: EvictionPolicy,
        *,
        block_bytes: int,
        parallel: int = 16,
        warm: WarmStore | None = None,
        metrics: StorageMetrics | None = None,
        recently_evicted: Callable[[tuple[int, int]], bool] = lambda _: False,
        on_miss: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_miss` hears of inodes of which bytes are read that are not in hot_cache."""
        self._on_miss = on_miss
        self.catalog = catalog
        self.writer = writer
        self.hot = hot
        self.fetcher = fetcher
        self.room = room
        self.pages = pages
        self._policy = policy
        self.handles = handles
        self.block_bytes = block_bytes
        self._listener: Listener | None = None
        self._metrics = metrics or StorageMetrics()
        self._flights = Flights(
            catalog,
            writer,
            hot,
            fetcher,
            room,
            pages,
            block_bytes=block_bytes,
            parallel=parallel,
            warm=warm,
            metrics=self._metrics,
            recently_evicted=recently_evicted,
            on_landed=self._landed,
            on_neighbours=lambda came: self._lander.begin(came),
        )
        self._tasks = Tasks()
        self._lander = Lander(
            catalog, writer, hot, handles, room, policy, fetcher.windows, self._tasks, block_bytes=block_bytes
        )
        self._settler = Settler(
            writer,
            hot,
            handles,
            block_bytes=block_bytes,
            arriving=self._flights.arriving,
            recorded=lambda handle: policy.sized(handle.key[1], units_of(handle.resident_bytes)),
        )

    @property
    def fetched_bytes(self) -> int:
        return self._flights.fetched_bytes

    def _landed(self, handle: ObjectHandle, first: int, count: int) -> None:
        self._settler.want()
        if self._listener is not None:
            self._listener.landed(handle.key, first, count)

    @contextlib.contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """It hears of blocks that come and go, while the block runs."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    # -- handles ------------------------------------------------------------------------------------------------

    async def open(self, key: Key, tenant: str) -> ObjectHandle:
        """The object in use; `close` it. Its backing file is compared with what the catalog knows of it."""
        while (event := self.handles.moving.get(key)) is not None:
            waits_for(Rank.EVICTION)
            await event.wait()
        self.fetcher.windows.used(key[1])
        handle = self.handles.peek(key)
        if handle is None:
            with self.catalog.view() as view:
                handle = load_handle(view, self.hot, key, tenant, self.block_bytes)
            self.handles.use(handle)  # before it is in the table, which gives up what has no users
            self.handles.put(handle)
        else:
            self.handles.use(handle)
        return handle

    def close(self, handle: ObjectHandle) -> None:
        self.handles.done(handle)

    # -- reading ------------------------------------------------------------------------------------------------

    async def read(self, handle: ObjectHandle, offset: int, length: int) -> bytes:
        """The bytes, verified, from wherever they are; short only at the end of the object."""
        self._policy.touched(handle.key[1])
        end = min(offset + length, handle.size)
        if offset >= end:
            return b""
        started_s = self.hot.env.monotonic_s()
        tier, data = await self._read(handle, offset, end)
        self._metrics.page_fetch_latency_seconds[tier].observe(self.hot.env.monotonic_s() - started_s)
        return data or b""

    async def _read(
        self, handle: ObjectHandle, offset: int, end: int, *, local: bool = True
    ) -> tuple[FetchTier, bytes | None]:
        """The bytes, and the furthest tier that had to be asked. Not `local`: None for what is in the backing file."""
        await self.attach(handle)
        tier = FetchTier.LOCAL
        first, last = offset // self.block_bytes, (end - 1) // self.block_bytes
        self._read_ahead(handle, offset, end)
        for _ in range(8):
            absent = handle.not_ready(first, last)
            if not absent:
                data = await self._read_local(handle, offset, end - offset) if local else None
                if data is not None or not local:
                    return tier, data
                continue
            self._on_miss(handle.key[1])
            pages, from_remote = await self.obtain(handle, absent)
            if from_remote:
                tier = FetchTier.REMOTE
            if any(block in pages for block in absent):
                tier = tier if tier is FetchTier.REMOTE else FetchTier.PAGE_CACHE
                return tier, await self._assemble(handle, offset, end, pages)
        raise CorruptError("local copies keep failing their checksums", path=str(handle.path), offset=offset)

    async def read_resident(self, handle: ObjectHandle, offset: int, length: int) -> bytes | None:
        """The bytes, if all of them are on this disk and right; nothing is fetched, nothing read ahead."""
        await self.attach(handle)
        absent = handle.not_ready(offset // self.block_bytes, (offset + length - 1) // self.block_bytes)
        if absent and await self._recheck(handle, absent):
            return None
        return await self._read_local(handle, offset, length)

    async def make_ready(self, handle: ObjectHandle, offset: int, length: int) -> bytes | None:
        """None: the range is in the backing file, verified, for others to read. Else its bytes: no room for them."""
        end = min(offset + length, handle.size)
        if offset >= end:
            return None
        self._policy.touched(handle.key[1])
        started_s = self.hot.env.monotonic_s()
        tier, data = await self._read(handle, offset, end, local=False)
        self._metrics.page_fetch_latency_seconds[tier].observe(self.hot.env.monotonic_s() - started_s)
        return data

    def is_coming(self, handle: ObjectHandle, block: int) -> bool:
        """Whether it is here, or on its way."""
        return block < handle.block_count and (handle.is_ready(block) or self._flights.awaits(handle.key, block))

    async def fill(self, handle: ObjectHandle) -> None:
        """Brings the whole object to this disk, as far as there is room, and records it: `warm`."""
        self._policy.touched(handle.key[1])
        await self.attach(handle)
        step = 4 * handle.blocks_per_chunk
        handle.filling += 1
        try:
            absent = handle.not_ready(0, handle.block_count - 1)
            for first in range(0, len(absent), step):
                some = [block for block in absent[first : first + step] if not handle.is_ready(block)]
                if some:
                    await self.obtain(handle, some, wanted=False)
        finally:
            handle.filling -= 1
        await self.settle()

    async def attach(self, handle: ObjectHandle) -> None:
        """Opens the backing file if there should be one, and decides what of it may be trusted."""
        if handle.fd >= 0:
            return
        if not handle.holds_data:
            if handle.has_holes:
                self.ensure_backing(handle)  # they are read from it
            return
        try:
            fd = self.hot.open(handle.path)
        except FileNotFoundError:
            log.warning("backing file is missing", extra={"path": str(handle.path)})
            await self.give_up(handle, [b for b in range(handle.block_count) if handle.is_resident(b)])
            if handle.has_holes:
                self.ensure_backing(handle)
            return
        handle.fd = fd
        handle.accept(self.hot.identity(fd))

    def ensure_backing(self, handle: ObjectHandle) -> None:
        """The backing file, open; a new, sparse one where nothing of the object is here."""
        handle.ensure_file(self.hot)

    async def prove(self, handle: ObjectHandle) -> None:
        """Whatever of the object is here but not trusted is checked; what fails is given up."""
        if suspects := handle.suspects():
            await self._recheck(handle, suspects)

    async def _read_local(self, handle: ObjectHandle, offset: int, length: int) -> bytes | None:
        data = read_cached(handle.fd, offset, length)
        if data is not None:
            return data
        try:
            return await trio.to_thread.run_sync(read_exactly, handle.fd, offset, length)
        except CorruptError:
            # Shorter than it was: whatever is left of it must prove itself again.
            handle.trusted = list(handle.holes)
            if handle.has_holes:
                self.hot.env.files.truncate(handle.fd, handle.size)
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
                parts.append((await self._read(handle, low, high))[1] or b"")
        return b"".join(parts)

    # -- a few bytes --------------------------------------------------------------------------------------------

    async def glance(self, handle: ObjectHandle, offset: int, length: int) -> bytes | None:
        """A few bytes somewhere in a cold file, and nothing around them: fetched by themselves, checked, not kept.

        Who looks at a block again and again gets all of it. None: read as usual.
        """
        end = min(offset + length, handle.size)
        if length > GLANCE_BYTES_MAX or offset >= end or self._goes_on(handle.ahead, offset):
            return None
        first, last = offset // self.block_bytes, (end - 1) // self.block_bytes
        if not all(self._untouched(handle, block) for block in range(first, last + 1)):
            return None
        chunk_index, at = divmod(offset, handle.row.chunk_bytes)
        chunk = handle.chunks[chunk_index]
        blob = self._flights.plain_blob(handle, chunk)
        with self.catalog.view() as view:
            piece_crcs = view.get(handle.key[0], t.PIECES, chunk.chunk_id)
        if blob is None or piece_crcs is None or at + end - offset > chunk.length:
            return None
        self._note_read(handle, offset, end)
        now_s = self.hot.env.monotonic_s()
        if now_s - handle.glances.since_s > GLANCES_KEPT_S:
            handle.glances = Glances(now_s)
        handle.glances.blocks.update(range(first, last + 1))
        return await self._glance(handle, chunk, _Glance(blob, piece_crcs, at, end - offset))

    def _untouched(self, handle: ObjectHandle, block: int) -> bool:
        return not (
            handle.is_resident(block)
            or handle.glances.blocks[block] >= GLANCES_A_BLOCK
            or self._flights.awaits(handle.key, block)
            or self.pages.peek(PageKey(handle.key[1], handle.key[2], block)) is not None
        )

    async def _glance(self, handle: ObjectHandle, chunk: ChunkRow, wanted: _Glance) -> bytes | None:
        started_s = self.hot.env.monotonic_s()
        try:
            data = await self.fetcher.glance_at_once(*wanted)
            if data is None:
                data = await trio.to_thread.run_sync(self.fetcher.glance, *wanted, limiter=self._flights.urgent)
        except (CorruptError, TransientError):
            return None  # met again, and recorded, by reading as usual
        if data is not None:
            self._flights.say_started(handle.key[0], chunk.chunk_id, 2, handle.glances.said)
            self._flights.count_fetched((handle.key[0], chunk.chunk_id), len(data))
            self._metrics.page_fetch_latency_seconds[FetchTier.REMOTE].observe(self.hot.env.monotonic_s() - started_s)
        return data

    # -- reading ahead ------------------------------------------------------------------------------------------

    def _read_ahead(self, handle: ObjectHandle, offset: int, end: int) -> None:
        """Keeps a sequential reader supplied: fetches on, in the background, before it gets there."""
        self._note_read(handle, offset, end)
        ahead, last = handle.ahead, (end - 1) // self.block_bytes
        if end - ahead.run_start < self.block_bytes:
            return  # a look here and there, in pieces perhaps, is not a reader that goes on
        ahead.frontier = max(ahead.frontier, last + 1)
        if ahead.frontier - last > ahead.window_blocks // 2 + 1 or ahead.frontier >= handle.block_count:
            return
        # Twice as much each time, up to a chunk: a short look costs little, a long read gets all there is.
        ahead.window_blocks = min(ahead.window_blocks * 2, self._window_max(handle))
        stop = min(ahead.frontier + ahead.window_blocks, handle.block_count)
        wanted = handle.not_ready(ahead.frontier, stop - 1)
        ahead.frontier = stop
        self._prefetch_soon(handle, wanted)

    def _window_max(self, handle: ObjectHandle) -> int:
        """A chunk; without room on the disk what is fetched ahead must not push itself out of memory."""
        if not handle.crowded:
            return handle.blocks_per_chunk
        return max(1, min(self.pages.capacity_bytes // AHEAD_SHARE // self.block_bytes, handle.blocks_per_chunk))

    def _goes_on(self, ahead: ReadAhead, offset: int) -> bool:
        """Whether a read there goes on from where the last one was."""
        # Not every read comes here: what has landed may be read without asking (`files`), up to the frontier.
        reach = max(ahead.next_offset + self.block_bytes, ahead.frontier * self.block_bytes)
        # And several are on their way at once, in any order.
        return ahead.next_offset - BEHIND_BLOCKS * self.block_bytes <= offset <= reach

    def _note_read(self, handle: ObjectHandle, offset: int, end: int) -> None:
        ahead = handle.ahead
        if self._goes_on(ahead, offset):
            ahead.next_offset = max(ahead.next_offset, end)
        else:
            ahead.window_blocks, ahead.next_offset, ahead.run_start = 1, end, offset
            ahead.frontier = (end - 1) // self.block_bytes + 1

    def _prefetch_soon(self, handle: ObjectHandle, blocks: list[int]) -> None:
        if blocks:
            self._tasks.begin(self._prefetch, handle, blocks)

    async def _prefetch(self, handle: ObjectHandle, blocks: list[int]) -> None:
        with self.handles.using(handle):
            try:
                await self.obtain(handle, blocks, wanted=False)
            except (Aof2Error, OSError) as e:
                # The read that gets there meets the error again, and is told.
                log.debug("read-ahead failed", extra={"path": str(handle.path), "error": str(e)})

    # -- making blocks ready ------------------------------------------------------------------------------------

    async def obtain(
        self, handle: ObjectHandle, blocks: list[int], *, wanted: bool = True
    ) -> tuple[dict[int, bytes], bool]:
        """Makes the blocks ready: those that found no room on disk, and whether the remote had to be waited for.

        Not `wanted`: for later. What finds no room is in the PageCache then, as long as that keeps it.
        """
        for block in filter(handle.is_hole, blocks):
            handle.take_over(block)
        blocks = await self._recheck(handle, blocks)
        pages: dict[int, bytes] = {}
        missing: list[int] = []
        for block in blocks:
            key = PageKey(handle.key[1], handle.key[2], block)
            page = self.pages.get(key) if wanted else self.pages.peek(key)
            if page is not None:
                pages[block] = page
            else:
                missing.append(block)
        waited = await self._flights.bring(handle, missing, pages if wanted else None)
        return pages, waited

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
        blocks = [b for b in blocks if not handle.is_hole(b)]
        for block in blocks:
            chunk, bit = handle.locate(block)
            by_chunk[chunk] = by_chunk.get(chunk, 0) | 1 << bit
            handle.remove(block)
        if self._listener is not None:
            await self._listener.lost(handle.key, blocks)
        for chunk, bits in by_chunk.items():
            chunk_id = handle.chunks[chunk].chunk_id
            work = partial(residency.lost, chunk_id=chunk_id, bad=bits, block_bytes=self.block_bytes)
            self.room.give_back(handle.tenant, await result_of(self.writer.submit(handle.key[0], work)))

    # -- recording ----------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reads ahead, and records what came in."""
        async with self._tasks.running():
            task_status.started()
            await self._settler.run()

    async def settle(self) -> None:
        """Makes the blocks that came in durable and known to the catalog."""
        await self._settler.settle()

    async def quiesce(self) -> None:
        """Everything that was being fetched is here and recorded."""
        await self._flights.landed_all()
        await self._lander.landed_all()
        await self.settle()

    async def wind_down(self) -> None:
        """The mount is gone: what was still wanted of the remote is here and recorded, neighbours are left."""
        self._lander.stop()
        await self.quiesce()

    async def quiesce_object(self, key: Key) -> None:
        """What was being fetched of one object is here and recorded."""
        await self._flights.landed_all(key)
        await self.settle_object(key)

    async def settle_object(self, key: Key) -> None:
        """What came in of one object is recorded."""
        handle = self.handles.peek(key)
        if handle is not None and handle.added:
            await self._settler.settle_one(handle)
