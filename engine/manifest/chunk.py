"""One chunk being written: a preallocated file, mapped, appended to, committed, sealed.

Invariants
- Bytes past `committed_len` are not in the log. They become so by `commit`: a marker record, then one header write.
- Space is reserved (posix_fallocate) before the mapping is touched, in 64 KiB steps past the chunk's capacity; on a
  full disk out of the reserve (`local/reserve.py`).
- `chunk_crc64` is kept as a running value; it equals the crc64 of [header_len, committed_len) at every commit.
- A chunk is `<index>.mlog.tmp` until its first commit; a `.tmp` is never replayed.
- After `seal` the file is exactly `committed_len` long, read-only, and only its `uploaded` flag changes.

A crash leaves: a `.tmp` (discarded), or an unsealed chunk whose tail past the last commit is trimmed by `resume`.
Owner: the log's writer thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from aof2 import native
from aof2.engine.env import Env
from aof2.engine.errors import ReadOnlyError
from aof2.engine.local.reserve import is_no_room
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import (
    CHUNK_HEADER_LEN,
    COMMIT_PAYLOAD,
    COMMIT_RECORD_LEN,
    COMMIT_SCHEMA_ID,
    GROWTH_STEP,
    LOG_SEGMENT_ID,
    RECORD_HEADER,
    ChunkFlag,
    ChunkHeader,
    RecordType,
    chunk_name,
)

FLAGS_AT: Final = 56  # of ChunkHeader.flags
CRASH_POINTS: Final = (
    "manifest.create.allocated",
    "manifest.append.copied",
    "manifest.commit.marker",
    "manifest.commit.header",
    "manifest.commit.synced",
    "manifest.commit.renamed",
    "manifest.seal.flagged",
    "manifest.seal.synced",
    "manifest.seal.cut",
    "manifest.resume.cut",
    "manifest.resume.header",
)


def is_bookkeeping(kind: int, segment_id: int, payload: bytes) -> bool:
    """Records the log writes about itself: alone they are no reason to rotate, or an idle log would upload for ever."""
    if segment_id == LOG_SEGMENT_ID or kind == RecordType.SNAPSHOT_MARKER:
        return True
    return kind == RecordType.CUSTOM_EVENT and int.from_bytes(payload[:4], "little") == COMMIT_SCHEMA_ID


def count_substantive(batch: RecordBatch) -> int:
    """How many of the records are more than bookkeeping."""
    # Two C-speed look-ups decide for nearly every batch; commit markers never come in one.
    if RecordType.SNAPSHOT_MARKER not in batch.types and LOG_SEGMENT_ID not in batch.segment_ids:
        return len(batch)
    rows = zip(batch.types, batch.segment_ids, strict=True)
    return sum(not is_bookkeeping(kind, segment_id, b"") for kind, segment_id in rows)


class ActiveChunk:
    """The chunk at the end of the log. Made by `create` or `resume`, ended by `seal` and `cut`, or `abandon`."""

    def __init__(self, env: Env, directory: Path, fd: int, header: ChunkHeader, *, named: bool) -> None:
        self.env = env
        self.directory = directory
        self.index = header.chunk_index
        self.base_record = header.base_record
        self.tail = header.tail_offset
        self.committed_len = header.committed_len
        self.crc64 = header.chunk_crc64
        self.committed_crc64 = header.chunk_crc64
        self.durable_len = CHUNK_HEADER_LEN
        self.count = 0
        self.committed_count = 0
        self.substantive = 0
        self.committed_substantive = 0
        self.first_substantive_ms = 0
        self.last_commit_ms = 0
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self._size)
        self._span_start = self.tail
        self._named = named
        self._name_synced = False

    @classmethod
    def create(cls, env: Env, directory: Path, index: int, base_record: int, capacity: int) -> ActiveChunk:
        temp = directory / (chunk_name(index) + ".tmp")
        try:
            return cls._create(env, directory, temp, ChunkHeader(index, base_record), capacity)
        except OSError as e:
            # On a full disk it is a file of the reserve: its bytes and its inode are here already.
            if not is_no_room(e) or env.reserve is None or not env.reserve.take(temp):
                raise
        fd = env.files.open_rw(temp)
        try:
            if os.fstat(fd).st_size < capacity:
                env.essential(partial(env.files.preallocate, fd, 0, capacity))
            return cls(env, directory, fd, ChunkHeader(index, base_record), named=False)
        except BaseException:
            env.files.close(fd)
            env.files.unlink(temp)
            raise

    @classmethod
    def _create(cls, env: Env, directory: Path, temp: Path, header: ChunkHeader, capacity: int) -> ActiveChunk:
        fd = env.files.create(temp)
        try:
            env.files.preallocate(fd, 0, capacity)
            env.failpoint("manifest.create.allocated")
            return cls(env, directory, fd, header, named=False)
        except BaseException:
            env.files.close(fd)
            env.files.unlink(temp)
            raise

    @classmethod
    def resume(
        cls, env: Env, directory: Path, header: ChunkHeader, *, count: int, substantive: int, capacity: int, sync: bool
    ) -> ActiveChunk:
        """Goes on in an unsealed chunk whose log ends at `header.committed_len`; everything past it is zeroed."""
        path = directory / chunk_name(header.chunk_index)
        fd = env.files.open_rw(path)
        try:
            env.files.truncate(fd, header.committed_len)
            env.failpoint("manifest.resume.cut")
            env.essential(partial(env.files.preallocate, fd, 0, max(capacity, header.committed_len)))
            env.files.pwrite(fd, header.pack(), 0)
            env.failpoint("manifest.resume.header")
            chunk = cls(env, directory, fd, header, named=True)
        except BaseException:
            env.files.close(fd)
            raise
        chunk.count = chunk.committed_count = count
        chunk.substantive = chunk.committed_substantive = substantive
        chunk.first_substantive_ms = chunk.last_commit_ms = env.now_ms()
        if sync:
            chunk.sync()
        return chunk

    @property
    def path(self) -> Path:
        return self.directory / (chunk_name(self.index) + ("" if self._named else ".tmp"))

    def append(self, batch: RecordBatch) -> None:
        """Copies the records in. On OSError (no room) nothing has changed."""
        self._reserve(batch.encoded_len + COMMIT_RECORD_LEN)
        written, self.crc64 = native.manifest_encode_into(
            self._map,
            self.tail,
            batch.types,
            batch.segment_ids,
            batch.logical_offsets,
            batch.timestamps_ms,
            batch.payloads,
            batch.lengths,
            self.crc64,
        )
        self.tail += written
        self.count += len(batch)
        self._note_substantive(count_substantive(batch))
        self.env.failpoint("manifest.append.copied")

    def append_one(self, kind: int, segment_id: int, logical_offset: int, timestamp_ms: int, payload: bytes) -> None:
        """The same bytes as `append` of a batch of one, without the cost of its columns."""
        self._reserve(RECORD_HEADER.size + len(payload) + COMMIT_RECORD_LEN)
        self._put(kind, segment_id, logical_offset, timestamp_ms, payload)
        self._note_substantive(not is_bookkeeping(kind, segment_id, payload))
        self.env.failpoint("manifest.append.copied")

    def commit(self, now_ms: int) -> bool:
        """Makes what was appended part of the log (not yet durable). False when there was nothing to commit."""
        if self.tail == self.committed_len:
            return False
        with memoryview(self._map) as view, view[self._span_start : self.tail] as span:
            span_crc64 = native.crc64(span)
        marker = COMMIT_PAYLOAD.pack(COMMIT_SCHEMA_ID, 24, self._span_start, span_crc64, self.durable_len)
        # Its ordinal as logical_offset lets a reader check the header's base_record.
        self._put(RecordType.CUSTOM_EVENT, LOG_SEGMENT_ID, self.base_record + self.count, now_ms, marker)
        self.env.failpoint("manifest.commit.marker")
        self._span_start = self.committed_len = self.tail
        self.committed_crc64 = self.crc64
        self.committed_count, self.committed_substantive = self.count, self.substantive
        self.last_commit_ms = now_ms
        self._write_header()
        self.env.failpoint("manifest.commit.header")
        return True

    def rollback(self) -> None:
        """Forgets what was appended since the last commit; its bytes become zeros again."""
        self._map[self.committed_len : self.tail] = bytes(self.tail - self.committed_len)
        self.tail, self.crc64 = self.committed_len, self.committed_crc64
        self.count, self.substantive = self.committed_count, self.committed_substantive

    def publish(self) -> None:
        """The first commit gives the chunk its name. Without a sync first, a power loss may leave it empty: trimmed."""
        if not self._named:
            # The folder may need another block for the name.
            self.env.essential(partial(self.env.files.rename, self.path, self.directory / chunk_name(self.index)))
            self._named = True
            self.env.failpoint("manifest.commit.renamed")

    def sync(self) -> None:
        """Everything committed is durable when this returns: bytes, then name."""
        if self.durable_len != self.committed_len:
            self.env.files.fsync(self._fd)
            self.durable_len = self.committed_len
            self.env.failpoint("manifest.commit.synced")
        self.publish()
        self.sync_name()

    def sync_name(self) -> None:
        """The name, if it has one, is durable when this returns. Ahead of its bytes a power loss leaves it empty."""
        if self._named and not self._name_synced:
            self.env.files.fsync_dir(self.directory)
            self._name_synced = True

    def seal(self, *, sync: bool) -> ChunkHeader:
        """Ends the chunk: nothing more is appended, and that is durable. `cut` follows. The caller has committed."""
        if self.tail != self.committed_len:
            raise ReadOnlyError(f"chunk {self.index} has uncommitted records: commit before sealing")
        # A sealed chunk is right or damaged, nothing in between: its bytes are durable before it says that it is one.
        if sync:
            self.sync()
        self.publish()
        self._write_header(int(ChunkFlag.SEALED))
        self.env.failpoint("manifest.seal.flagged")
        if sync:
            self.env.files.fdatasync(self._fd)
        self.env.failpoint("manifest.seal.synced")
        return self._header(int(ChunkFlag.SEALED))

    def cut(self) -> None:
        """Of a sealed chunk: to committed_len, read-only, let go of. After a crash before it, `resume` or a reader
        takes what the header says."""
        self._map.close()
        try:
            self.env.files.truncate(self._fd, self.committed_len)
            os.fchmod(self._fd, 0o400)
            self.env.failpoint("manifest.seal.cut")
        finally:
            self.env.files.close(self._fd)

    def abandon(self) -> None:
        """Lets go of the file as it is: at close, or after a failed fsync. An unnamed chunk is removed."""
        if not self._map.closed:
            self._map.close()
            self.env.files.close(self._fd)
            if not self._named:
                self.env.files.unlink(self.path)

    def _header(self, flags: int = 0) -> ChunkHeader:
        return ChunkHeader(self.index, self.base_record, self.tail, self.committed_len, self.committed_crc64, flags)

    def _write_header(self, flags: int = 0) -> None:
        # One pwrite inside one sector: a reader that takes the lock sees the old header or the new one.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            self.env.files.pwrite(self._fd, self._header(flags).pack(), 0)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _put(self, kind: int, segment_id: int, logical_offset: int, timestamp_ms: int, payload: bytes) -> None:
        header = RECORD_HEADER.pack(
            kind, 0, len(payload), segment_id, logical_offset, timestamp_ms, native.crc64(payload)
        )
        record = header + payload
        self._map[self.tail : self.tail + len(record)] = record
        self.crc64 = native.crc64(record, self.crc64)
        self.tail += len(record)
        self.count += 1

    def _note_substantive(self, records: int) -> None:
        if records and not self.substantive:
            self.first_substantive_ms = self.env.now_ms()
        self.substantive += records

    def _reserve(self, length: int) -> None:
        need = self.tail + length
        if need <= self._size:
            return
        size = -(-need // GROWTH_STEP) * GROWTH_STEP
        self.env.essential(partial(self.env.files.preallocate, self._fd, self._size, size - self._size))
        self._map.resize(size)
        self._size = size


def mark_uploaded(env: Env, path: Path, *, sync: bool = True) -> None:
    """Sets the `uploaded` flag of a sealed chunk. The checksum does not cover the header, so the bytes stay valid."""
    with sealed_rw(env, path) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        flags = int.from_bytes(os.pread(fd, 8, FLAGS_AT), "little") | ChunkFlag.UPLOADED
        env.files.pwrite(fd, int(flags).to_bytes(8, "little"), FLAGS_AT)
        if sync:
            env.files.fsync(fd)


@contextlib.contextmanager
def sealed_rw(env: Env, path: Path) -> Iterator[int]:
    """A sealed chunk is read-only, for its owner too (root aside): not so within the block."""
    path.chmod(0o600)
    fd = env.files.open_rw(path)
    try:
        yield fd
    finally:
        os.fchmod(fd, 0o400)
        env.files.close(fd)


def as_uploaded(data: bytes) -> bytes:
    """A sealed chunk's bytes as they are on the remote: with the `uploaded` flag clear, whenever it is put."""
    return data[:FLAGS_AT] + int(ChunkFlag.SEALED).to_bytes(8, "little") + data[CHUNK_HEADER_LEN:]


def as_downloaded(data: bytes) -> bytes:
    """The remote's bytes as they are here: known to be uploaded."""
    return data[:FLAGS_AT] + int(ChunkFlag.SEALED | ChunkFlag.UPLOADED).to_bytes(8, "little") + data[CHUNK_HEADER_LEN:]
