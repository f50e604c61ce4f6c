"""Uploading sealed objects: plan, stage, validate, upload, publish, clean up.

A chunk whose content the catalog already has in the remote is not uploaded again. Others become blobs: without
compression, or where a few blocks show that there is nothing to compress, the blob is the chunk's bytes as they lie in
the backing file plus a footer made from the seal's checksums, so nothing is copied; with zstd it is staged in
checkpoint_scratch, under a reservation. What is uploaded is checked against the seal on the way: a file that changed
meanwhile is CorruptError here, never a wrong blob there.

Invariants
- The catalog names a blob only after the remote has all of it (one durable commit for the object).
- Keys are fixed when the checkpoint is planned: a retry puts the same bytes under the same key.
- Scratch and reservation are gone afterwards, whatever happened. No room for staging means no compression: the upload
  that would make room never waits for room.
- The same content is uploaded once, however many chunks want it at the same time; what an earlier attempt of the same
  job had put, or the seal ahead of it (`put_ahead`), is found again, not put again.
- Large blobs have a lane of their own, in which objects take turns: neither a small one nor a second large one waits
  for more than a few chunks of another.

Owner: the trio thread drives; hashing, staging and uploading run on worker threads. A crash leaves scratch (the
janitor's) and blobs that no row names (garbage collection's).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

from aof2 import native
from aof2.engine import objects
from aof2.engine.aio import open_nursery, result_of
from aof2.engine.blob.format import Codec, Frame, encode_footer, hole_frame, make_footer
from aof2.engine.blob.writer import BlobWriter, shrinks
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ChunkRow, ObjectRow
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import CorruptError, TransientError
from aof2.engine.local.hot import HotCache, read_exactly
from aof2.engine.objects import Uploaded
from aof2.engine.quota import Reservation, StorageQuota
from aof2.engine.remote import keys
from aof2.engine.remote.prover import find
from aof2.engine.remote.source import ChunksSource, FileSource, Source
from aof2.engine.remote.store import BlobInfo, RemoteStore
from aof2.engine.tiering.flights import Room
from aof2.engine.tiering.hashing import add_zeros, block_crc
from aof2.engine.tiering.tally import Tally

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 << 20
WANTED_EVERY_BLOCKS: Final = 8
CHUNKS_AT_ONCE: Final = 4  # of one object, waiting for their turn or on their way
PROBED_BLOCKS: Final = 3
PURGE_AFTER_MS: Final = 3_600_000
CRASH_POINTS: Final = ("publish.started", "publish.staged", "publish.uploaded", "publish.recorded")
REBUILD_CRASH_POINTS: Final = ("publish.rebuild_deleted",)


class Target(NamedTuple):
    """One object to publish. `data`: the bytes of the one chunk that is, where they are not (all) in the file.
    `is_wanted` is asked every few MiB, on any thread: a file that was removed or written to is left off."""

    stream_id: int
    tenant: str
    row: ObjectRow
    compression: str
    data: memoryview | None = None
    is_wanted: Callable[[], bool] = lambda: True
    announced: frozenset[str] = frozenset()  # keys whose UploadStarted is in the log already, and nothing under them
    foretold: bool = False  # by the commit of the seal

    def check_wanted(self) -> None:
        if not self.is_wanted():
            raise objects.ObjectGoneError(f"object {self.row.ino}.{self.row.generation} is not wanted any more")


class _Flight:
    """An upload under way, or done and not yet in the catalog."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.result: Uploaded | None = None


class _Put(NamedTuple):
    """What a worker thread did."""

    etag: str
    size: int
    compression: str


# What a publication's commit is to hold beside it: asked on the trio thread, run on the writer's.
Along = Callable[[], Callable[[Batch], object] | None]
_Opened = Callable[[], contextlib.AbstractContextManager[Callable[[int, int], bytes]]]


class _Blob(NamedTuple):
    """A blob ready for upload."""

    source: Source
    size: int
    crc64: int
    compression: str


class Publisher:
    """Moves sealed objects to the remote."""

    def __init__(
        self,
        catalog: Catalog,
        writer: CatalogWriter,
        hot: HotCache,
        remote: RemoteStore,
        quota: StorageQuota,
        scratch: Path,
        *,
        block_bytes: int,
        parallel: int = 4,
        room: Room | None = None,
        purge_after_ms: int = PURGE_AFTER_MS,
    ) -> None:
        self.catalog = catalog
        self.writer = writer
        self.hot = hot
        self.remote = remote
        self.quota = quota
        self.scratch = scratch
        self.uploaded_bytes = 0
        self.block_bytes = block_bytes
        self._room = room
        self.purge_after_ms = purge_after_ms
        self.limiter = trio.CapacityLimiter(parallel)
        self._large = trio.CapacityLimiter(max(parallel, CHUNKS_AT_ONCE))
        self._flights: dict[tuple[int, bytes], _Flight] = {}
        # By stream: content → keys that it may already be under, and what is there where that is known.
        self._begun: dict[int, dict[bytes, dict[str, Uploaded | None]]] = {}

    async def publish(
        self, target: Target, checkpoint_id: int, job: str, tally: Tally | None = None, along: Along | None = None
    ) -> list[Uploaded]:
        """All of the object's chunks into the remote, then one commit that says so: durable, but for what was
        foretold. `along` is asked, when the commit is about to be made, for what else it is to hold."""
        tally = tally or Tally()
        mine: list[tuple[int, bytes]] = []
        try:
            chunks = self._chunks(target)
            done = await self._upload_all(target, chunks, checkpoint_id, job, tally, mine)
            with tally.at("publish"):
                await self._record(target, checkpoint_id, done, along() if along is not None else None)
            for chunk in chunks:
                self._begun.get(target.stream_id, {}).pop(chunk.sha256, None)
            return done
        finally:
            for flight in mine:
                self._flights.pop(flight, None)

    def clean_up(self, job: str) -> None:
        """The job is over: nothing of it stays in scratch, its folder included."""
        shutil.rmtree(self.scratch / job, ignore_errors=True)

    async def _upload_all(
        self,
        target: Target,
        chunks: Sequence[ChunkRow],
        checkpoint_id: int,
        job: str,
        tally: Tally,
        mine: list[tuple[int, bytes]],
    ) -> list[Uploaded]:
        scratch = self.scratch / job / f"{target.row.ino}.{target.row.generation}"
        uploads: list[Uploaded | None] = [None] * len(chunks)
        turns = trio.Semaphore(CHUNKS_AT_ONCE)

        async def one(i: int, chunk: ChunkRow) -> None:
            async with turns:
                uploads[i] = await self._upload_once(target, chunk, checkpoint_id, job, scratch, tally, mine)
            tally.blob_done(chunk.chunk_id)

        try:
            if len(chunks) == 1:
                await one(0, chunks[0])
            else:
                async with open_nursery() as nursery:
                    for i, chunk in enumerate(chunks):
                        nursery.start_soon(one, i, chunk)
        finally:
            if scratch.exists():  # small blobs are staged in memory
                await trio.to_thread.run_sync(partial(shutil.rmtree, scratch, ignore_errors=True))
        return [u for u in uploads if u is not None]

    async def _record(
        self, target: Target, checkpoint_id: int, done: list[Uploaded], along: Callable[[Batch], object] | None
    ) -> None:
        ino, generation = target.row.ino, target.row.generation

        def work(b: Batch) -> None:
            objects.published(b, ino, generation, checkpoint_id, done, purge_after_ms=self.purge_after_ms)
            b.foretold = target.foretold and all(_is_as_announced(b, target, up) for up in done)
            if along is not None:
                along(b)

        with trio.CancelScope(shield=True):  # what the commit says is told, also where the runner is being stopped
            # What is foretold is found again, by its key, should a power loss take the commit away.
            await result_of(self.writer.submit(target.stream_id, work, sync=not target.foretold))
        self.hot.env.failpoint("publish.recorded")

    async def put_part(
        self,
        target: Target,
        chunk: ChunkRow,
        checkpoint_id: int,
        record: Callable[[Uploaded], Awaitable[bool]],
    ) -> bool:
        """One chunk of an object that is still written, from memory. `record` is to commit that it is there; until
        it has, another upload of that content takes this one's result. What `record` said."""
        mine: list[tuple[int, bytes]] = []
        try:
            scratch = self.scratch / f"part-{chunk.chunk_id}"
            up = await self._upload_once(target, chunk, checkpoint_id, "", scratch, Tally(), mine)
            done = await record(up)
        finally:
            for flight in mine:
                self._flights.pop(flight, None)
        if done:
            self._begun.get(target.stream_id, {}).pop(chunk.sha256, None)
        return done

    def is_begun(self, stream_id: int, sha256: bytes) -> bool:
        """Whether this content is in the remote, or an upload of it was begun."""
        with self.catalog.view() as view:
            has = view.get(stream_id, t.BLOBS, sha256) is not None
            return has or bool(self._begun_under(view, stream_id, sha256))

    async def put_ahead(self, target: Target, chunk: ChunkRow, checkpoint_id: int) -> None:
        """One chunk of an object that is being sealed: `publish` of that content finds it there. Its UploadStarted is
        in the log; nothing is recorded here."""
        mine: list[tuple[int, bytes]] = []
        scratch = self.scratch / f"ahead-{chunk.chunk_id}"
        try:
            await self._upload_once(target, chunk, checkpoint_id, scratch.name, scratch, Tally(), mine)
        finally:
            for flight in mine:
                self._flights.pop(flight, None)
            if scratch.exists():
                shutil.rmtree(scratch, ignore_errors=True)

    def _chunks(self, target: Target) -> list[ChunkRow]:
        with self.catalog.view() as view:
            rows = [view.get(target.stream_id, t.CHUNKS, chunk_id) for chunk_id in target.row.data_chunks]
        missing = [i for i, row in enumerate(rows) if row is None]
        if missing:
            raise objects.ObjectGoneError(f"object {target.row.ino}.{target.row.generation} lost chunks {missing}")
        return [row for row in rows if row is not None]

    async def _upload_once(
        self,
        target: Target,
        chunk: ChunkRow,
        checkpoint_id: int,
        job: str,
        scratch: Path,
        tally: Tally,
        mine: list[tuple[int, bytes]],
    ) -> Uploaded:
        """Single flight by content: who comes second gets the first one's blob."""
        content = (target.stream_id, chunk.sha256)
        while (flight := self._flights.get(content)) is not None:
            await flight.over.wait()
            if flight.result is not None:
                return flight.result._replace(chunk_id=chunk.chunk_id)
        flight = self._flights[content] = _Flight()
        try:
            flight.result = await self._upload(target, chunk, checkpoint_id, job, scratch, tally)
            mine.append(content)  # until the commit, when the catalog knows it
        except BaseException:
            del self._flights[content]
            raise
        finally:
            flight.over.set()
        return flight.result

    async def _upload(
        self, target: Target, chunk: ChunkRow, checkpoint_id: int, job: str, scratch: Path, tally: Tally
    ) -> Uploaded:
        target.check_wanted()
        key = keys.chunk_blob_key(target.tenant, checkpoint_id, chunk.chunk_id, chunk.generation, chunk.sha256)
        with self.catalog.view() as view:
            blob = view.get(target.stream_id, t.BLOBS, chunk.sha256)
            begun = self._begun_under(view, target.stream_id, chunk.sha256) - target.announced
        if blob is not None:
            return objects.found(blob, chunk)
        known = self._begun[target.stream_id].setdefault(chunk.sha256, {})
        for name in sorted(begun):
            if (there := known.get(name)) is not None:
                return there._replace(chunk_id=chunk.chunk_id)
            info = await trio.to_thread.run_sync(self._find, name, chunk.sha256, limiter=self.limiter)
            if info is not None:
                raw = info.size > objects.chunk_bytes_here(self._all_of(chunk), chunk, self.block_bytes)
                return Uploaded(chunk.chunk_id, name, info.etag, info.size, "" if raw else _stored_as(target), True)
        known[key] = None
        if key not in target.announced:
            started = partial(objects.upload_started, keys=[(chunk.chunk_id, key)])
            await result_of(self.writer.submit(target.stream_id, started))
        self.hot.env.failpoint("publish.started")
        try:
            known[key] = done = await self._staged_put(target, chunk, key, job, scratch, tally)
        except TransientError as e:
            failed = partial(objects.upload_failed, chunk_id=chunk.chunk_id, key=key, reason_code=e.reason_code)
            await result_of(self.writer.submit(target.stream_id, failed))
            raise
        return done

    def _begun_under(self, view: View, stream_id: int, sha256: bytes) -> set[str]:
        """Keys under which an upload of this content was begun and not recorded: by this process, or one before it."""
        if stream_id not in self._begun:
            begun = self._begun[stream_id] = {}
            prefix = t.STREAM.pack(stream_id) + t.SEGMENT_PENDING_UPLOAD
            for name, _ in view.raw_scan("segments", prefix):
                key = name[len(prefix) + 8 :].decode(errors="replace")
                parsed = keys.parse_key(key)
                if isinstance(parsed, keys.ChunkBlobKey):
                    begun.setdefault(parsed.sha256, {})[key] = None
        candidates = self._begun[stream_id].get(sha256, ())
        return {key for key in candidates if objects.upload_pending(view, stream_id, objects.blob_segment(key), key)}

    async def rebuild(self, target: Target, chunk: ChunkRow, key: str, job: str) -> Uploaded:
        """Puts a damaged or missing blob again, from local bytes that prove to be right; CorruptError if they do not.

        The bytes are those of `target`; the blob says of itself what `chunk` says. The caller keeps the local bytes
        from being evicted, and records what comes back.
        """
        path = self.hot.path(target.tenant, target.row.ino, target.row.generation)
        offset = chunk.index * target.row.chunk_bytes
        await trio.to_thread.run_sync(self._check_local, path, offset, chunk)
        # The remote may still believe in its damaged bytes, and then a put of the right ones would move nothing.
        await trio.to_thread.run_sync(self.remote.delete, [key], limiter=self.limiter)
        self.hot.env.failpoint("publish.rebuild_deleted")
        scratch = self.scratch / job / f"rebuild-{chunk.chunk_id}"
        try:
            return await self._staged_put(target, chunk, key, job, scratch, Tally())
        finally:
            await trio.to_thread.run_sync(partial(shutil.rmtree, scratch, ignore_errors=True))

    async def _staged_put(
        self, target: Target, chunk: ChunkRow, key: str, job: str, scratch: Path, tally: Tally
    ) -> Uploaded:
        compression = _stored_as(target)
        reservation = None
        is_staged = bool(compression) and chunk.length > PIECE_BYTES and target.data is None
        if is_staged and not await trio.to_thread.run_sync(self._shrinks, target, chunk):
            compression, is_staged = "", False
        if is_staged:
            data_bytes = objects.chunk_disk_bytes(self._all_of(chunk), chunk, self.block_bytes)
            reservation = await self._reserve(target.tenant, data_bytes, job)
            compression = compression if reservation is not None else ""
        lane = self._large if chunk.length > PIECE_BYTES else self.limiter
        try:
            done = await trio.to_thread.run_sync(
                self._put, target, chunk, key, scratch, compression, tally, limiter=lane
            )
        finally:
            if reservation is not None:
                tally.released_bytes += reservation.release()
        self.uploaded_bytes += done.size
        return Uploaded(chunk.chunk_id, key, done.etag, done.size, done.compression, True)

    async def _reserve(self, tenant: str, size_bytes: int, job: str) -> Reservation | None:
        reservation = self.quota.try_reserve(tenant, size_bytes, job)
        if reservation is None and self._room is not None:
            reservation = await self._room.take(tenant, size_bytes)
        return reservation

    # -- on worker threads -------------------------------------------------------------------------------------

    def _put(self, target: Target, chunk: ChunkRow, key: str, scratch: Path, compression: str, tally: Tally) -> _Put:
        env = self.hot.env
        path = self.hot.path(target.tenant, target.row.ino, target.row.generation)
        offset = chunk.index * target.row.chunk_bytes
        began_s = env.monotonic_s()
        read = partial(_open_reader, path, offset, target.data)
        with tally.at("stage"):
            blob = self._stage(read, chunk, scratch, target) if compression else self._in_place(read, chunk, target)
        staged_s = env.monotonic_s()
        tally.staged(chunk.chunk_id, blob.size if isinstance(blob.source, FileSource) else 0, staged_s - began_s)
        env.failpoint("publish.staged")
        with tally.at("upload"):
            etag = self.remote.put_blob(key, blob.source, blob.size, crc64=blob.crc64, sha256=chunk.sha256)
        tally.uploaded(chunk.chunk_id, blob.size, env.monotonic_s() - staged_s)
        env.failpoint("publish.uploaded")
        return _Put(etag, blob.size, blob.compression)

    def _shrinks(self, target: Target, chunk: ChunkRow) -> bool:
        """Whether it is worth staging: a few blocks tell. Where none of them shrinks, the chunk goes as it lies."""
        path = self.hot.path(target.tenant, target.row.ino, target.row.generation)
        blocks = [i for i in range(len(chunk.block_crcs) // 8) if not chunk.holes >> i & 1]
        with _open_reader(path, chunk.index * target.row.chunk_bytes, None) as read:
            return any(
                shrinks(read(i * self.block_bytes, self._length_of(chunk, i)))
                for i in blocks[:: max(1, -(-len(blocks) // PROBED_BLOCKS))]
            )

    def _find(self, key: str, sha256: bytes) -> BlobInfo | None:
        """The blob of this content if an earlier attempt got as far as putting it under this key."""
        info = self.remote.head_blob(key)
        if info is None or info.sha256 == sha256:
            return info
        try:
            # It ended between the bytes and the note about them: the blob speaks for itself.
            find(self.remote, key, info.size, sha256)
        except CorruptError:
            return None
        return info

    def _check_local(self, path: Path, offset: int, chunk: ChunkRow) -> None:
        """CorruptError unless the backing file holds the chunk as it was sealed."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CorruptError("backing file is missing", path=str(path)) from None
        try:
            for index, at in enumerate(range(0, chunk.length, self.block_bytes)):
                block = read_exactly(fd, offset + at, min(self.block_bytes, chunk.length - at), path=str(path))
                if native.crc64(block) != block_crc(chunk.block_crcs, index):
                    raise CorruptError(f"block {index} of chunk {chunk.chunk_id}", path=str(path), offset=offset + at)
        finally:
            os.close(fd)

    def _in_place(self, opened: _Opened, chunk: ChunkRow, target: Target) -> _Blob:
        """The chunk where it lies, and a footer behind it."""
        frames = tuple(
            hole_frame(self._length_of(chunk, i))
            if chunk.holes >> i & 1
            else Frame(self._length_of(chunk, i), Codec.RAW, block_crc(chunk.block_crcs, i))
            for i in range(len(chunk.block_crcs) // 8)
        )
        footer = encode_footer(
            make_footer(
                frames,
                chunk_id=chunk.chunk_id,
                generation=chunk.generation,
                block_bytes=self.block_bytes,
                raw_len=chunk.length,
                sha256=chunk.sha256,
            )
        )

        def pieces() -> Iterator[bytes]:
            with opened() as read:
                for at, length in self._data_pieces(chunk):
                    target.check_wanted()
                    yield read(at, length)
            yield footer

        stored, crc64 = chunk.length, chunk.crc64
        if chunk.holes:
            stored = crc64 = 0
            for frame in frames:
                crc64 = native.crc64_combine(crc64, frame.raw_crc64, frame.stored_len) if frame.stored_len else crc64
                stored += frame.stored_len
        crc64 = native.crc64_combine(crc64, native.crc64(footer), len(footer))
        return _Blob(ChunksSource(pieces), stored + len(footer), crc64, "")

    def _all_of(self, chunk: ChunkRow) -> int:
        return objects.full_mask(chunk.length, self.block_bytes)

    def _length_of(self, chunk: ChunkRow, block: int) -> int:
        return min(self.block_bytes, chunk.length - block * self.block_bytes)

    def _data_pieces(self, chunk: ChunkRow) -> Iterator[tuple[int, int]]:
        """(offset in the chunk, length) of what is not a hole, a few MiB at a time."""
        if not chunk.holes:
            yield from ((at, min(PIECE_BYTES, chunk.length - at)) for at in range(0, chunk.length, PIECE_BYTES))
            return
        for block in range(len(chunk.block_crcs) // 8):
            if not chunk.holes >> block & 1:
                yield block * self.block_bytes, self._length_of(chunk, block)

    def _stage(self, opened: _Opened, chunk: ChunkRow, scratch: Path, target: Target) -> _Blob:
        """A compressed blob: small ones in memory, others in scratch; validated against the seal as it is made."""
        small = chunk.length <= PIECE_BYTES or target.data is not None
        parts: list[bytes] = []
        crc64 = 0
        out_fd = -1
        if not small:
            scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
            staged = scratch / f"chunk-{chunk.chunk_id}.blob"
            out_fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

        def sink(data: bytes | bytearray | memoryview) -> None:
            nonlocal crc64
            crc64 = native.crc64(data, crc64)
            if small:
                parts.append(bytes(data))
            else:
                view = memoryview(data)
                while view:
                    view = view[os.write(out_fd, view) :]

        sha = hashlib.sha256()
        writer = BlobWriter(
            sink,
            chunk_id=chunk.chunk_id,
            generation=chunk.generation,
            block_bytes=self.block_bytes,
            sha256=chunk.sha256,
        )
        try:
            with opened() as read:
                for index, at in enumerate(range(0, chunk.length, self.block_bytes)):
                    if chunk.holes >> index & 1:
                        writer.add_hole(self._length_of(chunk, index))
                        add_zeros(sha, self._length_of(chunk, index))
                        continue
                    if not index % WANTED_EVERY_BLOCKS:
                        target.check_wanted()
                    block = read(at, min(self.block_bytes, chunk.length - at))
                    sha.update(block)
                    writer.add_block(block, block_crc(chunk.block_crcs, index))
            footer = writer.finish()
        finally:
            if out_fd >= 0:
                os.close(out_fd)
        if sha.digest() != chunk.sha256:
            raise CorruptError(f"chunk {chunk.chunk_id} changed since it was sealed")
        source: Source = b"".join(parts) if small else FileSource(staged)
        return _Blob(source, footer.blob_len, crc64, "zstd")


@contextlib.contextmanager
def _open_reader(path: Path, offset: int, data: memoryview | None) -> Iterator[Callable[[int, int], bytes]]:
    """Reads of a chunk, by (offset in it, length)."""
    if data is not None:
        yield lambda at, length: bytes(data[at : at + length])
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield lambda at, length: read_exactly(fd, offset + at, length, path=str(path))
    finally:
        os.close(fd)


def _is_as_announced(b: Batch, target: Target, up: Uploaded) -> bool:
    """Whether the chunk's blob is under the key that was announced for this very chunk: restore looks nowhere else."""
    chunk = b.get(t.CHUNKS, up.chunk_id)
    is_own = up.key in target.announced and objects.blob_segment(up.key) == up.chunk_id
    return is_own and chunk is not None and chunk.key == up.key


def _stored_as(target: Target) -> str:
    return "zstd" if target.compression == "zstd" else ""


def sweep_scratch(scratch: Path, live_jobs: Sequence[str]) -> list[str]:
    """The janitor's round: removes what jobs that are over left behind; which."""
    if not scratch.exists():
        return []
    gone = [name for name in os.listdir(scratch) if name not in live_jobs]  # noqa: PTH208
    for name in gone:
        shutil.rmtree(scratch / name, ignore_errors=True)
    return gone
