"""VerifyManifest: every blob of a checkpoint, or of a tenant, fetched again and proven; what fails is rebuilt.

A blob is streamed through its checks and kept nowhere, so nothing is reserved for it: size, footer, every frame, the
SHA-256 of the whole. One that is missing or damaged, read twice, is in the log as HydrationFailed reason 4
(NeedsRepair) for every chunk that needs it, before anything is done about it. Where a chunk of that content is whole on
the local disk and matches its seal, the blob is put again: under its own key, or, where it was in a pack, as an object
of its own, to which the rows go over.

Invariants
- `verified_ms` is set in the commit that moves the cursor behind the blob: after a crash no blob is fetched twice but
  those of the page that was under way.
- A remote that is away damages nothing: the job is tried again from its cursor.

Owner: the trio thread; fetching and hashing on worker threads. A crash leaves the cursor of the last page; in a
rebuild, at worst a blob that is missing instead of damaged, which the next attempt finds and puts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
import trio

from aof2.engine import objects, residency
from aof2.engine.aio import open_nursery
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import BlobRow, ChunkRow, ObjectRow
from aof2.engine.errors import CorruptError
from aof2.engine.jobs import queue
from aof2.engine.jobs.errors import NeedsRepairError
from aof2.engine.jobs.worker import JobContext
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.prover import check_size, key_to_rebuild, named, prove
from aof2.engine.remote.store import RemoteStore
from aof2.engine.tiering.hydrate import Hydrator
from aof2.engine.tiering.publish import Publisher, Target

log = logging.getLogger(__name__)

PAGE_BLOBS: Final = 32
PARALLEL: Final = 4
NAMED_MAX: Final = 100  # keys a report names; it counts them all
CRASH_POINTS: Final = ("verify.marked", "verify.rebuilt", "verify.page_done")

Item = tuple[bytes, BlobRow]


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """What to verify, and how far that is. Written to disk: append fields, with a default."""

    checkpoint_id: int = 0  # 0: everything the tenant has
    after: bytes = b""  # the hash of the last blob done


_scopes: Final = msgspec.msgpack.Decoder(Scope)


class Report(msgspec.Struct):
    """What was found. `lost`: damaged or missing, with no good local copy to rebuild it from."""

    blobs: int = 0
    good: int = 0
    missing: int = 0
    damaged: int = 0
    rebuilt: int = 0
    lost: int = 0
    rebuilt_keys: list[str] = []
    lost_keys: list[str] = []


def check_blob(remote: RemoteStore, sha256: bytes, blob: BlobRow) -> None:
    """RemoteMissingError or CorruptError unless the remote has exactly the blob that the row describes. Blocks."""
    check_size(remote, blob)
    prove(remote, blob, sha256)


class VerifyManifest:
    """The executor."""

    def __init__(self, publisher: Publisher, hydrator: Hydrator, compression_of: Callable[[str], str]) -> None:
        self._catalog = publisher.catalog
        self._remote = publisher.remote
        self._publisher = publisher
        self._hydrator = hydrator
        self._compression_of = compression_of
        self._limiter = trio.CapacityLimiter(PARALLEL)

    async def run(self, job: JobContext) -> None:
        scope = _scopes.decode(job.body) if job.body else Scope()
        report = msgspec.convert(queue.report(job.row), Report) if scope.after else Report()
        wanted = await trio.to_thread.run_sync(self._wanted, job.tenant_id, scope.checkpoint_id)
        report.blobs = await trio.to_thread.run_sync(self._count, job.tenant_id, wanted)
        done = 0
        while page := await trio.to_thread.run_sync(self._page, job.tenant_id, wanted, scope.after):
            job.check_cancelled()
            scope = Scope(scope.checkpoint_id, page[-1][0])
            good = await self._verify_page(job, page, report)
            done = report.good + report.missing + report.damaged
            await job.progress(
                done,
                report.blobs,
                body=t.encode(scope),
                report=msgspec.structs.asdict(report),
                along=partial(_mark_verified, hashes=good),
            )
            self._publisher.hot.env.failpoint("verify.page_done")
        if report.lost:
            # Retried, it starts over: what was lost may have been brought back.
            await job.progress(done, report.blobs, body=t.encode(Scope(scope.checkpoint_id)))
            names = ", ".join(report.lost_keys[:10])
            raise NeedsRepairError(f"{report.lost} of {report.blobs} blobs are lost and need repair: {names}")

    # -- what to look at -----------------------------------------------------------------------------------------

    def _wanted(self, tenant_id: int, checkpoint_id: int) -> set[bytes] | None:
        """The content of one checkpoint's objects; None: all there is."""
        if not checkpoint_id:
            return None
        wanted: set[bytes] = set()
        with self._catalog.view() as view:
            for _, row in view.scan(tenant_id, t.OBJECTS):
                if row.checkpoint_id == checkpoint_id:
                    chunks = (view.get(tenant_id, t.CHUNKS, chunk_id) for chunk_id in row.data_chunks)
                    wanted.update(chunk.sha256 for chunk in chunks if chunk is not None)
        return wanted

    def _count(self, tenant_id: int, wanted: set[bytes] | None) -> int:
        with self._catalog.view() as view:
            return sum(1 for item in view.scan(tenant_id, t.BLOBS) if _is_wanted(item, wanted))

    def _page(self, tenant_id: int, wanted: set[bytes] | None, after: bytes) -> list[Item]:
        page: list[Item] = []
        with self._catalog.view() as view:
            for item in view.scan(tenant_id, t.BLOBS, after=after or None):
                if _is_wanted(item, wanted):
                    page.append(item)
                if len(page) == PAGE_BLOBS:
                    break
        return page

    # -- looking -------------------------------------------------------------------------------------------------

    async def _verify_page(self, job: JobContext, page: list[Item], report: Report) -> list[bytes]:
        """The hashes of the good ones; the others are marked, and rebuilt where possible."""
        good: list[bytes] = []
        bad: list[tuple[Item, Exception]] = []

        async def one(item: Item) -> None:
            try:
                await self._check_twice(item)
            except (RemoteMissingError, CorruptError) as e:
                bad.append((item, e))
            else:
                good.append(item[0])

        async with open_nursery() as nursery:
            for item in page:
                nursery.start_soon(one, item)
        report.good += len(good)
        for item, error in sorted(bad, key=lambda pair: pair[0][0]):
            if self._is_still(job.tenant_id, item):
                await self._handle_bad(job, item, error, report)
        return good

    async def _check_twice(self, item: Item) -> None:
        """Bytes can be damaged on the way: only what fails twice is damaged there."""
        try:
            await trio.to_thread.run_sync(check_blob, self._remote, *item, limiter=self._limiter)
        except CorruptError:
            await trio.to_thread.run_sync(check_blob, self._remote, *item, limiter=self._limiter)

    def _is_still(self, tenant_id: int, item: Item) -> bool:
        """Whether the blob is still wanted: not pruned while we looked."""
        now = self._catalog.get(tenant_id, t.BLOBS, item[0])
        return now is not None and now.refs > 0 and now.location == item[1].location

    # -- repairing -----------------------------------------------------------------------------------------------

    async def _handle_bad(self, job: JobContext, item: Item, error: Exception, report: Report) -> None:
        sha256, blob = item
        if isinstance(error, RemoteMissingError):
            report.missing += 1
        else:
            report.damaged += 1
        log.warning("remote blob is not good", extra={"key": blob.key, "error": str(error), "tenant": job.tenant})
        chunks = await trio.to_thread.run_sync(self._chunks_of, job.tenant_id, sha256)
        users = [chunk.chunk_id for chunk, _ in chunks if chunk.key]
        await job.commit(partial(_mark_bad, chunk_ids=users), sync=True)
        self._publisher.hot.env.failpoint("verify.marked")
        for chunk, row in chunks:
            if await self._rebuilt(job, item, chunk, row, users):
                report.rebuilt += 1
                _name(report.rebuilt_keys, blob.key)
                return
        report.lost += 1
        _name(report.lost_keys, blob.key)

    def _chunks_of(self, tenant_id: int, sha256: bytes) -> list[tuple[ChunkRow, ObjectRow]]:
        """Every chunk with this content, with its object: also those not published yet, which are all local."""
        with self._catalog.view() as view:
            chunks = [chunk for _, chunk in view.scan(tenant_id, t.CHUNKS) if chunk.sha256 == sha256]
            rows = (view.get(tenant_id, t.OBJECTS, (chunk.ino, chunk.generation)) for chunk in chunks)
            return [(chunk, row) for chunk, row in zip(chunks, rows, strict=True) if row is not None]

    async def _rebuilt(self, job: JobContext, item: Item, chunk: ChunkRow, row: ObjectRow, users: list[int]) -> bool:
        """Whether the blob could be put again from this chunk's local bytes."""
        sha256, blob = item
        target = Target(job.tenant_id, job.tenant, row, self._compression_of(job.tenant))
        handle = await self._hydrator.open((job.tenant_id, row.ino, row.generation), job.tenant)
        try:
            if handle.masks[chunk.index] != objects.full_mask(chunk.length, handle.block_bytes):
                return False
            key = key_to_rebuild(chunk, blob.key)
            if key != blob.key:
                await job.commit(partial(objects.upload_started, keys=[(chunk.chunk_id, key)]))
            up = await self._publisher.rebuild(target, named(chunk, key), key, job.name)
        except (CorruptError, FileNotFoundError) as e:
            log.info("local copy cannot stand in for the remote one", extra={"path": str(handle.path), "error": str(e)})
            return False
        finally:
            self._hydrator.close(handle)
        await job.commit(partial(objects.blob_rebuilt, sha256=sha256, chunk_ids=users, up=up), sync=True)
        self._hydrator.fetcher.forget(blob.key)
        self._publisher.hot.env.failpoint("verify.rebuilt")
        return True


def _is_wanted(item: Item, wanted: set[bytes] | None) -> bool:
    return item[1].refs > 0 and (wanted is None or item[0] in wanted)


def _mark_verified(b: Batch, hashes: list[bytes]) -> None:
    for sha256 in hashes:
        blob = b.get(t.BLOBS, sha256)
        if blob is not None:
            b.put(t.BLOBS, sha256, msgspec.structs.replace(blob, verified_ms=b.now_ms))


def _mark_bad(b: Batch, chunk_ids: list[int]) -> None:
    for chunk_id in chunk_ids:
        residency.hydration_failed(b, chunk_id, int(ReasonCode.OBJECT_MISSING))


def _name(names: list[str], key: str) -> None:
    if len(names) < NAMED_MAX:
        names.append(key)
