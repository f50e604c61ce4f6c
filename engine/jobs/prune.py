"""PruneCheckpoint: what retention no longer keeps leaves the catalog, then the remote.

    generations beyond the newest N, tombstones past their window → rows released → blobs without references
    → Tier2DeleteQueued (durable, the blob's row goes with it) → remote delete → Tier2Deleted

Invariants
- A blob is deleted only when no chunk row references it, none has for `purge_after`, and the commit that took it out
  of the catalog is durable: from then on the Publisher uploads the same content anew, under another key.
- The manifest's pending deletes are the work list, so a crash leaves nothing undone and nothing forgotten.
- The remote's log has that commit before an object goes: a restore from there looks for nothing that is gone.
- What a live follower may still read stays (`follow/heartbeat.py`): at its position, and in its oldest open file.
- What a cold scan still reads stays (`blocked`): the job comes again. What is in use locally stays until the next
  prune.
- A pack goes with the last blob row that names it, or, where members were moved out of it, when the last of those did
  so `purge_after` ago; one that a row names is never deleted, whatever its count says.
- Uploads that were begun under a name that no chunk has (cancelled jobs, objects unlinked midway) are cleared as well,
  once nothing happened to them for `purge_after`.

Owner: the trio thread; scans and deletes on worker threads. A crash leaves pending deletes, which the job goes on with.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from typing import Final, NamedTuple, TypeVar

import msgspec
import trio

from aof2.engine import namespace, objects, packrows, segments, snapshots
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import entries_of
from aof2.engine.catalog.rows import BlobRow, ObjectRow, ObjectState
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.follow.heartbeat import Followers
from aof2.engine.jobs.errors import PostponedError
from aof2.engine.jobs.worker import JobContext
from aof2.engine.local.handles import Key
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import LOG_SEGMENT_ID, ReasonCode
from aof2.engine.manifest.index import ManifestEntry
from aof2.engine.remote.keys import AnyPackKey, WholeBlobKey, is_pack, parse_key
from aof2.engine.tiering.evict import Evictor
from aof2.engine.tiering.fetch import BlobFetcher

log = logging.getLogger(__name__)

PAGE: Final = 64
SCAN_PAGE: Final = 4096
LOG_MAX_S: Final = 30.0
CRASH_POINTS: Final = ("prune.released", "prune.queued", "prune.deleted", "prune.recorded")

T = TypeVar("T")
Upload = tuple[int, str]  # chunk id, key
_uploads: Final = msgspec.msgpack.Decoder(tuple[int, str, int])
_deletes: Final = msgspec.msgpack.Decoder(tuple[int, str])
_entries: Final = msgspec.msgpack.Decoder(ManifestEntry)


class Retention(NamedTuple):
    """What is kept: the newest generations of an inode, what was unlinked lately, unreferenced blobs for a while."""

    generations: int
    purge_after_ms: int
    undelete_window_ms: int


class Report(msgspec.Struct):
    objects_released: int = 0
    objects_in_use: int = 0
    blobs_deleted: int = 0
    bytes_freed: int = 0
    blobs_blocked: int = 0
    segments_retired: int = 0


class Forecast(msgspec.Struct):
    """What a prune would do: generations let go of, remote objects deleted now, and those that are due once nothing
    has referred to them for `purge_after`."""

    generations: int = 0
    blobs: int = 0
    bytes: int = 0
    later_blobs: int = 0
    later_bytes: int = 0


# -- what is due -------------------------------------------------------------------------------------------------


def retirable(view: View, tenant_id: int, rows: Sequence[ObjectRow], now_ms: int, keep: Retention) -> list[ObjectRow]:
    """Of one inode's generations, those that may go."""
    published = sorted((r for r in rows if r.state == ObjectState.PUBLISHED), key=lambda r: r.generation)
    inode = view.get(tenant_id, t.INODES, rows[0].ino)
    current = 0 if inode is None else inode.generation
    old = [r for r in published[: -max(1, keep.generations)] if r.generation != current]
    gone = [r for r in old if _superseded(view, tenant_id, r, now_ms)]
    kept = snapshots.pinned(rows, snapshots.moments(view, tenant_id))
    if kept:
        return [r for r in gone if r.generation not in kept]  # and the inode stays, for what is kept of it
    over_ms = now_ms - keep.undelete_window_ms
    dead = [r for r in rows if r.state == ObjectState.TOMBSTONED and r.tombstoned_ms <= over_ms]
    if dead and (inode is None or not inode.nlink) and all(r in dead or r in published for r in rows):
        return list(rows)  # dead for good: there is nothing that the past would be the past of
    return gone + dead


def _superseded(view: View, tenant_id: int, row: ObjectRow, now_ms: int) -> bool:
    chunks = (view.get(tenant_id, t.CHUNKS, chunk_id) for chunk_id in row.data_chunks)
    return all(chunk is None or (chunk.superseded and chunk.purge_at_ms <= now_ms) for chunk in chunks)


def find_retirable(catalog: Catalog, tenant_id: int, now_ms: int, keep: Retention) -> Iterator[ObjectRow]:
    """Goes through the objects in short looks. Blocks."""
    after: bytes | None = None
    while True:
        with catalog.view() as view:
            page = [row for _, row in islice(view.scan(tenant_id, t.OBJECTS, after=after), SCAN_PAGE)]
            if not page:
                return
            # The last inode of a page may go on behind it: it is looked at as a whole.
            rest = view.scan(tenant_id, t.OBJECTS, prefix=page[-1].ino.to_bytes(8, "big"))
            page = [r for r in page if r.ino != page[-1].ino] + [row for _, row in rest]
            found = [
                row
                for _, group in groupby(page, key=lambda r: r.ino)
                for row in retirable(view, tenant_id, list(group), now_ms, keep)
            ]
        yield from found
        after = t.OBJECTS.pack_key((page[-1].ino, page[-1].generation))


def find_unreferenced(catalog: Catalog, tenant_id: int, before_ms: int) -> Iterator[tuple[bytes, BlobRow]]:
    """Blobs that no chunk row has referenced since before then. Blocks."""
    after: bytes | None = None
    while True:
        with catalog.view() as view:
            page = list(islice(view.scan(tenant_id, t.BLOBS, after=after), SCAN_PAGE))
        if not page:
            return
        yield from ((sha256, blob) for sha256, blob in page if not blob.refs and blob.unreferenced_ms <= before_ms)
        after = page[-1][0]


def find_empty(catalog: Catalog, tenant_id: int, before_ms: int) -> list[tuple[str, int]]:
    """Packs whose members were moved elsewhere, all of them before then, and their lengths. Blocks."""
    with catalog.view() as view:
        rows = view.scan(tenant_id, t.PACKS)
        return [(key, row.pack_bytes) for key, row in rows if packrows.is_due(row, before_ms)]


def find_abandoned(catalog: Catalog, tenant_id: int, before_ms: int) -> list[Upload]:
    """Uploads that were begun, did not end, and whose chunk is gone or has its blob under another key. Blocks."""
    prefix = t.STREAM.pack(tenant_id)
    with catalog.view() as view:
        pending = [_uploads.decode(v)[:2] for _, v in view.raw_scan("segments", prefix + t.SEGMENT_PENDING_UPLOAD)]
        found = [
            (chunk_id, key)
            for chunk_id, key in pending
            if _is_blob(key) and _is_abandoned(view, tenant_id, chunk_id, key, before_ms)
        ]
    # A pack that waits for one of its members is not given up: its job may go on with it.
    waiting = {key for _, key in set(pending) - set(found) if is_pack(key)}
    return [(chunk_id, key) for chunk_id, key in found if key not in waiting]


def _is_abandoned(view: View, tenant_id: int, chunk_id: int, key: str, before_ms: int) -> bool:
    chunk = view.get(tenant_id, t.CHUNKS, chunk_id)
    if chunk is not None and chunk.key in ("", key):
        return False
    entry = view.raw("segments", t.STREAM.pack(tenant_id) + t.SEGMENT_ENTRY + chunk_id.to_bytes(8, "big"))
    quiet = entry is None or _entries.decode(entry).last_ms <= before_ms
    return quiet and (is_pack(key) or not is_named(view, tenant_id, key))


def find_retired(catalog: Catalog, tenant_id: int, before_ms: int) -> list[int]:
    """Segments that the fold still holds though no chunk has their number and none will: parts that were given up, and
    what older versions left. Quiet since before then, and nothing of theirs is under way. Blocks."""
    found: list[int] = []
    after: bytes | None = None
    with catalog.view() as view:
        waiting = {dirty.segment_id for _, dirty in view.scan(tenant_id, t.DIRTY)}
        prefix = t.STREAM.pack(tenant_id)
        waiting |= {_uploads.decode(v)[0] for _, v in view.raw_scan("segments", prefix + t.SEGMENT_PENDING_UPLOAD)}
    while True:
        with catalog.view() as view:
            page = list(islice(entries_of(view, tenant_id, after=after), SCAN_PAGE))
            found += [
                segment_id
                for segment_id, entry in page
                if entry.last_ms <= before_ms
                and segment_id not in waiting
                and segment_id != LOG_SEGMENT_ID
                and view.get(tenant_id, t.CHUNKS, segment_id) is None
            ]
        if not page:
            return found
        after = page[-1][0].to_bytes(8, "big")


def find_deletes(catalog: Catalog, tenant_id: int) -> list[Upload]:
    """Deletes that are queued and not done; never one of an object that a row names. Blocks."""
    prefix = t.STREAM.pack(tenant_id) + t.SEGMENT_PENDING_DELETE
    with catalog.view() as view:
        pending = [_deletes.decode(value) for _, value in view.raw_scan("segments", prefix)]
        packs = {key for _, key in pending if is_pack(key)}
        named = {blob.key for _, blob in view.scan(tenant_id, t.BLOBS) if blob.key in packs} if packs else set()
        return [
            pair
            for pair in pending
            if _is_blob(pair[1]) and pair[1] not in named and not is_named(view, tenant_id, pair[1])
        ]


def before(now_ms: int, keep: Retention, kept_since_ms: int | None) -> int:
    """What nothing has referenced since then may go; `kept_since_ms`: as far as followers are."""
    before_ms = now_ms - keep.purge_after_ms
    return before_ms if kept_since_ms is None else min(before_ms, kept_since_ms)


def is_due(catalog: Catalog, tenant_id: int, now_ms: int, keep: Retention, kept_since_ms: int | None = None) -> bool:
    """Whether a prune would find anything. Blocks."""
    before_ms = before(now_ms, keep, kept_since_ms)
    return (
        next(find_retirable(catalog, tenant_id, now_ms, keep), None) is not None
        or next(find_unreferenced(catalog, tenant_id, before_ms), None) is not None
        or bool(find_empty(catalog, tenant_id, before_ms))
        or bool(find_deletes(catalog, tenant_id))
        or bool(find_abandoned(catalog, tenant_id, now_ms - keep.purge_after_ms))
    )


def forecast(catalog: Catalog, tenant_id: int, now_ms: int, keep: Retention) -> Forecast:
    """What there is to do, without doing it. Blocks."""
    before_ms = now_ms - keep.purge_after_ms
    found = Forecast()
    released: Counter[bytes] = Counter()
    for row in find_retirable(catalog, tenant_id, now_ms, keep):
        found.generations += 1
        with catalog.view() as view:
            chunks = [view.get(tenant_id, t.CHUNKS, chunk_id) for chunk_id in row.data_chunks]
        released.update(chunk.sha256 for chunk in chunks if chunk is not None and chunk.key)
    for _, blob in find_unreferenced(catalog, tenant_id, before_ms):
        found.blobs, found.bytes = found.blobs + 1, found.bytes + blob.stored_bytes
    found.blobs += len(find_deletes(catalog, tenant_id)) + len(find_abandoned(catalog, tenant_id, before_ms))
    for _, pack_bytes in find_empty(catalog, tenant_id, before_ms):
        found.blobs, found.bytes = found.blobs + 1, found.bytes + pack_bytes
    with catalog.view() as view:
        waiting = [
            row.pack_bytes
            for _, row in view.scan(tenant_id, t.PACKS)
            if not row.members and not packrows.is_due(row, before_ms)
        ]
        found.later_blobs, found.later_bytes = len(waiting), sum(waiting)
        for sha256, blob in view.scan(tenant_id, t.BLOBS):
            waits = not blob.refs and blob.unreferenced_ms > before_ms
            if waits or (blob.refs and released[sha256] >= blob.refs):
                found.later_blobs, found.later_bytes = found.later_blobs + 1, found.later_bytes + blob.stored_bytes
    return found


def _is_blob(key: str) -> bool:
    """Not the log's own objects: their deletes are the replication's."""
    return isinstance(parse_key(key), WholeBlobKey | AnyPackKey)


def is_named(view: View, tenant_id: int, key: str) -> bool:
    parsed = parse_key(key)
    if isinstance(parsed, AnyPackKey):
        return view.get(tenant_id, t.PACKS, key) is not None
    blob = view.get(tenant_id, t.BLOBS, parsed.sha256) if isinstance(parsed, WholeBlobKey) else None
    return blob is not None and blob.key == key


# -- doing it ----------------------------------------------------------------------------------------------------


class PruneCheckpoint:
    """The executor."""

    def __init__(
        self,
        evictor: Evictor,
        fetcher: BlobFetcher,
        retention: Retention,
        blocked: Callable[[str], bool],
        replicated: Callable[[int], Awaitable[None]] | None = None,
        followers: Followers | None = None,
    ) -> None:
        self._catalog = evictor.catalog
        self._evictor = evictor
        self._fetcher = fetcher
        self._keep = retention
        self._blocked = blocked
        self._replicated = replicated
        self._followers = followers
        self._env = evictor.hot.env

    async def run(self, job: JobContext) -> None:
        report = Report()
        if self._followers is not None:
            await trio.to_thread.run_sync(self._followers.look)  # what they may still read, as of now
        await self._release(job, report)
        await self._queue_unreferenced(job, report)
        await self._queue_empty(job, report)
        await self._queue_abandoned(job, report)
        await self._delete_queued(job, report)
        await self._retire(job, report)
        if report.blobs_blocked:
            raise PostponedError(f"{report.blobs_blocked} blobs are being read by cold scans")

    def _before_ms(self, tenant_id: int) -> int:
        """What nothing has referenced since then may go."""
        kept_since_ms = self._followers.kept_since_ms(tenant_id) if self._followers is not None else None
        return before(self._env.now_ms(), self._keep, kept_since_ms)

    # -- rows ----------------------------------------------------------------------------------------------------

    async def _release(self, job: JobContext, report: Report) -> None:
        now_ms = self._env.now_ms()
        rows = await trio.to_thread.run_sync(
            lambda: list(find_retirable(self._catalog, job.tenant_id, now_ms, self._keep))
        )
        for page in _pages(rows):
            job.check_cancelled()
            keys = [(job.tenant_id, row.ino, row.generation) for row in page]
            await self._release_page(job, keys, report)
            self._env.failpoint("prune.released")

    async def _release_page(self, job: JobContext, keys: list[Key], report: Report) -> None:
        """Local bytes first, then the rows, while new users of the objects wait."""
        local = [key for key in keys if self._is_local(key)]
        _, skipped = await self._evictor.evict(local) if local else (0, [])
        handles = self._evictor.handles
        free = [key for key in keys if key not in skipped and key not in handles.moving and self._unused(key)]
        report.objects_in_use += len(keys) - len(free)
        over = trio.Event()
        for key in free:
            handles.forget(key)
            handles.moving[key] = over
        try:
            now_ms = self._env.now_ms()
            work = partial(_release_objects, keys=free, now_ms=now_ms, keep=self._keep)
            report.objects_released += await result_of(self._evictor.writer.submit(job.tenant_id, work))
        finally:
            for key in free:
                del handles.moving[key]
            over.set()

    def _is_local(self, key: Key) -> bool:
        with self._catalog.view() as view:
            row = view.get(key[0], t.OBJECTS, key[1:])
            return row is not None and any(_is_resident(view, key[0], chunk_id) for chunk_id in row.data_chunks)

    def _unused(self, key: Key) -> bool:
        handle = self._evictor.handles.peek(key)
        return handle is None or not (handle.users or handle.added)

    # -- the queue of deletes ------------------------------------------------------------------------------------

    async def _queue_unreferenced(self, job: JobContext, report: Report) -> None:
        before_ms = self._before_ms(job.tenant_id)
        found = await trio.to_thread.run_sync(lambda: list(find_unreferenced(self._catalog, job.tenant_id, before_ms)))
        for page in _pages(found):
            job.check_cancelled()
            free = [(sha256, blob) for sha256, blob in page if not self._is_blocked(blob.key, report)]
            miscounted = await trio.to_thread.run_sync(self._still_referenced, job.tenant_id, {s for s, _ in free})
            hashes = [sha256 for sha256, _ in free if sha256 not in miscounted]
            work = partial(_queue_blobs, hashes=hashes, before_ms=before_ms)
            report.bytes_freed += await result_of(self._evictor.writer.submit(job.tenant_id, work, sync=True))
            self._env.failpoint("prune.queued")

    def _still_referenced(self, tenant_id: int, hashes: set[bytes]) -> set[bytes]:
        """Which of these a chunk row needs after all. The count says none; a wrong count must not cost data."""
        if not hashes:
            return set()
        with self._catalog.view() as view:
            needed = {c.sha256 for _, c in view.scan(tenant_id, t.CHUNKS) if c.key and c.sha256 in hashes}
        if needed:
            log.error("blobs without references are referenced; run verify", extra={"blobs": len(needed)})
        return needed

    async def _queue_empty(self, job: JobContext, report: Report) -> None:
        before_ms = self._before_ms(job.tenant_id)
        found = await trio.to_thread.run_sync(find_empty, self._catalog, job.tenant_id, before_ms)
        for page in _pages([key for key, _ in found]):
            job.check_cancelled()
            work = partial(packrows.queue_empty, keys=page, before_ms=before_ms)
            report.bytes_freed += await result_of(self._evictor.writer.submit(job.tenant_id, work, sync=True))
            self._env.failpoint("prune.queued")

    async def _queue_abandoned(self, job: JobContext, report: Report) -> None:
        before_ms = self._env.now_ms() - self._keep.purge_after_ms
        found = await trio.to_thread.run_sync(find_abandoned, self._catalog, job.tenant_id, before_ms)
        for page in _pages(found):
            job.check_cancelled()
            await job.commit(partial(_queue_uploads, uploads=page), sync=True)

    async def _retire(self, job: JobContext, report: Report) -> None:
        before_ms = self._env.now_ms() - self._keep.purge_after_ms
        found = await trio.to_thread.run_sync(find_retired, self._catalog, job.tenant_id, before_ms)
        for page in _pages(found):
            job.check_cancelled()
            await job.commit(partial(_retire_segments, segment_ids=page))
            report.segments_retired += len(page)

    async def _delete_queued(self, job: JobContext, report: Report) -> None:
        # Durable already where this job queued them; where another did, perhaps not yet.
        await job.commit(lambda _: None, sync=True)
        found = await trio.to_thread.run_sync(find_deletes, self._catalog, job.tenant_id)
        pairs = [pair for pair in found if not self._is_blocked(pair[1], report)]
        if pairs:
            await self._log_is_there(job.tenant_id)
        for page in _pages(pairs):
            job.check_cancelled()
            await trio.to_thread.run_sync(self._fetcher.remote.delete, [key for _, key in page])
            self._env.failpoint("prune.deleted")
            for _, key in page:
                self._fetcher.forget(key)
            report.blobs_deleted += len(page)
            await job.progress(
                report.blobs_deleted,
                len(pairs),
                report=msgspec.structs.asdict(report),
                along=partial(_record_deleted, pairs=page),
            )
            self._env.failpoint("prune.recorded")
        if not pairs and report != Report():
            await job.progress(0, 0, report=msgspec.structs.asdict(report))

    async def _log_is_there(self, tenant_id: int) -> None:
        """A log in the remote that is behind may say of a live file that it is in what is to be deleted."""
        if self._replicated is None:
            return
        with trio.move_on_after(LOG_MAX_S) as scope:
            await self._replicated(tenant_id)
        if scope.cancelled_caught:
            raise PostponedError("the remote does not have the log that says what is not needed any more")

    def _is_blocked(self, key: str, report: Report) -> bool:
        if not self._blocked(key):
            return False
        report.blobs_blocked += 1
        return True


def _release_objects(b: Batch, keys: Sequence[Key], now_ms: int, keep: Retention) -> int:
    """Releases those that may still go: an undelete or a read may have come in between."""
    released = 0
    for _, ino, generation in keys:
        rows = [row for _, row in b.scan(t.OBJECTS, prefix=ino.to_bytes(8, "big"))]
        if not any(r.generation == generation for r in retirable(b.view, b.stream_id, rows, now_ms, keep)):
            continue
        row = objects.get_object(b, ino, generation)
        if any(_is_resident(b.view, b.stream_id, chunk_id) for chunk_id in row.data_chunks):
            continue
        objects.release_object(b, ino, generation)
        if row.state == ObjectState.TOMBSTONED:
            _bury(b, row)
        released += 1
    return released


def _bury(b: Batch, row: ObjectRow) -> None:
    """The undelete window is over: the tombstone goes, and the inode that it could have given a name again."""
    b.delete(t.TOMBSTONES, (row.tombstoned_ms, row.ino))
    inode = b.get(t.INODES, row.ino)
    if inode is not None and not inode.nlink and inode.generation == row.generation:
        namespace.erase(b, row.ino)


def _is_resident(view: View, tenant_id: int, chunk_id: int) -> bool:
    row = view.get(tenant_id, t.RESIDENCY, chunk_id)
    return row is not None and bool(row.mask or row.warm_bytes)


def _queue_blobs(b: Batch, hashes: Sequence[bytes], before_ms: int) -> int:
    return sum(objects.queue_blob_delete(b, sha256, unreferenced_before_ms=before_ms) for sha256 in hashes)


def _queue_uploads(b: Batch, uploads: Sequence[Upload]) -> None:
    for chunk_id, key in uploads:
        # Not done: given up. What there may be of it in the remote goes, and the queued delete ends the attempt.
        if is_pack(key) and b.get(t.PACKS, key) is not None:
            b.record(p.UploadDone(key, ""), segment_id=chunk_id)  # dead in a pack that has others
        else:
            b.record(p.UploadFailed(key, int(ReasonCode.TRANSIENT)), segment_id=chunk_id)
            b.record(p.Tier2DeleteQueued(key), segment_id=chunk_id)
        chunk = b.get(t.CHUNKS, chunk_id)
        if chunk is None:
            segments.retire(b, chunk_id)
        blob = b.get(t.BLOBS, chunk.sha256) if chunk is not None else None
        if blob is not None:
            b.record(p.UploadDone(blob.key, blob.etag), segment_id=chunk_id)  # where its content really is


def _retire_segments(b: Batch, segment_ids: Sequence[int]) -> None:
    for segment_id in segment_ids:
        if b.get(t.CHUNKS, segment_id) is None:
            segments.retire(b, segment_id)


def _record_deleted(b: Batch, pairs: Sequence[Upload]) -> None:
    for chunk_id, key in pairs:
        b.record(p.Tier2Deleted(key), segment_id=chunk_id)


def _pages(items: Sequence[T]) -> Iterator[list[T]]:
    for at in range(0, len(items), PAGE):
        yield list(items[at : at + PAGE])
