"""Making room: how local copies leave, down to the low-water mark. Which goes next is the policy's to say (`recency`).

Objects are evicted whole, by unlink; of an object larger than the room wanted, single chunks are punched out.

Invariants
- Only chunks whose content is in the remote are given up (`residency.evicted` refuses others inside the commit), and
  only of objects whose publication the remote's log has: what is evicted can be restored.
- No process has the file open or mapped: its handle has no users, and the kernel grants a write lease on it. New users
  wait until the eviction is over, so the lease is asked for once and need not be held.
- LocalEvicted is durable before the first byte goes. A crash in between leaves a file without rows: an orphan.

Owner: the trio thread; one eviction at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

from aof2.engine import objects, pins, residency, segments
from aof2.engine.aio import open_nursery
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ObjectState, stream_of
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import CorruptError, FatalIOError, ReadOnlyError
from aof2.engine.local.doomed import DoomedFiles
from aof2.engine.local.handles import HandleTable, Key
from aof2.engine.local.hot import HotCache
from aof2.engine.local.warm import WORTH_RATIO, WarmStore
from aof2.engine.locks import Rank, task_lock
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.quota import QuotaExceededError, Reservation, StorageQuota
from aof2.engine.tiering.recent import Recent, units_of
from aof2.native.sharedpage import SharedPage

log = logging.getLogger(__name__)

CRASH_POINTS: Final = ("evict.recorded", "evict.unlinked")
EVERYTHING_BYTES: Final = 1 << 62
VICTIMS_MAX: Final = 256
# A walk that met so many and still freed too little is not repeated at once: what it met is dirty, pinned or in use.
LONG_WALK: Final = 1024
WALK_SHARE: Final = 20
THRASH_WINDOW_S: Final = 60.0
LOOK_AGAIN_S: Final = 1.0
GONE_MAX: Final = 4096
GIVEN_UP_STATES: Final = (ObjectState.PUBLISHED, ObjectState.TOMBSTONED)


def _give_up(b: Batch, chunk_ids: Sequence[int], kept: Mapping[int, int], block_bytes: int) -> int:
    """One commit: what is kept compressed, and what leaves hot_cache."""
    for chunk_id, stored_bytes in kept.items():
        segments.warmed(b, chunk_id, stored_bytes)
    return residency.evicted(b, chunk_ids, block_bytes=block_bytes)


class Piece(NamedTuple):
    """A chunk with blocks in the backing file."""

    chunk_id: int
    offset: int
    length: int
    disk_bytes: int


class Victim(NamedTuple):
    """An object to give up: whole, or some of its chunks where that is enough."""

    key: Key
    tenant: str
    path: Path
    chunk_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    punched: bool = False  # the pieces alone are punched out; else the file goes whole

    @property
    def disk_bytes(self) -> int:
        return sum(piece.disk_bytes for piece in self.pieces)

    def no_more_than(self, wanted_bytes: int) -> Victim:
        """Of an object that holds much more than is wanted, the first chunks that make up for it."""
        found = 0
        for n, piece in enumerate(self.pieces, 1):
            found += piece.disk_bytes
            if found >= wanted_bytes and n < len(self.pieces):
                some = self.pieces[:n]
                return self._replace(pieces=some, chunk_ids=tuple(p.chunk_id for p in some), punched=True)
        return self


class Evictor:
    """Gives local bytes up, and is the Room that fetched blocks ask for. `settle` records what landed of an object."""

    def __init__(
        self,
        catalog: Catalog,
        writer: CatalogWriter,
        hot: HotCache,
        handles: HandleTable,
        quota: StorageQuota,
        tenants: Callable[[], dict[int, str]],
        recent: Recent,
        settle: Callable[[Key], Awaitable[None]],
        *,
        limit_bytes: int,
        low_water: float,
        block_bytes: int,
        warm: WarmStore | None = None,
        keeps_warm: Callable[[str], bool] = lambda _: False,
        restorable: Callable[[int, int, int], bool] = lambda _stream_id, _ino, _generation: True,
        went: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`restorable`: whether the remote's log has the publication of (stream id, inode, generation). `went` hears of
        inodes of which nothing is here any more."""
        self.catalog = catalog
        self.writer = writer
        self.hot = hot
        self.handles = handles
        self.quota = quota
        self.doomed = DoomedFiles(writer, hot, self.give_back)
        self.evicted_bytes = 0
        self.evictions = 0
        self._tenants = tenants
        self._recent = recent
        self._settle = settle
        self._limit_bytes = limit_bytes
        self._low_water = low_water
        self._block_bytes = block_bytes
        self._warm = warm
        self._keeps_warm = keeps_warm
        self._restorable = restorable
        self._went = went
        self.page: SharedPage | None = None  # what the channel opens by itself is in it
        self.lock = task_lock(Rank.EVICTION)
        self._gone: OrderedDict[tuple[int, int], float] = OrderedDict()  # chunks given up lately → when
        self._fruitless_until_s = float("-inf")
        self._over = trio.Event()

    def over(self) -> None:
        """More is here than the limits allow."""
        self._over.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Brings the cache back under its limits when something landed over them: what a passthrough writer left
        behind, a limit that was lowered. What is not in the remote yet is waited for."""
        task_status.started()
        while True:
            await self._over.wait()
            self._over = trio.Event()
            while over := self.quota.over_limit():
                try:
                    freed = sum([await self.make_room(0, tenant) for tenant in over])
                except (ReadOnlyError, FatalIOError, OSError) as e:  # said where it happened
                    log.info("the cache stays over its limit for now", extra={"error": str(e)})
                    freed = 0
                if not freed:
                    await trio.sleep(LOOK_AGAIN_S)

    # -- Room --------------------------------------------------------------------------------------------------

    async def take(self, tenant: str, size_bytes: int) -> Reservation | None:
        """Room for so many bytes, made by eviction if need be; None when there is none to be had."""
        reservation = self.quota.try_reserve(tenant, size_bytes)
        if reservation is not None:
            return reservation
        if size_bytes > self._limit_bytes:
            return None
        await self.doomed.delete_all()
        short = self.quota.shortage(tenant, size_bytes)
        if short.tenants_bytes:
            await self.make_room(size_bytes, tenant)
        if short.everyones_bytes or not short.tenants_bytes:
            await self.make_room(size_bytes)
        try:
            return self.quota.try_reserve(tenant, size_bytes)
        except QuotaExceededError:
            return None

    def give_back(self, tenant: str, size_bytes: int) -> None:
        """Bytes that had landed are gone."""
        self.quota.release_used(tenant, min(size_bytes, self.quota.tenant_usage(tenant).used_bytes))

    async def make_room(self, size_bytes: int, tenant: str | None = None, *, demote: bool = True) -> int:
        """Evicts until so much would fit below the low-water mark; how much was freed. `tenant`: of this one's alone,
        for its own limit. Without `demote` nothing is kept warm: that takes time."""
        await self.doomed.delete_all()
        async with self.lock:
            wanted = self._wanted(size_bytes, tenant)
            freed = 0
            candidates = self._candidates(tenant)
            while freed < wanted:
                keys = self._gather(candidates, wanted - freed)
                if keys:
                    freed += await self._evict(await self._victims(keys, wanted - freed), demote=demote)
                elif await self._recent.find_more():
                    candidates = self._candidates(tenant)
                else:
                    break
            return freed

    async def free_inodes(self, count: int) -> int:
        """Evicts whole objects until so many backing files are gone, or nothing clean is left; how many went."""
        await self.doomed.delete_all()
        gone = await trio.to_thread.run_sync(self.hot.spares.drop, count)
        async with self.lock:
            candidates = self._candidates(None)
            while gone < count:
                if keys := self._gather(candidates, EVERYTHING_BYTES):
                    victims = await self._victims(keys, EVERYTHING_BYTES)
                    if await self._evict(victims, demote=False):
                        gone += len(victims)
                elif await self._recent.find_more():
                    candidates = self._candidates(None)
                else:
                    break
        return gone

    def _wanted(self, size_bytes: int, tenant: str | None) -> int:
        usage = self.quota.usage if tenant is None else self.quota.tenant_usage(tenant)
        limit_bytes = self._limit_bytes if usage.limit_bytes is None else usage.limit_bytes
        target = int(limit_bytes * self._low_water) - size_bytes
        wanted = usage.used_bytes + usage.reserved_bytes - max(0, target)
        # The disk may be fuller than the quota knows: others write to it, too.
        return wanted if tenant is not None else max(wanted, self.quota.shortage(None, size_bytes).everyones_bytes)

    def recently_evicted(self, slot: tuple[int, int]) -> bool:
        """Whether this chunk (stream id, chunk id) was given up a moment ago: fetching it again is thrash."""
        when_s = self._gone.get(slot)
        return when_s is not None and self.hot.env.monotonic_s() - when_s < THRASH_WINDOW_S

    # -- by name -----------------------------------------------------------------------------------------------

    async def evict(self, keys: Sequence[Key]) -> tuple[int, list[Key]]:
        """Drops these objects' local bytes: how many, and which objects were in use or not durable yet."""
        async with self.lock:
            freed, skipped = 0, []
            for key in keys:
                while (event := self.handles.moving.get(key)) is not None:  # it lands (`landing.py`)
                    await event.wait()
                victim = None if self._has_fresh(key) else self._victim(key)
                got = await self._evict([victim], demote=False, by_name=True) if victim is not None else 0
                if victim is not None:
                    await trio.to_thread.run_sync(self.cool, [(key[0], c) for c in victim.chunk_ids])
                freed += got
                if victim is None or (victim.chunk_ids and not got and self.hot_bytes_of(key)):
                    skipped.append(key)
            return freed, skipped

    def hot_bytes_of(self, key: Key) -> int:
        stream_id, ino, generation = key
        with self.catalog.view() as view:
            row = view.get(stream_id, t.OBJECTS, (ino, generation))
            if row is None:
                return 0
            masks = (view.get(stream_id, t.RESIDENCY, chunk_id) for chunk_id in row.data_chunks)
            return sum(r.mask.bit_count() for r in masks if r is not None)

    # -- choosing ----------------------------------------------------------------------------------------------

    def _gather(self, candidates: Iterator[tuple[Key, int]], wanted: int) -> list[Key]:
        """The next that may go: enough of them, or as many as one commit should hold."""
        keys: list[Key] = []
        for key, size in candidates:
            keys.append(key)
            wanted -= size
            if wanted <= 0 or len(keys) == VICTIMS_MAX:
                break
        return keys

    async def _victims(self, keys: Sequence[Key], wanted: int) -> list[Victim]:
        """Those of them that can go, once what landed of them a moment ago is recorded; the last one in part."""
        if fresh := [key for key in keys if self._has_fresh(key)]:
            async with open_nursery() as nursery:
                for key in fresh:
                    nursery.start_soon(self._record, key)
        victims: list[Victim] = []
        for key in keys:
            victim = None if self._has_fresh(key) else self._victim(key)
            if victim is not None and victim.pieces and wanted > 0:
                victims.append(victim.no_more_than(wanted))
                wanted -= victims[-1].disk_bytes
        return victims

    def _has_fresh(self, key: Key) -> bool:
        """Whether blocks of it landed that are not recorded yet."""
        handle = self.handles.peek(key)
        return handle is not None and bool(handle.added)

    async def _record(self, key: Key) -> None:
        with contextlib.suppress(ReadOnlyError, FatalIOError, OSError):  # then it stays
            await self._settle(key)

    def _candidates(self, tenant: str | None) -> Iterator[tuple[Key, int]]:
        """What may go, each once, in the policy's order, and its size."""
        now_s, names = self.hot.env.monotonic_s, self._tenants()
        began_s, met = now_s(), 0
        if began_s < self._fruitless_until_s:
            return
        for ino in self._recent.hot.in_order():
            met += 1
            if tenant in (None, names.get(stream_of(ino))):
                yield from self._objects_of(ino)
        if met > LONG_WALK:
            self._fruitless_until_s = now_s() + WALK_SHARE * (now_s() - began_s)

    def _objects_of(self, ino: int) -> Iterator[tuple[Key, int]]:
        """What of an inode may go, and its size. One that is not here any more is taken off the order."""
        stream_id = stream_of(ino)
        with self.catalog.view() as view:
            rows = [row for _, row in view.scan(stream_id, t.OBJECTS, prefix=ino.to_bytes(8, "big"))]
        if not any(map(self._is_here, rows)):
            self._recent.hot.policy.forget(ino)
            return
        for row in rows:
            key = (stream_id, ino, row.generation)
            victim, handle = self._victim(key), self.handles.peek(key)
            if victim is not None:
                size = handle.resident_bytes if handle is not None and handle.added else victim.disk_bytes
                if size:
                    yield key, size

    def _is_here(self, row: ObjectRow) -> bool:
        """Whether something of it is here, or will be once it is recorded."""
        key = (stream_of(row.ino), row.ino, row.generation)
        return row.state not in GIVEN_UP_STATES or self.handles.peek(key) is not None or self.hot_bytes_of(key) > 0

    def _victim(self, key: Key) -> Victim | None:
        """The object as something to evict, or None: in use, pinned, or not durable. What landed of it and is not
        recorded is not in `pieces`: `_evict` takes objects without such blocks alone."""
        stream_id, ino, generation = key
        tenant = self._tenants().get(stream_id)
        handle = self.handles.peek(key)
        if tenant is None or (handle is not None and handle.users):
            return None
        with self.catalog.view() as view:
            row = view.get(stream_id, t.OBJECTS, (ino, generation))
            if row is None or row.state not in GIVEN_UP_STATES:
                return None
            if pins.holds(view, stream_id, row) or segments.needs_repair(view, stream_id, row.data_chunks):
                return None  # kept on purpose, or the only copy there is
            pieces = tuple(self._pieces(view, stream_id, row))
        if not self._restorable(stream_id, ino, generation):
            return None  # its blobs are there, the log that names them is not yet
        return Victim(key, tenant, self.hot.path(tenant, ino, generation), row.data_chunks, pieces)

    def _pieces(self, view: View, stream_id: int, row: ObjectRow) -> Iterator[Piece]:
        for chunk_id in row.data_chunks:
            here = view.get(stream_id, t.RESIDENCY, chunk_id)
            chunk = view.get(stream_id, t.CHUNKS, chunk_id) if here is not None and here.mask else None
            if here is not None and chunk is not None:
                size = objects.chunk_disk_bytes(here.mask, chunk, self._block_bytes)
                yield Piece(chunk_id, chunk.index * row.chunk_bytes, chunk.length, size)

    # -- doing -------------------------------------------------------------------------------------------------

    async def _evict(self, victims: Sequence[Victim], *, demote: bool = True, by_name: bool = False) -> int:
        """Gives them up, as far as the kernel lets us; how many bytes that freed. `by_name`: not to be remembered."""
        freed = 0
        by_stream: dict[int, list[Victim]] = {}
        over = trio.Event()
        for victim in victims:
            self.handles.moving[victim.key] = over
            self.handles.forget(victim.key)
            by_stream.setdefault(victim.key[0], []).append(victim)
        try:
            for stream_id, group in by_stream.items():
                gone, got = await trio.to_thread.run_sync(partial(self._evict_group, stream_id, group, demote=demote))
                freed += got
                self._note_gone(gone, got, thrashes=demote, remember=not by_name)
        finally:
            for victim in victims:
                del self.handles.moving[victim.key]
            over.set()
        return freed

    def _evict_group(self, stream_id: int, group: Sequence[Victim], *, demote: bool) -> tuple[list[Victim], int]:
        """Leases, one durable commit, unlinks. On a worker thread; what went, and the bytes freed."""
        with self._held_off({v.key[1] for v in group}):
            return self._evict_held_off(stream_id, group, demote=demote)

    @contextlib.contextmanager
    def _held_off(self, inos: Collection[int]) -> Iterator[None]:
        """The channel opens none of them by itself while the block runs."""
        page = self.page
        if page is None:
            yield
            return
        for ino in inos:
            page.hold(ino)
        try:
            yield
        finally:
            for ino in inos:
                page.let(ino)

    def _evict_held_off(self, stream_id: int, group: Sequence[Victim], *, demote: bool) -> tuple[list[Victim], int]:
        free = [v for v in group if self._exclusive(v.path)]
        if not free:
            return [], 0
        kept = self._demote(stream_id, free) if demote else {}
        chunk_ids = [chunk_id for v in free for chunk_id in v.chunk_ids]
        work = partial(_give_up, chunk_ids=chunk_ids, kept=kept, block_bytes=self._block_bytes)
        freed = self.writer.call(stream_id, work, sync=True)
        self.hot.env.failpoint("evict.recorded")
        for victim in free:
            self._drop(stream_id, victim)
            self.hot.env.failpoint("evict.unlinked")
            for chunk_id in victim.chunk_ids:
                if self._warm is not None and chunk_id in kept:
                    self._warm.count((stream_id, chunk_id), kept[chunk_id])
        return free, freed

    def _drop(self, stream_id: int, victim: Victim) -> None:
        """The bytes go: the file, or holes in it, after which the catalog knows the file as it is now."""
        if not victim.punched:
            self.hot.retire(victim.path)
            return
        with contextlib.suppress(FileNotFoundError):
            for piece in victim.pieces:
                self.hot.punch(victim.path, piece.offset, piece.length)
            fd = self.hot.open(victim.path)
            try:
                identity = self.hot.identity(fd)
            finally:
                self.hot.env.files.close(fd)
            work = partial(
                residency.resident,
                ino=victim.key[1],
                generation=victim.key[2],
                masks={},
                backing=identity,
                block_bytes=self._block_bytes,
            )
            self.writer.call(stream_id, work)

    # -- warm --------------------------------------------------------------------------------------------------

    def _demote(self, stream_id: int, victims: Sequence[Victim]) -> dict[int, int]:
        """Compressed copies of what is worth one: chunk id → length, written and synced, not yet committed."""
        kept: dict[int, int] = {}
        if self._warm is None or not self._warm.limit_bytes:
            return kept
        for victim in victims:
            if self._keeps_warm(victim.tenant):
                kept |= self._demote_one(self._warm, stream_id, victim)
        return kept

    def _demote_one(self, warm: WarmStore, stream_id: int, victim: Victim) -> dict[int, int]:
        kept: dict[int, int] = {}
        with self.catalog.view() as view:
            row = view.get(stream_id, t.OBJECTS, (victim.key[1], victim.key[2]))
            chunks = [view.get(stream_id, t.CHUNKS, chunk_id) for chunk_id in victim.chunk_ids]
            here = [view.get(stream_id, t.RESIDENCY, chunk_id) for chunk_id in victim.chunk_ids]
        if row is None or not victim.path.exists():
            return kept
        fd = self.hot.open(victim.path)
        try:
            for chunk, local in zip(chunks, here, strict=True):
                if chunk is None or local is None or local.warm_bytes:
                    continue
                if local.mask != objects.full_mask(chunk.length, self._block_bytes):
                    continue
                stored = self._stage_warm(warm, stream_id, victim.tenant, chunk, fd, chunk.index * row.chunk_bytes)
                if stored is not None:
                    kept[chunk.chunk_id] = stored
        finally:
            self.hot.env.files.close(fd)
        return kept

    def _stage_warm(
        self, warm: WarmStore, stream_id: int, tenant: str, chunk: ChunkRow, fd: int, offset: int
    ) -> int | None:
        started: list[int] = []

        def admit() -> None:
            work = partial(segments.compression_started, chunk_id=chunk.chunk_id)
            started.append(self.writer.call(stream_id, work))

        reason = ReasonCode.TRANSIENT
        try:
            self.cool(warm.victims(int(chunk.length * WORTH_RATIO)))
            stored = warm.stage(tenant, chunk, fd, offset, admit)
            if stored is not None:
                return stored
        except CorruptError as e:
            # It changed since it was sealed: not worth keeping, and the remote has the real one.
            reason = ReasonCode.CODEC
            if not started:
                admit()
            log.warning("not kept warm", extra={"chunk_id": chunk.chunk_id, "error": str(e)})
        except OSError as e:
            log.info("not kept warm", extra={"chunk_id": chunk.chunk_id, "error": str(e)})
        if started:
            failed = partial(segments.compression_failed, chunk_id=chunk.chunk_id, reason=reason)
            self.writer.call(stream_id, failed)
        return None

    def cool(self, slots: Sequence[tuple[int, int]]) -> None:
        """Gives warm blobs up: rows first, durably, then files. On a worker thread."""
        if self._warm is None or not slots:
            return
        by_stream: dict[int, list[int]] = {}
        for stream_id, chunk_id in slots:
            by_stream.setdefault(stream_id, []).append(chunk_id)
        for stream_id, chunk_ids in by_stream.items():
            self.writer.call(stream_id, partial(segments.cooled, chunk_ids=chunk_ids), sync=True)
        self._warm.drop(list(slots))

    def _exclusive(self, path: Path) -> bool:
        try:
            with self.hot.exclusive(path) as alone:
                return alone
        except FileNotFoundError:
            return True  # only its rows are left

    def _note_gone(self, gone: Sequence[Victim], freed: int, *, thrashes: bool, remember: bool) -> None:
        if not gone:
            return
        now_s = self.hot.env.monotonic_s()
        if thrashes:
            self._gone.update(((v.key[0], chunk_id), now_s) for v in gone for chunk_id in v.chunk_ids)
        while len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)
        self.give_back(gone[0].tenant, freed)
        self.evicted_bytes += freed
        self.evictions += len(gone)
        with self.catalog.view() as view:
            for ino in {v.key[1] for v in gone}:
                left = self._recent.local_bytes(view, ino)
                if left:
                    self._recent.hot.policy.sized(ino, units_of(left))
                    continue
                self._went(ino)
                if remember:
                    self._recent.hot.evicted(ino)
                else:
                    self._recent.hot.forget(ino)
