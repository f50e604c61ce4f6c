"""Neighbours that came with a small file become backing files together: a stretch of a pack is cut up, checked, written
and synced by few calls, and recorded in one commit.

The rows say which members a stretch holds: chunks that were packed together have neighbouring ids. Those of them that
are current, not here and not in use land; the others stay in the stretch as it came (`windows.py`). The next open of
one that landed finds a file that is here.

Invariants
- A member matches the crc64 and the SHA-256 of its seal before it is a file. One that does not is left to its reader,
  which fetches it alone and says what is wrong.
- Room is reserved before a byte is written. While members land, who wants one of them waits, and then starts from the
  rows (`HandleTable.moving`): no two write the same file, and no lock is waited for meanwhile.
- A residency bit is recorded after its bytes are synced, where the object is still the one that was read.
- Coming along is no use: in the order of eviction neighbours are older than all that was used.

Owner: the trio thread; files are written and synced on worker threads. A crash leaves files that no bit speaks of.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final

import trio

from aof2.engine import residency
from aof2.engine.aio import Tasks, result_of
from aof2.engine.blob.format import footer_len
from aof2.engine.blob.reader import check_identity, decode_frame, read_footer
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ChunkRow, ObjectState
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import Aof2Error, CorruptError
from aof2.engine.local.handles import HandleTable
from aof2.engine.local.hot import HotCache
from aof2.engine.objects import on_disk
from aof2.engine.recency import EvictionPolicy
from aof2.engine.tiering.flights import Neighbours, Room
from aof2.engine.tiering.hashing import block_crc
from aof2.engine.tiering.recent import units_of
from aof2.engine.tiering.windows import Window, Windows
from aof2.native import small
from aof2.native.small import SmallFile, SmallStatus

log = logging.getLogger(__name__)

AT_ONCE: Final = 256  # members of one commit: an open waits for no more than that
GAP_MAX: Final = 64  # ids in a row that are of another pack, behind which no member is looked for
ONE_CRC_LEN: Final = 8
CRASH_POINTS: Final = ("land.written", "land.synced", "land.recorded")


class Lander:
    """Lands members of packs."""

    def __init__(
        self,
        catalog: Catalog,
        writer: CatalogWriter,
        hot: HotCache,
        handles: HandleTable,
        room: Room,
        policy: EvictionPolicy,
        windows: Windows,
        tasks: Tasks,
        *,
        block_bytes: int,
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._hot = hot
        self._handles = handles
        self._room = room
        self._policy = policy
        self._windows = windows
        self._tasks = tasks
        self._block_bytes = block_bytes
        self._under_way: set[trio.Event] = set()
        self._stopped = False

    def stop(self) -> None:
        """No more of a stretch becomes files than what is being written."""
        self._stopped = True

    def begin(self, came: Neighbours) -> None:
        """What of the stretch can be files soon is, as far as there is room; the rest stays as it came."""
        if self._stopped or self._writer.target.read_only_reason or not self._writer.target.enabled:
            return
        over = trio.Event()
        if self._tasks.begin(self._land, came, over):
            self._under_way.add(over)

    async def _land(self, came: Neighbours, over: trio.Event) -> None:
        try:
            for step in (1, -1):
                if not await self._land_from(came, step):
                    return
        finally:
            self._under_way.discard(over)
            over.set()

    async def landed_all(self) -> None:
        """What was landing is there, and recorded."""
        while self._under_way:
            await next(iter(self._under_way)).wait()

    async def _land_from(self, came: Neighbours, step: int) -> bool:
        """In one direction from the member it came for; False: there is no room for more."""
        after: int | None = came.chunk_id
        while after is not None and not self._stopped:
            members, after = self._members(came, after, step)
            if not await self._land_some(came, members):
                return False
        return True

    # -- which -------------------------------------------------------------------------------------------------

    def _members(self, came: Neighbours, after: int, step: int) -> tuple[list[ChunkRow], int | None]:
        """The next that can land, from that id on in one direction, and where to go on; None: these were the last."""
        ids = range(after + step, max(0, after + step * (AT_ONCE + 1)), step)
        if not ids:
            return [], None
        with self._catalog.view() as view:
            chunks = view.get_many(came.stream_id, t.CHUNKS, ids)
            inside = [chunk for chunk in chunks if chunk is not None and self._is_inside(came.window, chunk)]
            last = inside[-1].chunk_id if inside else after
            more = bool(inside) and abs(ids[-1] - last) < GAP_MAX
            return self._landable(view, came.stream_id, inside), ids[-1] if more and ids[-1] > 1 else None

    def _is_inside(self, window: Window, chunk: ChunkRow) -> bool:
        return chunk.key == window.key and window.covers(chunk.location) and len(chunk.block_crcs) == ONE_CRC_LEN

    def _landable(self, view: View, stream_id: int, chunks: Sequence[ChunkRow]) -> list[ChunkRow]:
        """Those that are all of a file as it is now, of which nothing is here, and which nothing uses."""
        objects = view.get_many(stream_id, t.OBJECTS, [(chunk.ino, chunk.generation) for chunk in chunks])
        inodes = view.get_many(stream_id, t.INODES, [chunk.ino for chunk in chunks])
        here = view.get_many(stream_id, t.RESIDENCY, [chunk.chunk_id for chunk in chunks])
        found: list[ChunkRow] = []
        for chunk, row, inode, local in zip(chunks, objects, inodes, here, strict=True):
            if row is None or row.state != ObjectState.PUBLISHED or row.chunks != (chunk.chunk_id,) or chunk.holes:
                continue
            if inode is None or inode.generation != chunk.generation or not inode.nlink:
                continue
            if local is not None and (local.mask or local.warm_bytes):
                continue
            key = (stream_id, chunk.ino, chunk.generation)
            if key not in self._handles and key not in self._handles.moving:
                found.append(chunk)
        return found

    # -- how ---------------------------------------------------------------------------------------------------

    async def _land_some(self, came: Neighbours, members: list[ChunkRow]) -> bool:
        """Whether there was room, and no error that the next ones would meet, too."""
        if not members:
            return True
        reservation = await self._room.take(came.tenant, sum(on_disk(chunk.length) for chunk in members))
        if reservation is None:
            return False
        with reservation:
            with self._catalog.view() as view:  # room may have taken its time
                members = self._landable(view, came.stream_id, members)
            over = trio.Event()
            keys = [(came.stream_id, chunk.ino, chunk.generation) for chunk in members]
            self._handles.moving.update(dict.fromkeys(keys, over))
            try:
                with trio.CancelScope(shield=True):  # a file that is made is recorded, or goes
                    landed = await self._land_all(came, members)
                reservation.commit(sum(on_disk(chunk.length) for chunk in landed))
            except (Aof2Error, OSError) as e:  # said where it matters: each is fetched alone
                log.info("neighbours of a small file are not kept", extra={"error": str(e)})
                return False
            finally:
                for key in keys:
                    del self._handles.moving[key]
                over.set()
        for chunk in landed:
            self._policy.admit_old(chunk.ino, units_of(on_disk(chunk.length)))
        self._windows.laid(came.window, {chunk.ino: chunk.location for chunk in landed})
        return True

    async def _land_all(self, came: Neighbours, members: Sequence[ChunkRow]) -> list[ChunkRow]:
        """Files, synced, and the commit that speaks of them; of which members."""
        made = await trio.to_thread.run_sync(self._make_files, came, members)
        work = partial(residency.landed, members=made, block_bytes=self._block_bytes)
        kept: set[int] = set()
        try:
            if made:
                kept = await result_of(self._writer.submit(came.stream_id, work))
                self._hot.env.failpoint("land.recorded")
        finally:
            if gone := [chunk for chunk, _ in made if chunk.chunk_id not in kept]:
                await trio.to_thread.run_sync(self._remove, came.tenant, gone)
        return [chunk for chunk, _ in made if chunk.chunk_id in kept]

    def _remove(self, tenant: str, chunks: Sequence[ChunkRow]) -> None:
        for chunk in chunks:
            self._hot.unlink(self._hot.path(tenant, chunk.ino, chunk.generation))

    # -- on a worker thread ------------------------------------------------------------------------------------

    def _make_files(self, came: Neighbours, members: Sequence[ChunkRow]) -> list[tuple[ChunkRow, tuple[int, int, int]]]:
        """Backing files of those that are what was sealed, synced, and what each looks like."""
        made: list[tuple[ChunkRow, SmallFile]] = []
        self._hot.env.make_dirs(self._hot.root / came.tenant)
        try:
            for data, some, offsets in self._as_raw(came, members):
                made += zip(some, self._make(came.tenant, data, some, offsets), strict=True)
            fds = [one.fd for _, one in made if one.fd >= 0]
            self._hot.env.failpoint("land.written")
            if fds:
                self._hot.env.files.fsync_all(fds)
            self._hot.env.failpoint("land.synced")
            if failed := next((one.status for _, one in made if one.status < 0), 0):
                raise OSError(-failed, os.strerror(-failed))
        except BaseException:
            self._remove(came.tenant, [chunk for chunk, one in made if one.fd >= 0])
            raise
        finally:
            small.close_all([one.fd for _, one in made if one.fd >= 0])
        return [(chunk, (one.inode, one.size, one.mtime_ns)) for chunk, one in made if one.status == SmallStatus.READ]

    def _make(
        self, tenant: str, data: bytes | bytearray, chunks: Sequence[ChunkRow], offsets: Sequence[int]
    ) -> list[SmallFile]:
        spares = self._hot.spares.take(len(chunks))
        made, taken = small.land_small(
            [self._hot.path_text(tenant, chunk.ino, chunk.generation) for chunk in chunks],
            data,
            offsets,
            [chunk.length for chunk in chunks],
            [block_crc(chunk.block_crcs, 0) for chunk in chunks],
            b"".join([chunk.sha256 for chunk in chunks]),
            spares,
        )
        self._hot.spares.give_back(spares[taken:])
        return made

    def _as_raw(
        self, came: Neighbours, members: Sequence[ChunkRow]
    ) -> Iterator[tuple[bytes | bytearray, list[ChunkRow], list[int]]]:
        """Bytes, members whose bytes are in them, and where: those stored as they are, and those that are unpacked."""
        plain = [chunk for chunk in members if chunk.stored_bytes == chunk.length + footer_len(1)]
        if plain:
            yield came.data, plain, [chunk.offset - came.window.start for chunk in plain]
        packed = iter(chunk for chunk in members if chunk.stored_bytes != chunk.length + footer_len(1))
        while some := list(islice(packed, AT_ONCE)):
            raw, chunks, offsets = bytearray(), [], []
            for chunk in some:
                block = self._unpacked(came, chunk)
                if block is not None:
                    chunks.append(chunk)
                    offsets.append(len(raw))
                    raw += block
            if chunks:
                yield raw, chunks, offsets

    def _unpacked(self, came: Neighbours, chunk: ChunkRow) -> bytes | memoryview | None:
        """A member's one block; None: it is not right, and its reader says so."""
        at = chunk.offset - came.window.start
        held = memoryview(came.data)[at : at + chunk.stored_bytes]
        try:
            footer = read_footer(lambda start, length: bytes(held[start : start + length]), len(held), path=chunk.key)
            check_identity(footer, sha256=chunk.sha256, path=chunk.key)
            start, length = footer.frame_range(0)
            return decode_frame(footer, 0, held[start : start + length], path=chunk.key)
        except CorruptError:
            return None
