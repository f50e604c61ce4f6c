"""Making room: the least recently used clean data goes first, down to the low-water mark.

What was used since start-up is ordered in memory; what was not is older than all of it and is found by a hand that goes
round the residency rows, so start-up never walks the cache. Objects are evicted whole, by unlink; of an object larger
than the room wanted, single chunks are punched out.

Invariants
- Only chunks whose content is in the remote are given up (`objects.evicted` refuses others inside the commit), and
  only of objects whose publication the remote's log has: what is evicted can be restored.
- Nobody has the file open or mapped: no users, no pins, and the kernel grants a write lease on it. New users wait until
  the eviction is over, so the lease is asked for once and need not be held.
- LocalEvicted is durable before the first byte goes. A crash in between leaves a file without rows: an orphan.

Owner: the trio thread; one eviction at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

from aof2.engine import objects, pins, segments
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ChunkRow, ObjectState
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import CorruptError
from aof2.engine.local.doomed import DoomedFiles
from aof2.engine.local.handles import HandleTable, Key
from aof2.engine.local.hot import HotCache
from aof2.engine.local.warm import WORTH_RATIO, WarmStore
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.quota import QuotaExceededError, Reservation, StorageQuota

log = logging.getLogger(__name__)

CRASH_POINTS: Final = ("evict.recorded", "evict.unlinked")
VICTIMS_MAX: Final = 64
THRASH_WINDOW_S: Final = 60.0
GONE_MAX: Final = 4096


def _give_up(b: Batch, chunk_ids: Sequence[int], kept: Mapping[int, int], block_bytes: int) -> int:
    """One commit: what is kept compressed, and what leaves hot_cache."""
    for chunk_id, stored_bytes in kept.items():
        segments.warmed(b, chunk_id, stored_bytes)
    return objects.evicted(b, chunk_ids, block_bytes=block_bytes)


class Victim(NamedTuple):
    """An object to give up: whole, or some of its chunks where that is enough."""

    key: Key
    tenant: str
    path: Path
    chunk_ids: tuple[int, ...]
    holes: tuple[tuple[int, int], ...] = ()  # (offset, length) to punch; none: the file goes whole


class Evictor:
    """Gives local bytes up, and is the Room that fetched blocks ask for."""

    def __init__(
        self,
        catalog: Catalog,
        writer: CatalogWriter,
        hot: HotCache,
        handles: HandleTable,
        quota: StorageQuota,
        tenants: Callable[[], dict[int, str]],
        *,
        limit_bytes: int,
        low_water: float,
        block_bytes: int,
        warm: WarmStore | None = None,
        keeps_warm: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.catalog = catalog
        self.writer = writer
        self.hot = hot
        self.handles = handles
        self.quota = quota
        self.doomed = DoomedFiles(writer, hot, self.give_back)
        self.evicted_bytes = 0
        self.evictions = 0
        self._tenants = tenants
        self._limit_bytes = limit_bytes
        self._low_water = low_water
        self._block_bytes = block_bytes
        self._warm = warm
        self._keeps_warm = keeps_warm
        # Whether the remote's log has the publication of (stream id, inode, generation); of no use without uploads.
        self.restorable: Callable[[int, int, int], bool] = lambda _stream_id, _ino, _generation: True
        self.lock = trio.Lock()
        self._gone: OrderedDict[tuple[int, int], float] = OrderedDict()  # chunks given up lately → when
        self._hand: tuple[int, bytes] | None = None

    # -- Room --------------------------------------------------------------------------------------------------

    async def take(self, tenant: str, size_bytes: int) -> Reservation | None:
        """Room for so many bytes, made by eviction if need be; None when there is none to be had."""
        reservation = self.quota.try_reserve(tenant, size_bytes)
        if reservation is not None:
            return reservation
        if size_bytes > self._limit_bytes:
            return None
        await self.doomed.settle()
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
        await self.doomed.settle()
        async with self.lock:
            wanted = self._wanted(size_bytes, tenant)
            freed = 0
            for victims in self._batches(wanted, tenant):
                left = wanted - freed
                freed += await self._evict([self._no_more_than(v, left) for v in victims], demote=demote)
                if freed >= wanted:
                    break
            return freed

    def _wanted(self, size_bytes: int, tenant: str | None) -> int:
        usage = self.quota.usage if tenant is None else self.quota.tenant_usage(tenant)
        limit_bytes = self._limit_bytes if usage.limit_bytes is None else usage.limit_bytes
        target = int(limit_bytes * self._low_water) - size_bytes
        wanted = usage.used_bytes + usage.reserved_bytes - max(0, target)
        # The disk may be fuller than the quota knows: others write to it, too.
        return wanted if tenant is not None else max(wanted, self.quota.shortage(None, size_bytes).everyones_bytes)

    def _no_more_than(self, victim: Victim, wanted: int) -> Victim:
        """Of an object that holds much more than is wanted, the first chunks that make up for it."""
        stream_id, ino, generation = victim.key
        chosen: list[int] = []
        holes: list[tuple[int, int]] = []
        freed = resident = 0
        with self.catalog.view() as view:
            row = view.get(stream_id, t.OBJECTS, (ino, generation))
            for chunk_id in victim.chunk_ids:
                chunk, here = view.get(stream_id, t.CHUNKS, chunk_id), view.get(stream_id, t.RESIDENCY, chunk_id)
                if row is None or chunk is None or here is None or not here.mask:
                    continue
                size = objects.chunk_disk_bytes(here.mask, chunk, self._block_bytes)
                resident += size
                if freed < wanted:
                    chosen.append(chunk_id)
                    holes.append((chunk.index * row.chunk_bytes, chunk.length))
                    freed += size
        if freed >= resident or not chosen:
            return victim
        return victim._replace(chunk_ids=tuple(chosen), holes=tuple(holes))

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
                victim = self._victim(key)
                got = await self._evict([victim], demote=False) if victim is not None else 0
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

    def _batches(self, wanted: int, tenant: str | None = None) -> Iterator[list[Victim]]:
        batch: list[Victim] = []
        for victim in self._candidates():
            if tenant is not None and victim.tenant != tenant:
                continue
            batch.append(victim)
            if len(batch) == VICTIMS_MAX or wanted <= self._block_bytes * VICTIMS_MAX:
                yield batch
                batch = []
        if batch:
            yield batch

    def _candidates(self) -> Iterator[Victim]:
        """Never used since start-up first, by the hand; then least recently used."""
        seen: set[Key] = set()
        for key in self._sweep():
            if key not in self.handles and key not in seen:
                seen.add(key)
                victim = self._victim(key)
                if victim is not None:
                    yield victim
        for handle in self.handles.oldest():
            victim = self._victim(handle.key)
            if victim is not None and handle.holds_data:
                yield victim

    def _sweep(self) -> Iterator[Key]:
        """Objects with local bytes, once round, from where the hand stopped last time."""
        start = self._hand
        for stream_id, after in self._laps(start):
            while True:
                keys, after_next = self._resident_after(stream_id, after)
                if after_next is None:
                    break
                self._hand = (stream_id, after_next)
                yield from keys
                after = after_next

    def _laps(self, start: tuple[int, bytes] | None) -> Iterator[tuple[int, bytes | None]]:
        streams = sorted(self._tenants())
        if start is None:
            yield from ((stream_id, None) for stream_id in streams)
            return
        yield start
        yield from ((s, None) for s in streams if s > start[0])
        yield from ((s, None) for s in streams if s <= start[0])

    def _resident_after(self, stream_id: int, after: bytes | None) -> tuple[list[Key], bytes | None]:
        """A page of resident objects behind a residency key, and where the page ended (None: there was nothing)."""
        keys: list[Key] = []
        last: bytes | None = None
        with self.catalog.view() as view:
            for chunk_id, row in view.scan(stream_id, t.RESIDENCY, after=after):
                last = t.RESIDENCY.pack_key(chunk_id)
                chunk = view.get(stream_id, t.CHUNKS, chunk_id) if row.mask else None
                if chunk is not None:
                    keys.append((stream_id, chunk.ino, chunk.generation))
                if len(keys) >= 256:
                    break
        return keys, last

    def _victim(self, key: Key) -> Victim | None:
        """The object as something to evict, or None: in use, pinned, or not durable."""
        stream_id, ino, generation = key
        tenant = self._tenants().get(stream_id)
        handle = self.handles.peek(key)
        if tenant is None or (handle is not None and (handle.users or handle.pins or handle.added)):
            return None
        with self.catalog.view() as view:
            row = view.get(stream_id, t.OBJECTS, (ino, generation))
            if row is None or row.state not in (ObjectState.PUBLISHED, ObjectState.TOMBSTONED):
                return None
            if pins.holds(view, stream_id, row):
                return None
        if not self.restorable(stream_id, ino, generation):
            return None  # its blobs are there, the log that names them is not yet
        return Victim(key, tenant, self.hot.path(tenant, ino, generation), row.data_chunks)

    # -- doing -------------------------------------------------------------------------------------------------

    async def _evict(self, victims: Sequence[Victim], *, demote: bool = True) -> int:
        freed = 0
        by_stream: dict[int, list[Victim]] = {}
        over = trio.Event()
        for victim in victims:
            self.handles.evicting[victim.key] = over
            self.handles.forget(victim.key)
            by_stream.setdefault(victim.key[0], []).append(victim)
        try:
            for stream_id, group in by_stream.items():
                freed += await trio.to_thread.run_sync(partial(self._evict_group, stream_id, group, demote=demote))
        finally:
            for victim in victims:
                del self.handles.evicting[victim.key]
            over.set()
        return freed

    def _evict_group(self, stream_id: int, group: Sequence[Victim], *, demote: bool = True) -> int:
        """Leases, one durable commit, unlinks. On a worker thread; returns the bytes freed."""
        free = [v for v in group if self._exclusive(v.path)]
        if not free:
            return 0
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
                    self._warm.count((stream_id, chunk_id), victim.tenant, kept[chunk_id])
        slots = [(stream_id, chunk_id) for chunk_id in chunk_ids]
        trio.from_thread.run_sync(self._note_freed, free[0].tenant, freed, len(free), slots if demote else [])
        return freed

    def _drop(self, stream_id: int, victim: Victim) -> None:
        """The bytes go: the file, or holes in it, after which the catalog knows the file as it is now."""
        if not victim.holes:
            self.hot.unlink(victim.path)
            return
        with contextlib.suppress(FileNotFoundError):
            for offset, length in victim.holes:
                self.hot.punch(victim.path, offset, length)
            fd = self.hot.open(victim.path)
            try:
                identity = self.hot.identity(fd)
            finally:
                self.hot.env.files.close(fd)
            work = partial(
                objects.resident,
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
            for chunk, residency in zip(chunks, here, strict=True):
                if chunk is None or residency is None or residency.warm_bytes:
                    continue
                if residency.mask != objects.full_mask(chunk.length, self._block_bytes):
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

    def _note_freed(self, tenant: str, freed: int, count: int, slots: Sequence[tuple[int, int]]) -> None:
        now_s = self.hot.env.monotonic_s()
        self._gone.update((slot, now_s) for slot in slots)
        while len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)
        self.give_back(tenant, freed)
        self.evicted_bytes += freed
        self.evictions += count
