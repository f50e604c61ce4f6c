"""One stream's uploads: sealed chunks in order, snapshots, bundles, deletions, retention. Blocking, resumable.

`StreamUploads.step` does one thing and says whether there may be more. What is left to do is read from the folder and
the rows each time, so that an event that got lost, a crash or an outage costs nothing but time.

Invariants
- Chunks go up in the order of their index. A snapshot goes up after the chunk it lies in: on the remote, replay can
  go on from any snapshot that is there.
- Only chunks that the newest snapshot, itself on the remote, covers and that retention has dropped locally are bundled.
  (Retention asks the log for the chunk's own object: a bundled chunk that is still here would never go.)
- Whatever is recorded here carries LOG_SEGMENT_ID and never makes the writer rotate: an idle log stays as it is.
- Deletions are queued in the log before they happen, and said to be done after.

Owner: one worker thread a stream at a time. A crash leaves pending_uploads and pending_deletes, which the first step
resumes, or sealed chunks without an UploadDone, which are found by their names.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from aof2 import native
from aof2.engine.catalog import snapshots
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import load_pending
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, TransientError
from aof2.engine.manifest import format as fmt
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.chunk import is_bookkeeping, mark_uploaded
from aof2.engine.manifest.reader import ChunkFile, Stream, chunk_headers, parse_chunk
from aof2.engine.manifest.snapshot import SnapshotAt, check_snapshot, local_snapshots, snapshot_name
from aof2.engine.manifest.upload import ChunkUploader, RetryPolicy
from aof2.engine.manifest.writer import SealedChunk
from aof2.engine.remote import keys
from aof2.engine.remote.fence import Fence
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.listing import RemoteLog

log = logging.getLogger(__name__)

K = TypeVar("K", bound=keys.RemoteKey)

BUNDLE_CHUNKS: Final = 64
BACKLOG_MAX: Final = 64
BATCH_CHUNKS_MAX: Final = 32
BATCH_BYTES_MAX: Final = 16 << 20
SNAPSHOTS_REMOTE: Final = 2
UPKEEP_EVERY: Final = 32
COMING_S: Final = 0.05  # as long as the fence may be asked ahead
CRASH_POINTS: Final = (
    "replicate.snapshot.started",
    "replicate.snapshot.put",
    "replicate.snapshot.logged",
    "replicate.prune.queued",
)


class LogState(NamedTuple):
    """What the rows say of the log's own objects."""

    objects: dict[str, str]
    pending_uploads: list[str]
    pending_deletes: list[str]

    def is_uploaded(self, stream_id: int) -> Callable[[int], bool]:
        """Whether a chunk is on the remote, by itself or in a bundle; asked for one after the other."""
        bundles = self.of(keys.ManifestBundleKey)
        return lambda index: (
            fmt.chunk_key(stream_id, index) in self.objects or any(b.first <= index <= b.last for b in bundles)
        )

    def of(self, kind: type[K]) -> list[K]:
        """The objects of one kind."""
        return [parsed for key in self.objects if isinstance(parsed := keys.parse_key(key), kind)]


def log_state(catalog: Catalog, stream_id: int) -> LogState:
    with catalog.view() as view:
        return state_of(view, stream_id)


def state_of(view: View, stream_id: int) -> LogState:
    fold = load_pending(view, stream_id)
    uploads = [key for segment_id, key in fold.pending_uploads if segment_id == fmt.LOG_SEGMENT_ID]
    deletes = [key for segment_id, key in fold.pending_deletes if segment_id == fmt.LOG_SEGMENT_ID]
    return LogState(dict(fold.log_objects), sorted(uploads), sorted(deletes))


def chunk_indexes(directory: Path) -> list[int]:
    """Of the chunk files of the folder, in order, whole or not."""
    return sorted(int(m[1]) for name in os.listdir(directory) if (m := fmt.CHUNK_NAME.fullmatch(name)))  # noqa: PTH208


def chunk_bytes(directory: Path) -> int:
    """What the chunk files of the folder hold."""
    total = 0
    for index in chunk_indexes(directory):
        with contextlib.suppress(FileNotFoundError):  # retention was here
            total += (directory / fmt.chunk_name(index)).stat().st_size
    return total


def sealed_chunk(chunk: ChunkFile) -> SealedChunk:
    """A sealed chunk as rotation would have given it out; ManifestIntegrityError when it is damaged."""
    parsed = parse_chunk(chunk.read(), path=str(chunk.path), last=False, expect_index=chunk.index)
    if parsed is None:
        raise CorruptError("holds no commit, though others follow it", path=str(chunk.path))
    return SealedChunk(chunk.path, parsed.header, parsed.count)


def worth_a_snapshot(directory: Path) -> bool:
    """Whether anything but the log's own bookkeeping came after the newest snapshot."""
    taken = local_snapshots(directory)
    try:
        records = Stream(directory).records(taken[-1].position if taken else None)
        return any(not is_bookkeeping(r.type_id, r.segment_id, r.payload) for r in records)
    except fmt.ManifestIntegrityError:
        return True  # of a damaged log more than of any other


@dataclass(eq=False)
class StreamUploads:
    """See the module's text. `is_wanted`: whether a waiter wants more of the log to be there; upkeep waits for that."""

    env: Env
    catalog: Catalog
    writer: CatalogWriter
    store: RemoteStore
    fence: Fence
    directory: Path
    stream_id: int
    bundle_chunks: int = BUNDLE_CHUNKS
    before_retention: Callable[[], None] | None = None
    on_put: Callable[[SealedChunk], object] = lambda _: None
    is_wanted: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.uploads = 0
        self.local_bytes = 0  # of chunks in the folder, as last measured or told
        self.moved_at_s = float("-inf")  # when a step last succeeded
        self._expected = False
        self._backlog: deque[SealedChunk] = deque()
        self._told: deque[SealedChunk] = deque()  # sealed, and not in the backlog yet
        self._told_last = -1
        self._came = threading.Event()
        self._queued_last = -1  # the highest chunk index that was in the backlog
        self._rescan = True
        self._resume = True
        self._upkeep_due = True
        self._taken_ids: set[int] = set()
        self._append = partial(append_records, self.writer, self.stream_id)
        # One attempt a call: waiting is the component's, and a remote that is away must not fill the log.
        self._uploader = ChunkUploader(
            self.env, self.stream_id, self.fence, self._append, policy=RetryPolicy(attempts=1), soon=self._append_soon
        )

    def note_sealed(self, chunk: SealedChunk | None = None) -> None:
        """A chunk was sealed; without saying which, it is found in the folder. Any thread."""
        self._upkeep_due = True
        if chunk is None:
            self._rescan = True
        elif chunk.header.chunk_index > self._told_last:  # told by the writer thread, and again by way of the trio one
            self._told_last = chunk.header.chunk_index
            self._told.append(chunk)
            self.local_bytes += chunk.header.committed_len
            self._came.set()

    def expect(self) -> None:
        """A chunk is sealed any moment, and a waiter waits for it: the next step asks the fence meanwhile, and waits
        for the chunk, COMING_S at most. Any thread."""
        self._expected = True

    def note_snapshot(self) -> None:
        self._upkeep_due = True

    @property
    def is_due(self) -> bool:
        """Whether a step has anything to do: most are asked for by an event about what the last one did."""
        work = self._resume or self._rescan or self._expected or bool(self._told) or bool(self._backlog)
        later = self._upkeep_due or self._uploader.has_unsaid
        return work or (later and not self.is_wanted())

    def step(self) -> bool:
        """Some uploads, or the upkeep after them; False when there is nothing left to do."""
        more = self._step()
        self.moved_at_s = self.env.monotonic_s()
        return more

    def _step(self) -> bool:
        if self._resume:
            self._resume_pending()
            self._resume = False
            return True
        self._came.clear()
        self._take_told()
        if not self._backlog and self._rescan:
            self._rescan = False
            try:
                self._uploader.say_done()  # or what is there, and not in the rows yet, would be queued again
                self._refill()
            except BaseException:
                self._rescan = True
                raise
        if self._expected:
            self._expected = False
            if not self._backlog:
                self.fence.check_ahead()
                self._came.wait(COMING_S)
                return self._step() if self._told else True
        if self._backlog:
            before = self.uploads
            self._uploader.put_all(self._next_batch(), snapshot_id=self._marker_id(), on_put=self._is_there)
            if self.uploads // UPKEEP_EVERY > before // UPKEEP_EVERY:
                self._uploader.say_done()
                self._upkeep()
            return True
        if self.is_wanted():
            return False
        self._uploader.say_done()
        if self._upkeep_due:
            self._upkeep_due = False
            try:
                return self._upkeep()
            except BaseException:
                self._upkeep_due = True
                raise
        return False

    # -- chunks ------------------------------------------------------------------------------------------------

    def _take_told(self) -> None:
        """What was told in order needs no look at the folder."""
        while self._told:
            chunk = self._told.popleft()
            index = chunk.header.chunk_index
            if not self._rescan and index == self._queued_last + 1 and len(self._backlog) < BACKLOG_MAX:
                self._queue(chunk)
            elif index > self._queued_last:
                self._rescan = True

    def _queue(self, chunk: SealedChunk) -> None:
        self._backlog.append(chunk)
        self._queued_last = chunk.header.chunk_index

    def _refill(self) -> None:
        """The next sealed chunks that are not on the remote; those that are get their flag if a crash withheld it."""
        is_uploaded = log_state(self.catalog, self.stream_id).is_uploaded(self.stream_id)
        self.local_bytes = chunk_bytes(self.directory)
        found = chunk_headers(self.directory)
        for chunk, header in found:
            # Others follow it, it was told, or it is cut: else it may be being sealed this moment. Power loss may leave
            # one in the middle that is not cut.
            is_durable = chunk is not found[-1][0] or header.chunk_index <= self._told_last
            if not header.sealed or not (is_durable or chunk.path.stat().st_size == header.committed_len):
                return  # its event follows; nothing goes before it
            if is_uploaded(header.chunk_index):
                if not header.uploaded:
                    mark_uploaded(self.env, chunk.path)
                self._queued_last = header.chunk_index
                continue
            if len(self._backlog) == BACKLOG_MAX:
                self._rescan = True
                return
            self._queue(sealed_chunk(chunk))

    def _next_batch(self) -> list[SealedChunk]:
        """Chunks that go up together: while the writer is busy, each commit about them waits for its turn."""
        batch: list[SealedChunk] = []
        size = 0
        for sealed in itertools.islice(self._backlog, BATCH_CHUNKS_MAX):
            size += sealed.header.committed_len
            if batch and size > BATCH_BYTES_MAX:
                break
            batch.append(sealed)
        return batch

    def _marker_id(self) -> int:
        """The newest snapshot that the log speaks of."""
        with self.catalog.view() as view:
            last = view.raw("segments", t.STREAM.pack(self.stream_id) + t.SEGMENT_LAST_SNAPSHOT)
        return 0 if last is None else msgspec.msgpack.decode(last, type=tuple[int, int, int])[0]

    def _is_there(self, chunk: SealedChunk) -> None:
        self._backlog.popleft()
        self.uploads += 1
        self.on_put(chunk)

    def reput_chunk(self, index: int) -> None:
        """Puts a chunk that is here once more: its object is gone from the remote."""
        sealed = sealed_chunk(ChunkFile(index, self.directory / fmt.chunk_name(index)))
        self._uploader.upload(sealed, snapshot_id=self._marker_id())

    # -- what follows ------------------------------------------------------------------------------------------

    def _upkeep(self) -> bool:
        """Snapshot, old snapshots, retention, bundles. True when a bundle was made: there may be another."""
        if self.before_retention is not None:
            self.before_retention()
        taken = local_snapshots(self.directory)
        if not taken:
            return False
        newest = taken[-1]
        self._upload_snapshot_if_due(newest)
        self._prune_snapshots()
        self.writer.flush()  # that what is deleted here was uploaded is in the log for good
        with contextlib.suppress(FileNotFoundError):  # a file it listed is gone by now: the next retention goes on
            snapshots.retain(self.env, self.catalog, self.directory, self.stream_id, newest.position)
        self.local_bytes = chunk_bytes(self.directory)
        return self._compact(newest)

    def _upload_snapshot_if_due(self, newest: SnapshotAt) -> None:
        state = log_state(self.catalog, self.stream_id)
        key, at = keys.manifest_snapshot_key(self.stream_id, newest.snapshot_id), newest.position
        # A replay from it must find its chunk on the remote; at the start of one, it needs none.
        is_reachable = at.chunk_offset == fmt.CHUNK_HEADER_LEN or state.is_uploaded(self.stream_id)(at.chunk_index)
        if is_reachable and key not in state.objects and newest.snapshot_id not in self._taken_ids:
            self.upload_snapshot(newest.snapshot_id)

    def upload_snapshot(self, snapshot_id: int) -> str:
        """Puts a local snapshot on the remote and says so in the log; its etag. Repeating it is harmless."""
        path = self.directory / snapshot_name(snapshot_id)
        data = path.read_bytes()
        snapshot = check_snapshot(data, path=str(path))
        key = keys.manifest_snapshot_key(self.stream_id, snapshot_id)
        found = self.store.head_blob(key)
        if found is not None and (found.size, found.crc64) != (len(data), native.crc64(data)):
            # Left by a writer before a restore. Nothing refers to it; the next snapshot has another number.
            log.warning("snapshot's name is taken on the remote", extra={"key": key})
            self._taken_ids.add(snapshot_id)
            return ""
        at = snapshot.position
        metadata = {
            "snapshot_id": str(snapshot_id),
            "chunk_index": str(at.chunk_index),
            "chunk_offset": str(at.chunk_offset),
            "ordinal": str(at.ordinal),
            "created_ms": str(snapshot.created_ms),
        }
        self._log([p.UploadStarted(key)], at.chunk_index)
        self.env.failpoint("replicate.snapshot.started")
        try:
            etag = self.fence.put(key, data, metadata)
        except TransientError as e:
            self._log([p.UploadFailed(key, e.reason_code)], at.chunk_index)
            raise
        self.env.failpoint("replicate.snapshot.put")
        self._log([p.UploadDone(key, etag)], at.chunk_index)
        self.env.failpoint("replicate.snapshot.logged")
        return etag

    def _prune_snapshots(self) -> None:
        """The remote keeps as many snapshots as the folder does."""
        state = log_state(self.catalog, self.stream_id)
        ids = sorted(key.snapshot_id for key in state.of(keys.ManifestSnapshotKey))
        old = [keys.manifest_snapshot_key(self.stream_id, i) for i in ids[:-SNAPSHOTS_REMOTE]]
        if old:
            self._log([p.Tier2DeleteQueued(key) for key in old], 0)
            self.env.failpoint("replicate.prune.queued")
            self._uploader.finish_deletes(old)

    def _compact(self, newest: SnapshotAt) -> bool:
        state = log_state(self.catalog, self.stream_id)
        if keys.manifest_snapshot_key(self.stream_id, newest.snapshot_id) not in state.objects:
            return False
        here = chunk_headers(self.directory)
        oldest_here = here[0][0].index if here else newest.position.chunk_index
        indexes = sorted(key.chunk_index for key in state.of(keys.ManifestChunkKey))
        covered = [i for i in indexes if i < min(oldest_here, newest.position.chunk_index)]
        run = first_run(covered, self.bundle_chunks)
        if run is None:
            return False
        self._bundle(*run, newest)
        return True

    def _bundle(self, first: int, last: int, newest: SnapshotAt) -> None:
        at = newest.position
        self._uploader.compact(first, last, p.SnapshotMarker(at.chunk_index, at.chunk_offset, newest.snapshot_id))

    # -- after a crash -----------------------------------------------------------------------------------------

    def _resume_pending(self) -> None:
        """Deletions that were queued, bundles and snapshots that were under way. Chunks are found in the folder."""
        state = log_state(self.catalog, self.stream_id)
        if state.pending_deletes:
            self._uploader.finish_deletes(state.pending_deletes)
        here = {s.snapshot_id: s for s in local_snapshots(self.directory)}
        for key in state.pending_uploads:
            match keys.parse_key(key):
                case keys.ManifestSnapshotKey(_, snapshot_id) if snapshot_id in here:
                    self.upload_snapshot(snapshot_id)
                case keys.ManifestBundleKey(_, first, last) if here and self._all_there(state, first, last):
                    self._bundle(first, last, here[max(here)])

    def finish_bundles(self, remote: RemoteLog) -> None:
        """Bundles whose end the log does not know, though their chunks may be deleted already: of a machine that was
        lost before it could upload that part of its log. What is in such a bundle is not asked for by itself again."""
        state = log_state(self.catalog, self.stream_id)
        taken = local_snapshots(self.directory)
        for (first, last), info in sorted(remote.inventory.bundles.items()):
            named = [fmt.chunk_key(self.stream_id, index) for index in range(first, last + 1)]
            sources = [key for key in named if key in state.objects]
            if not taken or not sources or info.key in state.objects or not remote.is_bundle_whole(first, last):
                continue
            found = self.store.head_blob(info.key)
            at = taken[-1].position
            marker = p.SnapshotMarker(at.chunk_index, at.chunk_offset, taken[-1].snapshot_id)
            self._uploader.bundled(info.key, found.etag if found is not None else info.etag, sources, marker, first)

    def _all_there(self, state: LogState, first: int, last: int) -> bool:
        return all(fmt.chunk_key(self.stream_id, i) in state.objects for i in range(first, last + 1))

    # -- the log -----------------------------------------------------------------------------------------------

    def _log(self, records: Sequence[p.Payload], chunk_index: int) -> None:
        batch = RecordBatch()
        for payload in records:
            batch.add(payload, segment_id=fmt.LOG_SEGMENT_ID, logical_offset=chunk_index)
        self._append(batch)

    def _append_soon(self, batch: RecordBatch) -> Callable[[], object]:
        return self.writer.submit(self.stream_id, partial(_extend, batch=batch)).result


def append_records(writer: CatalogWriter, stream_id: int, batch: RecordBatch) -> None:
    """Tier records without row changes, durable when this returns."""
    writer.call(stream_id, partial(_extend, batch=batch), sync=True)


def _extend(b: Batch, batch: RecordBatch) -> None:
    batch.stamp(b.now_ms)
    b.records.extend(batch)


def first_run(indexes: Iterable[int], length: int) -> tuple[int, int] | None:
    """The first `length` of more than `length` consecutive numbers in an ascending sequence."""
    numbered = enumerate(indexes)
    for _, group in itertools.groupby(numbered, key=lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        if len(run) > length:
            return run[0], run[length - 1]
    return None
