"""What has to be tidied up now and then, and how often: derived from what the settings keep.

    once, at the start    files on this disk that no row speaks of (a crash left them)
    prune_every_s         uploads in the remote that ended midway more than `retention.purge_after` ago
    cursors_every_s       cursors of the change feed that were not used for `retention.cursor_idle`

Prunes themselves are jobs (`jobs/service.py`), looked for every `prune_every_s` as well.

Invariants
- Nothing of the remote is touched that another writer may own: the store asks the fence first.
- What fails is tried again at the next turn; a remote that is away is not logged here.

Owner: one task of the volume's nursery. A crash leaves the rest for the next start.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.aio import open_nursery, result_of
from aof2.engine.catalog import changes
from aof2.engine.errors import Aof2Error, FatalIOError, ReadOnlyError
from aof2.engine.local import orphans
from aof2.engine.settings import Settings

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

# How much later than it may something goes: a sixth of the time that it is kept, within reason.
LATE_SHARE: Final = 6
EVERY_S_MIN: Final = 1.0
PRUNE_EVERY_S_MAX: Final = 600.0
CURSORS_EVERY_S_MAX: Final = 3600.0


def prune_every_s(settings: Settings) -> float:
    """How often the remote is looked through for what may go."""
    return min(max(settings.retention.purge_after_s / LATE_SHARE, EVERY_S_MIN), PRUNE_EVERY_S_MAX)


def cursors_every_s(settings: Settings) -> float:
    return min(max(settings.retention.cursor_idle_s / LATE_SHARE, EVERY_S_MIN), CURSORS_EVERY_S_MAX)


class Janitor:
    """Of one volume."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    async def run(self) -> None:
        await self.sweep_orphans()
        async with open_nursery() as nursery:
            nursery.start_soon(self._uploads_forever)
            nursery.start_soon(self._cursors_forever)

    # -- the remote --------------------------------------------------------------------------------------------

    async def _uploads_forever(self) -> None:
        while True:
            with contextlib.suppress(Aof2Error, OSError):  # away, refused, fenced: at the next turn
                await self.abort_stale_uploads()
            await trio.sleep(prune_every_s(self._volume.settings))

    async def abort_stale_uploads(self) -> int:
        """Ends uploads that no process goes on with; how many."""
        older_than_s = self._volume.settings.retention.purge_after_s
        aborted = await trio.to_thread.run_sync(self._volume.remote.abort_stale_uploads, older_than_s)
        if aborted:
            log.info("uploads that ended midway were cleared away", extra={"uploads": aborted})
        return aborted

    # -- cursors -----------------------------------------------------------------------------------------------

    async def _cursors_forever(self) -> None:
        while True:
            await trio.sleep(cursors_every_s(self._volume.settings))
            with contextlib.suppress(ReadOnlyError, FatalIOError, OSError):
                await self.expire_cursors()

    async def expire_cursors(self) -> None:
        """Subscribers that were not heard of no longer hold the change feed back."""
        volume = self._volume
        idle_ms = int(volume.settings.retention.cursor_idle_s * 1000)
        for stream_id in volume.target.streams:
            with volume.catalog.view() as view:
                due = changes.has_idle(view, stream_id, volume.env.now_ms(), idle_ms)
            if due:
                gone = await result_of(volume.writer.submit(stream_id, partial(changes.expire, idle_ms=idle_ms)))
                log.info("change cursors expired", extra={"stream_id": stream_id, "cursors": gone})

    # -- this disk ---------------------------------------------------------------------------------------------

    async def sweep_orphans(self) -> int:
        """Removes files in hot_cache and warm that no row speaks of; how many."""
        volume = self._volume
        removed = 0
        names = volume.tenant_names()
        hot = await trio.to_thread.run_sync(orphans.hot_orphans, volume.catalog, volume.hot.root, names)
        try:
            await result_of(volume.writer.flushed())  # a name that is gone only from the page cache could come back
        except (ReadOnlyError, FatalIOError):
            return 0
        for key, path in hot:
            await trio.lowlevel.checkpoint()
            with volume.catalog.view() as view:
                # In use means that blocks may be landing that the catalog does not know yet.
                if key[1] >= volume.unborn_from.get(key[0], key[1] + 1):
                    continue
                in_use = key in volume.handles or key in volume.handles.moving
                if not in_use and orphans.hot_is_orphan(view, key):
                    volume.hot.unlink(path)
                    removed += 1
        async with volume.evictor.lock:  # nothing is being demoted meanwhile
            warm = await trio.to_thread.run_sync(orphans.warm_orphans, volume.catalog, volume.warm.root, names)
            for stream_id, chunk_id, path in warm:
                if not volume.warm.has((stream_id, chunk_id)):
                    volume.hot.unlink(path)
                    removed += 1
        if removed:
            log.info("orphan files removed", extra={"files": removed})
        return removed
