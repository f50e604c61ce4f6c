"""Recording what came in: a little later, for many blocks at once.

Invariants
- A residency bit is recorded only after fdatasync of its bytes, and not where a writer has taken the file over.
- What is still coming in is left alone for a while: an fsync under its writes would stall them.

Owner: the trio thread; syncs on worker threads. A crash before the commit loses bits, and what they spoke of is fetched
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
import trio

from aof2.engine import objects
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

CRASH_POINTS: Final = ("hydrate.synced", "hydrate.recorded")


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
        for handle in self._handles.dirty():
            if handle.key in arriving and now_s - handle.added_since_s < SETTLE_AGE_MAX_S:
                self._wanted.set()
            else:
                await self.settle_one(handle)

    async def settle(self) -> None:
        """Makes the blocks that came in durable and known to the catalog."""
        for handle in self._handles.dirty():
            await self.settle_one(handle)

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
            objects.resident,
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
        except OSError:  # the log has no room: the next settle tries again
            for chunk, bits in added.items():
                handle.added[chunk] = handle.added.get(chunk, 0) | bits & handle.masks[chunk]
            raise
        self._recorded(handle)
        if backing is not None:
            handle.row = msgspec.structs.replace(handle.row, backing=backing)
        self._hot.env.failpoint("hydrate.recorded")

    def _sync_file(self, fd: int) -> tuple[int, int, int]:
        self._hot.env.files.fsync(fd)
        self._hot.env.failpoint("hydrate.synced")
        return self._hot.identity(fd)
