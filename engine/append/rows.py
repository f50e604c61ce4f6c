"""What happens to a stream, as changes to the catalog. Each function is one atomic batch on its tenant's log.

    make → segment opened → sealed: payload file, index, position → … → removed

A segment that is open has a DIRTY row: under the inode number that its payload file will have, with the segment's id.
There is no inode and no object yet, so nothing shows it. The seal makes both files, names and objects, and moves the
stream's position, which is an attribute of its directory that no caller sees.

Invariants
- A stream's position is behind every segment that was sealed: offsets go on where they were whatever is removed.
- A segment's id is the id of its payload file's one chunk, from one counter a tenant.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

import errno
import stat
import struct
from typing import Final, NamedTuple

import msgspec

from aof2.engine import namespace, objects, segments
from aof2.engine.append import names
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, DirtyRow, InodeRow, ObjectRow, ObjectState
from aof2.engine.catalog.store import View
from aof2.engine.errors import os_error
from aof2.engine.kinds.kind import Delivered
from aof2.engine.local.hot import Identity
from aof2.engine.manifest import payloads as p
from aof2.engine.namespace import nodes
from aof2.engine.segment.format import SegmentFooter
from aof2.engine.tiering.hashing import ObjectDigest

OWN_XATTRS: Final = b"aof2."  # no prefix that callers may ask for
POSITION_XATTR: Final = OWN_XATTRS + b"position"
JOB_XATTR: Final = OWN_XATTRS + b"job."
JOBS_KEPT_MIN: Final = 100
JOBS_KEPT_MS: Final = 30 * 86_400_000
_POSITION: Final = struct.Struct("<QQQQ")
GENERATION: Final = 1  # what is sealed never changes


class Position(NamedTuple):
    """How far a stream is sealed. Written to disk: never reorder."""

    next_logical: int = 0
    record_count: int = 0
    last_ts_ms: int = 0
    segment_id: int = 0  # the last that was sealed or given up


class Ids(NamedTuple):
    """What a segment will be once it is sealed."""

    segment_id: int
    payload_ino: int

    @property
    def index_ino(self) -> int:
        return names.index_ino(self.payload_ino)


class SealedFile(NamedTuple):
    """A backing file, hashed and synced."""

    ino: int
    digest: ObjectDigest
    backing: Identity
    mtime_ns: int


class Sealed(NamedTuple):
    """A segment whose two files are there."""

    stream_ino: int
    ids: Ids
    base_offset: int
    ext: str
    payload_file: SealedFile
    index_file: SealedFile
    record: p.SealSegment
    position: Position


# -- reading ---------------------------------------------------------------------------------------------------------


def position_of(view: View, stream_id: int, ino: int) -> Position:
    data = namespace.get_xattr(view, stream_id, ino, POSITION_XATTR)
    return Position(*_POSITION.unpack(data)) if data is not None else Position()


def delivered(view: View, stream_id: int, ino: int, job_id: bytes) -> Delivered | None:
    """What the job brought, if it did."""
    data = namespace.get_xattr(view, stream_id, ino, JOB_XATTR + job_id)
    return Delivered(*_POSITION.unpack(data)) if data is not None else None


def open_segments(view: View, stream_id: int) -> dict[int, Ids]:
    """Segments that were opened and are not sealed, by their id."""
    return {dirty.segment_id: Ids(dirty.segment_id, ino) for ino, dirty in view.scan(stream_id, t.DIRTY)}


def segments_dir(view: View, stream_id: int, ino: int) -> int | None:
    entry = namespace.entry(view, stream_id, ino, names.SEGMENTS)
    return entry.ino if entry is not None else None


# -- streams ---------------------------------------------------------------------------------------------------------


def make_stream(b: Batch, parent: int, name: bytes, *, mode: int, uid: int, gid: int) -> InodeRow:
    row = namespace.mkdir(b, parent, name, mode=mode, uid=uid, gid=gid)
    namespace.mkdir(b, row.ino, names.SEGMENTS, mode=stat.S_IMODE(row.mode), uid=uid, gid=row.gid)
    return nodes.get_inode(b, row.ino)


def remove_stream(b: Batch, parent: int, name: bytes) -> list[InodeRow]:
    """The directories that went. ENOTEMPTY while a segment or another stream is in it."""
    nodes.directory(b, parent)
    entry = nodes.lookup(b, parent, name)
    if not stat.S_ISDIR(entry.mode):
        raise os_error(errno.ENOTDIR, name)
    inside = [key[1] for key, _ in b.scan(t.DENTRIES, prefix=t.DENTRIES.pack_key((entry.ino, b"")))]
    below = b.get(t.DENTRIES, (entry.ino, names.SEGMENTS))
    prefix = t.DENTRIES.pack_key((below.ino if below is not None else 0, b""))
    if inside not in ([], [names.SEGMENTS]) or next(b.scan(t.DENTRIES, prefix=prefix), None) is not None:
        raise os_error(errno.ENOTEMPTY, name)
    gone = [_remove_directory(b, entry.ino, names.SEGMENTS)] if below is not None else []
    gone.append(_remove_directory(b, parent, name))
    nodes.touch(b, parent, links=-1)
    return gone


def _remove_directory(b: Batch, parent: int, name: bytes) -> InodeRow:
    entry = nodes.lookup(b, parent, name)
    row = msgspec.structs.replace(nodes.get_inode(b, entry.ino), nlink=0, parent=parent, last_name=name)
    b.delete(t.DENTRIES, (parent, name))
    nodes.erase(b, entry.ino)
    return row


# -- segments --------------------------------------------------------------------------------------------------------


def open_segment(b: Batch, stream_ino: int, base_offset: int, segment_id: int = 0) -> Ids:
    """A new one, or one that is there though the log lost it."""
    nodes.directory(b, stream_ino)
    if segment_id > (b.get(t.COUNTERS, "chunk_id") or 0):
        b.put(t.COUNTERS, "chunk_id", segment_id)
    segment_id = segments.opened(b, GENERATION, base_offset=base_offset, segment_id=segment_id)
    ids = Ids(segment_id, b.stream_id << INO_STREAM_SHIFT | b.next_id("ino", step=2))
    b.put(t.DIRTY, ids.payload_ino, DirtyRow(GENERATION, segment_id=segment_id))
    return ids


def drop_segment(b: Batch, ids: Ids) -> None:
    """It is given up, with what was in it."""
    if b.get(t.DIRTY, ids.payload_ino) is not None:
        segments.retire(b, ids.segment_id)
        b.delete(t.DIRTY, ids.payload_ino)


def drop_tail(b: Batch, stream_ino: int, given_up: list[Ids], position: Position) -> None:
    """What is not sealed is given up; offsets go on behind it."""
    for ids in given_up:
        drop_segment(b, ids)
    put_position(b, stream_ino, position)


def put_position(b: Batch, stream_ino: int, position: Position) -> None:
    b.put(t.XATTRS, (stream_ino, POSITION_XATTR), _POSITION.pack(*position))


def seal(b: Batch, one: Sealed, *, chunk_bytes: int, block_bytes: int) -> list[ObjectRow]:
    """Payload file and index, names and objects; the stream goes on behind them."""
    stream = nodes.directory(b, one.stream_ino)
    below = nodes.lookup(b, stream.ino, names.SEGMENTS).ino
    enter(b, one.payload_file, stream.ino, names.payload_name(one.base_offset, one.ext), stream)
    enter(b, one.index_file, below, names.index_name(one.ids.segment_id), stream)
    row = ObjectRow(one.ids.payload_ino, GENERATION, ObjectState.DIRTY, chunk_bytes=chunk_bytes, created_ms=b.now_ms)
    b.put(t.OBJECTS, (row.ino, GENERATION), row)
    objects.create(b, one.ids.index_ino, GENERATION, chunk_bytes=chunk_bytes)
    put_position(b, stream.ino, one.position)
    payload, index = one.payload_file, one.index_file
    return [
        objects.seal(
            b, row.ino, GENERATION, payload.digest, payload.backing, block_bytes=block_bytes, record=one.record
        ),
        objects.seal(b, one.ids.index_ino, GENERATION, index.digest, index.backing, block_bytes=block_bytes),
    ]


def put_job(b: Batch, stream_ino: int, job_id: bytes, done: Delivered) -> None:
    """The job is over: asked for again, it changes nothing. Jobs long gone are forgotten."""
    prefix = t.XATTRS.pack_key((stream_ino, JOB_XATTR))
    old = sorted((Delivered(*_POSITION.unpack(data)).time_ms, key) for key, data in b.scan(t.XATTRS, prefix=prefix))
    for time_ms, key in old[:-JOBS_KEPT_MIN]:
        if time_ms < done.time_ms - JOBS_KEPT_MS:
            b.delete(t.XATTRS, key)
    b.put(t.XATTRS, (stream_ino, JOB_XATTR + job_id), _POSITION.pack(*done))


def enter(b: Batch, file: SealedFile, parent: int, name: bytes, like: InodeRow) -> None:
    size, hole_bytes = file.digest.size, file.digest.hole_bytes
    namespace.bring(b, parent, name, like=like, size=size, ino=file.ino, mtime_ns=file.mtime_ns, hole_bytes=hole_bytes)


def unlink_segment(b: Batch, payload: tuple[int, bytes], is_open: namespace.IsOpen = namespace.never) -> list[InodeRow]:
    """A payload file and its index lose their names: what is left of them is the same of both."""
    entry = nodes.lookup(b, *payload)
    if stat.S_ISDIR(entry.mode):
        raise os_error(errno.EISDIR, payload[1])
    gone = [namespace.unlink(b, *payload, is_open=is_open)]
    index = b.get(t.INODES, names.index_ino(entry.ino))
    if index is not None and index.nlink:
        gone.append(namespace.unlink(b, index.parent, index.last_name, is_open=is_open))
    return gone


def unlink_segments(b: Batch, stream_ino: int, ext: str, is_open: namespace.IsOpen = namespace.never) -> list[InodeRow]:
    """All that is sealed of a stream."""
    prefix = t.DENTRIES.pack_key((stream_ino, b""))
    payloads = [key[1] for key, _ in b.scan(t.DENTRIES, prefix=prefix) if names.is_payload_name(key[1], ext)]
    return [row for name in payloads for row in unlink_segment(b, (stream_ino, name), is_open)]


def seal_record(footer: SegmentFooter) -> p.SealSegment:
    """What the log says of a segment, in the format seed's words."""
    return p.SealSegment(
        *(footer.durable_bytes, footer.segment_crc64, footer.ext_id, footer.coordinator_watermark),
        int(footer.flush_failure),
    )


def undelete_segment(b: Batch, ino: int, parent: int, name: bytes) -> InodeRow:
    """A payload file and its index. ENOENT where the index never reached the remote: one is of no use alone."""
    row = namespace.undelete(b, ino, parent, name)
    index = b.get(t.INODES, names.index_ino(ino))
    if index is None or not index.last_name.endswith(names.INDEX_SUFFIX):
        raise os_error(errno.ENOENT, name)
    if not index.nlink:
        namespace.undelete(b, index.ino)
    return row
