"""Recording what came in: a little later, for many blocks at once.

Invariants
- A residency bit is recorded only after fdatasync of its bytes, and not where a writer has taken the file over.
- What is still coming in is left alone for a while: an fsync under its writes would stall them.

Owner: the trio thread; syncs on worker threads. A crash before the commit loses bits, and what they spoke of is fetched
again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec
import trio

from aof2.engine import objects, residency
from aof2.engine.aio import result_of
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import FatalIOError, ReadOnlyError
from aof2.engine.local.handles import HandleTable, Key, ObjectHandle
from aof2.engine.local.hot import HotCache

log = logging.getLogger(__name__)

# Losing what was not recorded yet means fetching it again: not worth an fsync more often than this.
SETTLE_PERIOD_S: Final = 1.0
SETTLE_AGE_MAX_S: Final = 5.0
BATCH_MIN: Final = 8
BATCH_MAX: Final = 512

CRASH_POINTS: Final = ("hydrate.synced", "hydrate.recorded")


class _Settled(NamedTuple):
    """What one object's commit says: blocks by chunk id, and the file's identity where nothing landed since."""

    handle: ObjectHandle
    masks: dict[int, int]
    backing: tuple[int, int, int] | None


class Settler:
    """Records blocks that landed. `arriving` tells the objects of which more is on its way; `recorded` hears of each
    object that is recorded."""

    def __init__(
        self,
        writer: CatalogWriter,
        hot: HotCache,
        handles: HandleTable,
        *,
        block_bytes: int,
        arriving: Callable[[], set[Key]],
        recorded: Callable[[ObjectHandle], None],
    ) -> None:
        self._writer = writer
        self._hot = hot
        self._handles = handles
        self._block_bytes = block_bytes
        self._arriving = arriving
        self._recorded = recorded
        self._wanted = trio.Event()

    def want(self) -> None:
        """Something landed."""
        self._wanted.set()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            await trio.sleep(SETTLE_PERIOD_S)
            self._wanted = trio.Event()
            try:
                await self._settle_quiet_ones()
            except (ReadOnlyError, FatalIOError):
                continue  # said where it happened; what is here is served, and recorded with the next that comes
            except OSError as e:
                log.warning("hydrated blocks are not recorded yet", extra={"error": str(e)})
                self._wanted.set()

    async def _settle_quiet_ones(self) -> None:
        """What is still coming in is left alone for a while: an fsync under its writes would stall them."""
        arriving = self._arriving()
        now_s = self._hot.env.monotonic_s()
        quiet: list[ObjectHandle] = []
        for handle in self._handles.dirty():
            if handle.key in arriving and now_s - handle.added_since_s < SETTLE_AGE_MAX_S:
                self._wanted.set()
            else:
                quiet.append(handle)
        await self._settle_all(quiet)

    async def settle(self) -> None:
        """Makes the blocks that came in durable and known to the catalog."""
        await self._settle_all(list(self._handles.dirty()))

    async def _settle_all(self, handles: Sequence[ObjectHandle]) -> None:
        """Many at once: one sync, one commit a tenant. What does not go that way is recorded one by one."""
        left = list(handles)
        while len(left) >= BATCH_MIN:
            some, left = left[:BATCH_MAX], left[BATCH_MAX:]
            with contextlib.ExitStack() as using:
                for handle in some:
                    using.enter_context(self._handles.using(handle))
                for handle in await self._record_all([handle for handle in some if handle.fd >= 0]):
                    await self._record(handle)
        for handle in left:
            await self.settle_one(handle)

    async def _record_all(self, handles: Sequence[ObjectHandle]) -> list[ObjectHandle]:
        """Those that are to be recorded alone: a writer has the file, or it could not be looked at."""
        added = {handle: handle.added for handle in handles}
        for handle in handles:
            handle.added = {}
        identities = await trio.to_thread.run_sync(self._sync_files, [handle.fd for handle in handles])
        if any(handle.written_to for handle in handles):
            identities = [None for _ in handles]  # a descriptor may be closed, and its number another file's
        alone = [handle for handle, identity in zip(handles, identities, strict=True) if identity is None]
        seen = [pair for pair in zip(handles, identities, strict=True) if pair[1] is not None]
        self._put_back({handle: added[handle] for handle in alone})
        by_stream: dict[int, list[_Settled]] = {}
        for handle, identity in seen:
            masks = {handle.chunks[c].chunk_id: bits for c, bits in added[handle].items() if bits}
            backing = None if handle.added else identity
            by_stream.setdefault(handle.key[0], []).append(_Settled(handle, masks, backing))
        for stream_id, group in by_stream.items():
            try:
                gone = await result_of(self._writer.submit(stream_id, partial(self._resident_all, group)))
            except OSError:  # the log has no room: the next settle tries again
                self._put_back({one.handle: added[one.handle] for one in group})
                raise
            for one in group:
                if one.handle.key in gone:
                    continue
                self._recorded(one.handle)
                if one.backing is not None:
                    one.handle.row = msgspec.structs.replace(one.handle.row, backing=one.backing)
        self._hot.env.failpoint("hydrate.recorded")
        return alone

    def _resident_all(self, group: Sequence[_Settled], b: Batch) -> set[Key]:
        """Which of them are gone. Looked at where commits are in order, as in `_record`."""
        gone: set[Key] = set()
        for handle, masks, backing in group:
            if handle.written_to:
                continue
            _, ino, generation = handle.key
            try:
                residency.resident(b, ino, generation, masks, backing, block_bytes=self._block_bytes)
            except objects.ObjectGoneError:  # raised before anything of it changed
                gone.add(handle.key)
        return gone

    @staticmethod
    def _put_back(added: Mapping[ObjectHandle, Mapping[int, int]]) -> None:
        for handle, chunks in added.items():
            for chunk, bits in chunks.items():
                handle.added[chunk] = handle.added.get(chunk, 0) | bits & handle.masks[chunk]

    async def settle_one(self, handle: ObjectHandle) -> None:
        if handle.fd < 0:
            return  # it was recorded and given up since its caller looked
        with self._handles.using(handle):  # not to be evicted under the sync
            await self._record(handle)

    async def _record(self, handle: ObjectHandle) -> None:
        added, handle.added = handle.added, {}
        try:
            identity = await trio.to_thread.run_sync(self._sync_file, handle.fd)
        except (OSError, FatalIOError):
            if handle.written_to:
                return  # a writer has the file now, and may have closed this descriptor of it
            raise
        masks = {handle.chunks[c].chunk_id: bits for c, bits in added.items() if bits}
        # Blocks that landed while we synced make the identity stale: the next settle records it.
        backing = None if handle.added else identity
        stream_id, ino, generation = handle.key
        work = partial(
            residency.resident,
            ino=ino,
            generation=generation,
            masks=masks,
            backing=backing,
            block_bytes=self._block_bytes,
        )

        def record(b: Batch) -> None:
            # Looked at where commits are in order: a writer may have taken the file over while it was synced, and then
            # its blocks are the next generation's.
            if not handle.written_to:
                work(b)

        try:
            await result_of(self._writer.submit(stream_id, record))
        except objects.ObjectGoneError:
            return  # on a follower, whose writer lets go of what is open here
        except OSError:  # the log has no room: the next settle tries again
            for chunk, bits in added.items():
                handle.added[chunk] = handle.added.get(chunk, 0) | bits & handle.masks[chunk]
            raise
        self._recorded(handle)
        if backing is not None:
            handle.row = msgspec.structs.replace(handle.row, backing=backing)
        self._hot.env.failpoint("hydrate.recorded")

    def _sync_files(self, fds: Sequence[int]) -> list[tuple[int, int, int] | None]:
        """The identity of each; None of all where a writer closed one meanwhile."""
        try:
            self._hot.env.files.fsync_all(fds)
            self._hot.env.failpoint("hydrate.synced")
            return [self._hot.identity(fd) for fd in fds]
        except (FatalIOError, OSError) as e:
            cause = e.__cause__ if isinstance(e, FatalIOError) else e
            if isinstance(cause, OSError) and cause.errno == errno.EBADF:
                return [None for _ in fds]
            raise

    def _sync_file(self, fd: int) -> tuple[int, int, int]:
        self._hot.env.files.fsync(fd)
        self._hot.env.failpoint("hydrate.synced")
        return self._hot.identity(fd)
