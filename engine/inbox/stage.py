"""A deliverer's bytes on their way into the remote: chunks as blobs, small files together in packs, under one attempt.

    attempt.put_file(path, source) … attempt.finish() → what the commit lists

An attempt has a name of its own, so that a task that is tried again, or runs twice, never touches another's objects.
Blobs are the volume's own (`engine/blob`); their numbers are random in their upper half, so that a blob can be told
from each other one.

Invariants
- An object is put whole, with its checksum, and listed only then.
- Memory: a block, and the pack that is being filled. A chunk's blob waits in a temporary file.
- What is not finished is listed nowhere: the writer's sweep removes it.

Owner: one thread. A crash leaves objects that no commit names, and temporary files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from aof2 import native
from aof2.engine.blob import pack
from aof2.engine.blob.format import BlobFooter
from aof2.engine.blob.writer import LEVEL, BlobWriter
from aof2.engine.inbox.format import DeliveredFile, DeliveredSegment, Door, StagedBlob, StagedObject
from aof2.engine.remote.keys import INBOX_NUMBER_MIN, InboxBlobKey, InboxPackKey, name_of
from aof2.engine.remote.source import FileSource
from aof2.engine.remote.store import RemoteStore

MEMBER_BYTES_MAX: Final = 1 << 20
PACK_BYTES_MAX: Final = (16 << 20) - (64 << 10)
GENERATION: Final = 1
RAW: Final = 0  # the level of what does not shrink
_COUNT_BITS: Final = 24

FileBytes = bytes | bytearray | memoryview | Path | BinaryIO


class Staged(NamedTuple):
    """What an attempt put, as a commit lists it. Plain data: a task of Spark sends it to its driver."""

    objects: tuple[StagedObject, ...] = ()
    files: tuple[DeliveredFile, ...] = ()
    segments: tuple[DeliveredSegment, ...] = ()

    @staticmethod
    def joined(parts: list[Staged]) -> Staged:
        """Of several attempts, in their order."""
        objects: list[StagedObject] = []
        files: list[DeliveredFile] = []
        segments: list[DeliveredSegment] = []
        for part in parts:
            at = len(objects)
            objects += part.objects
            files += (_moved_file(one, at) for one in part.files)
            segments += (_moved_segment(one, at) for one in part.segments)
        return Staged(tuple(objects), tuple(files), tuple(segments))


def _moved_file(one: DeliveredFile, at: int) -> DeliveredFile:
    blobs = tuple(_moved(blob, at) for blob in one.blobs)
    return DeliveredFile(path=one.path, size=one.size, sha256=one.sha256, blobs=blobs)


def _moved_segment(one: DeliveredSegment, at: int) -> DeliveredSegment:
    return DeliveredSegment(payload=_moved(one.payload, at), index=_moved(one.index, at), records=one.records)


def _moved(blob: StagedBlob, at: int) -> StagedBlob:
    return StagedBlob(
        object=blob.object + at, offset=blob.offset, length=blob.length, number=blob.number, sha256=blob.sha256
    )


class Attempt:
    """One at a job. `level`: how hard is tried to make blocks smaller; `RAW` where the bytes are compressed already."""

    def __init__(self, store: RemoteStore, door: Door, job_id: str, *, name: str = "", level: int = LEVEL) -> None:
        self._store = store
        self._door = door
        self._job_id = job_id
        self._name = name or secrets.token_hex(8)
        self._level = level
        self._next_number = INBOX_NUMBER_MIN | secrets.randbits(62 - _COUNT_BITS) << _COUNT_BITS
        self._objects: list[StagedObject] = []
        self._files: list[DeliveredFile] = []
        self._segments: list[DeliveredSegment] = []
        self._pack = bytearray()
        self._members: list[pack.Member] = []
        self._waiting: list[tuple[str, int, bytes, pack.Member]] = []  # files whose pack is not put yet

    # -- files -------------------------------------------------------------------------------------------------

    def put_file(self, path: str, source: FileBytes) -> None:
        """A file of the directory that the job is for."""
        with _opened(source) as stream:
            first = stream.read(self._door.chunk_bytes)
            if first and len(first) <= min(MEMBER_BYTES_MAX, self._door.block_bytes):
                rest = stream.read(1)
                if not rest:
                    self._add_member(path, first)
                    return
                first += rest
            self._put_large(path, first, stream)

    def _add_member(self, path: str, data: bytes) -> None:
        if len(self._pack) + len(data) > PACK_BYTES_MAX:
            self._put_pack()
        footer = self._encode(self._pack.extend, data)
        member = pack.member_of(footer, len(self._pack) - footer.blob_len)
        self._members.append(member)
        self._waiting.append((path, len(data), footer.sha256, member))

    def _put_large(self, path: str, chunk: bytes, stream: BinaryIO) -> None:
        whole, size = hashlib.sha256(), 0
        blobs: list[StagedBlob] = []
        while chunk:
            chunk += stream.read(self._door.chunk_bytes - len(chunk))
            whole.update(chunk)
            size += len(chunk)
            blobs.append(self.put_chunk(chunk))
            chunk = stream.read(self._door.chunk_bytes)
        self._files.append(DeliveredFile(path=path, size=size, sha256=whole.hexdigest(), blobs=tuple(blobs)))

    # -- blobs -------------------------------------------------------------------------------------------------

    def put_chunk(self, data: bytes | bytearray | memoryview) -> StagedBlob:
        """One blob, as an object of its own."""
        crc = 0
        fd, name = tempfile.mkstemp(prefix="aof2-inbox-")
        path = Path(name)
        try:
            with os.fdopen(fd, "wb") as out:

                def sink(part: bytes | bytearray | memoryview) -> None:
                    nonlocal crc
                    crc = native.crc64(part, crc)
                    out.write(part)

                footer = self._encode(sink, data)
            key = InboxBlobKey(self._door.tenant, self._job_id, self._name, footer.chunk_id, GENERATION, footer.sha256)
            at = self._put_object(name_of(key), FileSource(path), footer.blob_len, crc)
        finally:
            path.unlink()
        return _blob(at, 0, footer.blob_len, footer.chunk_id, footer.sha256)

    def _encode(self, sink: Any, data: bytes | bytearray | memoryview) -> BlobFooter:
        step = self._door.block_bytes
        writer = BlobWriter(
            sink, chunk_id=self._next_number, generation=GENERATION, block_bytes=step, level=self._level
        )
        self._next_number += 1
        view = memoryview(data)
        for at in range(0, len(view), step):
            writer.add_block(view[at : at + step])
        return writer.finish()

    def _put_object(self, key: str, source: FileSource | bytes, size: int, crc: int) -> int:
        self._store.put_blob(key, source, size, crc64=crc)
        self._objects.append(StagedObject(key=key, size=size, crc64=f"{crc:016x}"))
        return len(self._objects) - 1

    def _put_pack(self) -> None:
        if not self._members:
            return
        hashed = pack.name_hash(self._door.tenant, self._members)
        data = bytes(self._pack) + pack.encode_directory(self._members, hashed)
        key = InboxPackKey(self._door.tenant, self._job_id, self._name, self._members[0].chunk_id, hashed)
        at = self._put_object(name_of(key), data, len(data), native.crc64(data))
        for path, size, sha256, one in self._waiting:
            blob = _blob(at, one.offset, one.stored_len, one.chunk_id, one.sha256)
            self._files.append(DeliveredFile(path=path, size=size, sha256=sha256.hex(), blobs=(blob,)))
        self._pack, self._members, self._waiting = bytearray(), [], []

    # -- the end -----------------------------------------------------------------------------------------------

    def add_segment(self, payload: StagedBlob, index: StagedBlob, records: int) -> None:
        self._segments.append(DeliveredSegment(payload=payload, index=index, records=records))

    def finish(self) -> Staged:
        """All of it is in the remote."""
        self._put_pack()
        return Staged(tuple(self._objects), tuple(self._files), tuple(self._segments))


def _blob(at: int, offset: int, length: int, number: int, sha256: bytes) -> StagedBlob:
    return StagedBlob(object=at, offset=offset, length=length, number=number, sha256=sha256.hex())


@contextlib.contextmanager
def _opened(source: FileBytes) -> Iterator[BinaryIO]:
    if isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source)
    elif isinstance(source, Path):
        with open(source, "rb") as f:
            yield f
    else:
        yield source
