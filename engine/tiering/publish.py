"""Uploading sealed objects: plan, stage, validate, upload, publish, clean up.

A chunk whose content the catalog already has in the remote is not uploaded again. Others become blobs: without
compression the blob is the chunk's bytes as they lie in the backing file plus a footer made from the seal's checksums,
so nothing is copied; with zstd it is staged in checkpoint_scratch, under a reservation. What is uploaded is checked
against the seal on the way: a file that changed meanwhile is CorruptError here, never a wrong blob there.

Invariants
- The catalog names a blob only after the remote has all of it (one durable commit for the object).
- Keys are fixed when the checkpoint is planned: a retry puts the same bytes under the same key.
- Scratch and reservation are gone afterwards, whatever happened.

Owner: the trio thread drives; hashing, staging and uploading run on worker threads. A crash leaves scratch (the
janitor's) and blobs that no row names (garbage collection's).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

from aof2 import native
from aof2.engine import objects
from aof2.engine.aio import open_nursery, result_of
from aof2.engine.blob.format import Codec, Frame, encode_footer, make_footer
from aof2.engine.blob.writer import BlobWriter
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ChunkRow, ObjectRow
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import CorruptError, TransientError
from aof2.engine.local.hot import HotCache, read_exactly
from aof2.engine.objects import Uploaded
from aof2.engine.quota import StorageQuota
from aof2.engine.remote import keys
from aof2.engine.remote.source import ChunksSource, FileSource, Source
from aof2.engine.remote.store import RemoteStore
from aof2.engine.tiering.hashing import block_crc

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 << 20
CRASH_POINTS: Final = ("publish.started", "publish.staged", "publish.uploaded", "publish.recorded")


class Target(NamedTuple):
    """One object to publish."""

    stream_id: int
    tenant: str
    row: ObjectRow
    compression: str


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
    ) -> None:
        self.catalog = catalog
        self.writer = writer
        self.hot = hot
        self.remote = remote
        self.quota = quota
        self.scratch = scratch
        self.uploaded_bytes = 0
        self._block_bytes = block_bytes
        self._limiter = trio.CapacityLimiter(parallel)

    async def publish(self, target: Target, checkpoint_id: int, job: str) -> list[Uploaded]:
        """All of the object's chunks into the remote, then one durable commit that says so."""
        chunks = self._chunks(target)
        scratch = self.scratch / job / f"{target.row.ino}.{target.row.generation}"
        uploads: list[Uploaded | None] = [None] * len(chunks)

        async def one(i: int, chunk: ChunkRow) -> None:
            uploads[i] = await self._upload(target, chunk, checkpoint_id, job, scratch)

        try:
            async with open_nursery() as nursery:
                for i, chunk in enumerate(chunks):
                    nursery.start_soon(one, i, chunk)
        finally:
            await trio.to_thread.run_sync(partial(shutil.rmtree, scratch, ignore_errors=True))
        done = [u for u in uploads if u is not None]
        work = partial(
            objects.published,
            ino=target.row.ino,
            generation=target.row.generation,
            checkpoint_id=checkpoint_id,
            uploads=done,
        )
        await result_of(self.writer.submit(target.stream_id, work, sync=True))
        self.hot.env.failpoint("publish.recorded")
        return done

    def _chunks(self, target: Target) -> list[ChunkRow]:
        with self.catalog.view() as view:
            rows = [view.get(target.stream_id, t.CHUNKS, chunk_id) for chunk_id in target.row.chunks]
        missing = [i for i, row in enumerate(rows) if row is None]
        if missing:
            raise objects.ObjectGoneError(f"object {target.row.ino}.{target.row.generation} lost chunks {missing}")
        return [row for row in rows if row is not None]

    async def _upload(self, target: Target, chunk: ChunkRow, checkpoint_id: int, job: str, scratch: Path) -> Uploaded:
        with self.catalog.view() as view:
            blob = view.get(target.stream_id, t.BLOBS, chunk.sha256)
        if blob is not None and blob.refs > 0:
            return Uploaded(chunk.chunk_id, blob.key, blob.etag, blob.stored_bytes, chunk.compression, False)
        key = keys.chunk_blob_key(target.tenant, checkpoint_id, chunk.chunk_id, chunk.generation, chunk.sha256)
        started = partial(objects.upload_started, keys=[(chunk.chunk_id, key)])
        await result_of(self.writer.submit(target.stream_id, started))
        self.hot.env.failpoint("publish.started")
        reservation = None
        if target.compression == "zstd" and chunk.length > PIECE_BYTES:
            reservation = await self.quota.reserve(target.tenant, chunk.length, job)
        try:
            etag, stored, compression = await trio.to_thread.run_sync(
                self._put, target, chunk, key, scratch, limiter=self._limiter
            )
        except TransientError as e:
            failed = partial(objects.upload_failed, chunk_id=chunk.chunk_id, key=key, reason_code=e.reason_code)
            await result_of(self.writer.submit(target.stream_id, failed))
            raise
        finally:
            if reservation is not None:
                reservation.release()
        self.uploaded_bytes += stored
        return Uploaded(chunk.chunk_id, key, etag, stored, compression, True)

    # -- on worker threads -------------------------------------------------------------------------------------

    def _put(self, target: Target, chunk: ChunkRow, key: str, scratch: Path) -> tuple[str, int, str]:
        path = self.hot.path(target.tenant, chunk.ino, chunk.generation)
        offset = chunk.index * target.row.chunk_bytes
        if target.compression == "zstd":
            blob = self._stage(path, offset, chunk, scratch)
        else:
            blob = self._in_place(path, offset, chunk)
        self.hot.env.failpoint("publish.staged")
        etag = self.remote.put_blob(key, blob.source, blob.size, crc64=blob.crc64, sha256=chunk.sha256)
        self.hot.env.failpoint("publish.uploaded")
        return etag, blob.size, blob.compression

    def _in_place(self, path: Path, offset: int, chunk: ChunkRow) -> _Blob:
        """The chunk where it lies, and a footer behind it."""
        frames = tuple(
            Frame(
                min(self._block_bytes, chunk.length - i * self._block_bytes), Codec.RAW, block_crc(chunk.block_crcs, i)
            )
            for i in range(len(chunk.block_crcs) // 8)
        )
        footer = encode_footer(
            make_footer(
                frames,
                chunk_id=chunk.chunk_id,
                generation=chunk.generation,
                block_bytes=self._block_bytes,
                raw_len=chunk.length,
                sha256=chunk.sha256,
            )
        )

        def pieces() -> Iterator[bytes]:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for at in range(0, chunk.length, PIECE_BYTES):
                    yield read_exactly(fd, offset + at, min(PIECE_BYTES, chunk.length - at), path=str(path))
            finally:
                os.close(fd)
            yield footer

        crc64 = native.crc64_combine(chunk.crc64, native.crc64(footer), len(footer))
        return _Blob(ChunksSource(pieces), chunk.length + len(footer), crc64, "")

    def _stage(self, path: Path, offset: int, chunk: ChunkRow, scratch: Path) -> _Blob:
        """A compressed blob: small ones in memory, others in scratch; validated against the seal as it is made."""
        small = chunk.length <= PIECE_BYTES
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
            block_bytes=self._block_bytes,
            sha256=chunk.sha256,
        )
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for index, at in enumerate(range(0, chunk.length, self._block_bytes)):
                block = read_exactly(fd, offset + at, min(self._block_bytes, chunk.length - at), path=str(path))
                sha.update(block)
                writer.add_block(block, block_crc(chunk.block_crcs, index))
            footer = writer.finish()
        finally:
            os.close(fd)
            if out_fd >= 0:
                os.close(out_fd)
        if sha.digest() != chunk.sha256:
            raise CorruptError(f"chunk {chunk.chunk_id} changed since it was sealed", path=str(path))
        source: Source = b"".join(parts) if small else FileSource(staged)
        return _Blob(source, footer.blob_len, crc64, "zstd")


def sweep_scratch(scratch: Path, live_jobs: Sequence[str]) -> list[str]:
    """The janitor's round: removes what jobs that are over left behind; which."""
    if not scratch.exists():
        return []
    gone = [name for name in os.listdir(scratch) if name not in live_jobs]  # noqa: PTH208
    for name in gone:
        shutil.rmtree(scratch / name, ignore_errors=True)
    return gone
