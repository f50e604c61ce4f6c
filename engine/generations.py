"""The generations of a file that can still be had, and bringing one of them back.

A published generation stays restorable until retention lets it go (`retention.checkpoints`, `jobs/prune.py`). Bringing
one back moves no bytes: its content is in the remote, and the new generation, or the new file, gets chunk rows of its
own that refer to the same blobs.

Invariants
- What the file was before is kept: only a published generation is replaced, and it stays a generation.
- A blob has one reference a chunk row, so neither the old generation's end nor the new one's takes the other's bytes.

Owner: changes are the catalog's writer thread's, for the length of a batch; reading is over a view. A crash leaves the
file before or after it.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

import msgspec

from aof2.engine import namespace, objects, segments
from aof2.engine.catalog import ops as o
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ChunkRow, HashKind, InodeRow, ObjectRow, ObjectState
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error
from aof2.engine.manifest import payloads as p


class NoSuchGenerationError(Aof2Error):
    """The file has no such generation any more, or never had. See `aof2 generations`."""


class NotSettledError(Aof2Error):
    """What the file is now is not in the remote yet, and would be lost. Wait for it, then try again."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One of them. `restorable`: published, so that the remote has all of it."""

    generation: int
    current: bool
    state: str
    restorable: bool
    size: int
    sha256: str
    chunks: int
    sealed_ms: int
    published_ms: int
    local_bytes: int


def generations(view: View, stream_id: int, inode: InodeRow, block_bytes: int) -> list[Generation]:
    """All there are of a file, newest first."""
    found = [row for _, row in view.scan(stream_id, t.OBJECTS, prefix=inode.ino.to_bytes(8, "big"))]
    return [_generation(view, stream_id, inode, row, block_bytes) for row in reversed(found)]


def _generation(view: View, stream_id: int, inode: InodeRow, row: ObjectRow, block_bytes: int) -> Generation:
    return Generation(
        generation=row.generation,
        current=row.generation == inode.generation,
        state=row.state.name.lower(),
        restorable=row.state == ObjectState.PUBLISHED,
        size=inode.size if row.state == ObjectState.DIRTY else row.size,
        sha256=row.sha256.hex() if row.hashed is HashKind.BYTES else "",
        chunks=len(row.chunks),
        sealed_ms=row.sealed_ms,
        published_ms=row.published_ms,
        local_bytes=objects.bytes_here(view, stream_id, row, block_bytes)[0],
    )


# -- bringing one back ---------------------------------------------------------------------------------------------


def revert(b: Batch, ino: int, generation: int, *, purge_after_ms: int) -> ObjectRow:
    """The file has the content of an older generation again, as its newest one."""
    inode = namespace.get_inode(b, ino)
    now = objects.get_object(b, ino, inode.generation)
    if now.state != ObjectState.PUBLISHED:
        raise NotSettledError(f"generation {now.generation} of inode {ino} is not in the remote yet")
    old = _restorable(b, ino, generation)
    row = _copy(b, old, ino, now.generation + 1)
    objects.supersede(b, ino, row.generation, purge_at_ms=b.now_ms + purge_after_ms)
    times = {"mtime_ns": b.now_ns, "ctime_ns": b.now_ns}
    content = {"generation": row.generation, "size": row.size, "hole_bytes": row.hole_bytes}
    b.put(t.INODES, ino, msgspec.structs.replace(inode, **content, **times))
    return row


def revert_beside(b: Batch, ino: int, generation: int, parent: int, name: bytes) -> InodeRow:
    """A new file with the content of a generation, the owner and mode of its file, and the time it was sealed at."""
    inode, old = namespace.get_inode(b, ino), _restorable(b, ino, generation)
    mode = stat.S_IMODE(inode.mode)
    made = namespace.create(b, parent, name, mode=mode, uid=inode.uid, gid=inode.gid, chunk_bytes=old.chunk_bytes)
    segments.unopened(b, made.ino)  # nothing is written to it: its content is there
    b.delete(t.DIRTY, made.ino)
    row = _copy(b, old, made.ino, made.generation)
    made = msgspec.structs.replace(made, size=row.size, hole_bytes=row.hole_bytes, mtime_ns=old.sealed_ms * 1_000_000)
    b.put(t.INODES, made.ino, made)
    return made


def _restorable(b: Batch, ino: int, generation: int) -> ObjectRow:
    row = b.get(t.OBJECTS, (ino, generation))
    if row is None or row.state != ObjectState.PUBLISHED:
        raise NoSuchGenerationError(f"there is no published generation {generation} of inode {ino}")
    return row


def _copy(b: Batch, old: ObjectRow, ino: int, generation: int) -> ObjectRow:
    """An object that is published from the start: the remote has its content."""
    chunks = tuple(_copy_chunk(b, old, chunk_id, ino, generation) if chunk_id else 0 for chunk_id in old.chunks)
    times = {"created_ms": b.now_ms, "sealed_ms": b.now_ms, "published_ms": b.now_ms, "tombstoned_ms": 0}
    row = msgspec.structs.replace(old, ino=ino, generation=generation, chunks=chunks, backing=None, **times)
    b.put(t.OBJECTS, (ino, generation), row)
    return row


def _copy_chunk(b: Batch, old: ObjectRow, chunk_id: int, ino: int, generation: int) -> int:
    source = b.get(t.CHUNKS, chunk_id)
    blob = b.get(t.BLOBS, source.sha256) if source is not None else None
    if source is None or blob is None:
        raise NoSuchGenerationError(f"chunk {chunk_id} of generation {old.generation} is gone; run aof2 verify")
    b.put(t.BLOBS, source.sha256, msgspec.structs.replace(blob, refs=blob.refs + 1, unreferenced_ms=0))
    own = {"chunk_id": b.next_id("chunk_id"), "ino": ino, "generation": generation}
    chunk: ChunkRow = msgspec.structs.replace(source, **own, superseded=False, purge_at_ms=0)
    b.apply(o.UpsertChunk(chunk))
    pieces = b.get(t.PIECES, chunk_id)
    if pieces is not None:
        b.put(t.PIECES, chunk.chunk_id, pieces)
    for record in _records(chunk, old, blob.etag):
        b.record(record, segment_id=chunk.chunk_id, logical_offset=chunk.length)
    return chunk.chunk_id


def _records(chunk: ChunkRow, old: ObjectRow, etag: str) -> Iterator[p.Payload]:
    """A segment that was sealed, is in the remote, and has no copy here."""
    yield p.SegmentOpened(chunk.index * old.chunk_bytes, chunk.generation & 0xFFFFFFFF)
    yield p.SealSegment(chunk.length, chunk.crc64, chunk.ino, 0, 0)
    yield p.UploadDone(chunk.key, etag)
    yield p.LocalEvicted(chunk.length)
