"""DownloadCheckpoint: brings a checkpoint, a tenant or named objects onto the local disk before a reader asks for them.

The warm standby flow. Blocks come through the Hydrator, so they are verified, single-flight with readers, and land only
where the quota has room. What is here already is not fetched; so a job that was interrupted goes on by itself.

Invariants
- More than the volume may hold is refused before the first byte: it would push out its own beginning.
- The job is done when everything is here and recorded as being here.

Owner: the trio thread. A crash leaves what had been recorded; the rest is fetched by the next attempt.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectRow, ObjectState
from aof2.engine.errors import CorruptError
from aof2.engine.jobs.errors import NeedsRepairError
from aof2.engine.jobs.worker import JobContext
from aof2.engine.local.handles import ObjectHandle
from aof2.engine.objects import ObjectGoneError
from aof2.engine.quota.accounts import Level, QuotaExceededError
from aof2.engine.quota.storage import StorageQuota
from aof2.engine.tiering.hydrate import Hydrator

log = logging.getLogger(__name__)

STEP_BYTES: Final = 8 << 20
SAVES_PER_JOB: Final = 16
CRASH_POINTS: Final = ("download.chunk_done", "download.settled")


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """What to bring. Written to disk: append fields, with a default."""

    checkpoint_id: int = 0  # 0: whatever checkpoint
    objects: tuple[tuple[int, int], ...] = ()  # (inode, generation); none: all of the tenant


_scopes: Final = msgspec.msgpack.Decoder(Scope)


class DownloadCheckpoint:
    """The executor."""

    def __init__(self, hydrator: Hydrator, quota: StorageQuota) -> None:
        self._hydrator = hydrator
        self._quota = quota

    async def run(self, job: JobContext) -> None:
        scope = _scopes.decode(job.body) if job.body else Scope()
        rows = await trio.to_thread.run_sync(self._rows, job.tenant_id, scope)
        self._refuse_too_much(job.tenant, sum(row.data_bytes for row in rows))
        total = sum(len(row.data_chunks) for row in rows)
        done = saved = 0
        failed: list[str] = []
        for row in rows:
            job.check_cancelled()
            try:
                await self._bring(job, row)
            except CorruptError as e:
                failed.append(f"object {row.ino}.{row.generation}: {e}")
                continue
            except ObjectGoneError:
                pass  # unlinked meanwhile: nothing to bring
            done += len(row.data_chunks)
            if done - saved > total // SAVES_PER_JOB:
                saved = done
                await job.progress(done, total)
        await self._hydrator.settle()
        self._hydrator.hot.env.failpoint("download.settled")
        await job.progress(done, total, report={"chunks": done, "objects": len(rows), "failed": failed[:100]})
        if failed:
            raise NeedsRepairError(f"{len(failed)} of {len(rows)} objects cannot be had: {'; '.join(failed[:10])}")

    def _rows(self, tenant_id: int, scope: Scope) -> list[ObjectRow]:
        with self._hydrator.catalog.view() as view:
            if scope.objects:
                named = (view.get(tenant_id, t.OBJECTS, key) for key in scope.objects)
                rows = [row for row in named if row is not None]
            else:
                rows = [row for _, row in view.scan(tenant_id, t.OBJECTS)]
                newest = {row.ino: row.generation for row in rows if row.state == ObjectState.PUBLISHED}
                if not scope.checkpoint_id:
                    rows = [row for row in rows if newest.get(row.ino) == row.generation]
        return [
            row for row in rows if row.state == ObjectState.PUBLISHED and scope.checkpoint_id in (0, row.checkpoint_id)
        ]

    def _refuse_too_much(self, tenant: str, size_bytes: int) -> None:
        for level, usage in ((Level.TENANT, self._quota.tenant_usage(tenant)), (Level.VOLUME, self._quota.usage)):
            if usage.limit_bytes is not None and size_bytes > usage.limit_bytes:
                name = tenant if level is Level.TENANT else ""
                raise QuotaExceededError(level, size_bytes, usage.limit_bytes, name=name, never=True)

    async def _bring(self, job: JobContext, row: ObjectRow) -> None:
        handle = await self._hydrator.open((job.tenant_id, row.ino, row.generation), job.tenant)
        try:
            for index in (i for i, chunk_id in enumerate(row.chunks) if chunk_id):
                await self._bring_chunk(job, handle, index)
                self._hydrator.hot.env.failpoint("download.chunk_done")
        finally:
            self._hydrator.close(handle)

    async def _bring_chunk(self, job: JobContext, handle: ObjectHandle, index: int) -> None:
        per_chunk = handle.blocks_per_chunk
        end = min((index + 1) * per_chunk, handle.block_count)
        step = max(1, STEP_BYTES // handle.block_bytes)
        for first in range(index * per_chunk, end, step):
            last = min(first + step, end) - 1
            absent = [block for block in range(first, last + 1) if not handle.is_resident(block)]
            if not absent:
                continue
            job.check_cancelled()
            offset = absent[0] * handle.block_bytes
            await self._hydrator.read(handle, offset, (absent[-1] + 1) * handle.block_bytes - offset)
            # A read is served without room, too; a download is not done then.
            missing = [block for block in absent if not handle.is_resident(block)]
            if missing:
                size_bytes = sum(handle.block_len(block) for block in missing)
                limit_bytes = self._quota.usage.limit_bytes or 0
                raise QuotaExceededError(Level.VOLUME, size_bytes, limit_bytes, never=False)
