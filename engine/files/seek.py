"""Finding room for writers that wait for it: what is closed is sealed and uploaded, completed chunks of what is open
are (`parts.py`), and clean data makes way.

Invariants
- A writer waits until what it needs was reserved. It is told ENOSPC, or EDQUOT where its tenant's quota is what is
  missing, when it can never fit, or when nothing moved for as long as a remote may take to answer (PATIENCE of these
  while an upload is under way).
- One writer a tenant looks for room at a time; the others of the tenant wait for it.

Owner: the trio thread. A crash leaves nothing of this.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from aof2.engine.catalog.rows import JobState, JobType
from aof2.engine.errors import os_error
from aof2.engine.locks import Rank, TaskLock, task_lock
from aof2.engine.quota import Reservation
from aof2.engine.quota.accounts import Level

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

# What moves tells itself; other files' writers, and other users of the disk, do not.
LOOK_AGAIN_S: Final = 0.5
PUSH_EVERY_S: Final = 2.0
# An upload that is under way and has not failed moves only when it is done.
PATIENCE: Final = 10


class Writing(NamedTuple):
    """Who wants to write where."""

    tenant: str
    ino: int
    offset: int


class _Moved(NamedTuple):
    """What changes when there is hope."""

    uploaded_bytes: int
    evicted_bytes: int
    sealed_files: int
    part_bytes: int


class RoomSeeker:
    """Reserves room for writers, at once or when it came free."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._volume = files.volume
        self._turns: dict[str, TaskLock] = {}  # by tenant
        self._moved: _Moved | None = None
        self._moved_s = 0.0
        self._pushed_s = float("-inf")
        self._pushing = task_lock(Rank.PUSH)

    async def take_now(self, tenant: str, size: int, wanted: int) -> Reservation | None:
        """As much as is wanted; else what there is, if that is enough."""
        quota = self._volume.quota
        reservation = await self._volume.evictor.take(tenant, wanted)
        if reservation is None and wanted > size:
            short = quota.shortage(tenant, wanted)
            less = max(size, wanted - max(short.everyones_bytes, short.tenants_bytes))
            reservation = quota.try_reserve(tenant, less) or quota.try_reserve(tenant, size)
        return reservation

    async def take(self, writing: Writing, size: int, wanted: int) -> Reservation:
        """The same, and waits for it; OSError when there will be none."""
        began_s = trio.current_time()
        reservation = await self.take_now(writing.tenant, size, wanted)
        if reservation is not None:
            return reservation
        async with self._turns.setdefault(writing.tenant, task_lock(Rank.TENANT_ROOM)):
            return await self._wait(writing, size, wanted, began_s)

    async def _wait(self, writing: Writing, size: int, wanted: int, began_s: float) -> Reservation:
        volume = self._volume
        while True:
            change = volume.jobs.runner.changes.next()
            reservation = await self.take_now(writing.tenant, size, wanted)
            if reservation is not None:
                return reservation
            short = volume.quota.shortage(writing.tenant, size)
            if short.never is not None:
                raise _no_room(short.never)
            await self.push()
            tenant = None if short.everyones_bytes else writing.tenant
            if await self._files.parts.make_room(wanted, tenant=tenant, writing=(writing.ino, writing.offset)):
                continue
            waited_s = trio.current_time() - max(began_s, self._last_moved_s())
            left_s = self._patience_s() - waited_s
            if left_s <= 0:
                log.info("a writer found no room", extra={"ino": writing.ino, "waited_s": round(waited_s, 1)})
                raise _no_room(Level.TENANT if short.tenants_bytes and not short.everyones_bytes else Level.VOLUME)
            with trio.move_on_after(min(left_s, LOOK_AGAIN_S)):
                await change.wait()

    async def push(self) -> None:
        """Whatever can become clean is on its way to the remote, at once."""
        async with self._pushing:
            if trio.current_time() - self._pushed_s < PUSH_EVERY_S:
                return
            await self._files.sealer.seal_now()
            for stream_id in self._volume.tenant_names():
                await self._volume.jobs.checkpoint(stream_id, wait=False)
            self._pushed_s = trio.current_time()

    def _last_moved_s(self) -> float:
        volume = self._volume
        moved = _Moved(
            volume.publisher.uploaded_bytes,
            volume.evictor.evicted_bytes,
            self._files.sealer.sealed_files,
            self._files.parts.taken_bytes,
        )
        if moved != self._moved:
            self._moved, self._moved_s = moved, trio.current_time()
        return self._moved_s

    def _patience_s(self) -> float:
        timeout_s = self._volume.settings.remote.timeout_s
        return timeout_s * PATIENCE if self._is_uploading() else timeout_s

    def _is_uploading(self) -> bool:
        runner = self._volume.jobs.runner
        return any(
            row.type == JobType.CREATE_CHECKPOINT and row.state == JobState.RUNNING and not row.reason
            for stream_id in self._volume.tenant_names()
            for row in runner.jobs(stream_id)
        )


def _no_room(level: Level) -> OSError:
    code = errno.EDQUOT if level is Level.TENANT else errno.ENOSPC
    return os_error(code)
