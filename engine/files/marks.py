"""Which objects are being written, as changes to the catalog. Each function is one atomic batch on its tenant's stream.

    create → dirty ── seal ──► sealed → published
                ▲                 │         │
                └──── reopen ─────┴─────────┘

A dirty object has a row in DIRTY, so recovery finds all of them without walking anything. Writing a published object
on makes the next generation of it, in the same backing file: the published one stays in the remote, and its rows stop
claiming that its bytes are here. An object that is sealed but not yet published has no published copy to keep: it
is dirty again under its own number.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from aof2.engine import objects, residency, segments
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import DirtyRow, InodeRow, ObjectRow, ObjectState, ResidencyRow
from aof2.engine.manifest import payloads as p
from aof2.engine.tiering.hashing import ObjectDigest


class Times(NamedTuple):
    """What a backing file says of itself when it is sealed."""

    mtime_ns: int
    ctime_ns: int
    atime_ns: int


class Seal(NamedTuple):
    """A file that was hashed and synced. `parts`: chunks that were uploaded before, and their blocks that are here;
    `ahead`: chunks that are on their way already, and their ids."""

    ino: int
    generation: int
    digest: ObjectDigest
    backing: tuple[int, int, int]
    times: Times
    parts: Mapping[int, int]
    ahead: Mapping[int, int]


class Reopened(NamedTuple):
    row: ObjectRow
    dirty: DirtyRow
    freed_bytes: int  # of disk that the old generation's rows no longer account for


def _inode(b: Batch, ino: int) -> InodeRow:
    row = b.get(t.INODES, ino)
    if row is None:
        raise objects.ObjectGoneError(f"inode {ino} is gone")
    return row


def reopen(b: Batch, ino: int, *, block_bytes: int, present: Sequence[int] | None = None) -> Reopened:
    """The first writer of a clean object: from this commit on its bytes vouch for nothing.

    `present` is what of the old generation is in the backing file, a mask a chunk, where that is not all of it.
    """
    inode = _inode(b, ino)
    old = objects.get_object(b, ino, inode.generation)
    if old.state == ObjectState.DIRTY:
        return Reopened(old, b.get(t.DIRTY, ino) or DirtyRow(old.generation), 0)
    if old.state == ObjectState.SEALED:
        return _write_on(b, old, block_bytes=block_bytes, present=present)
    freed = residency.evicted(b, old.data_chunks, block_bytes=block_bytes)
    generation = old.generation + 1
    row = objects.create(b, ino, generation, chunk_bytes=old.chunk_bytes)
    dirty = b.get(t.DIRTY, ino) or DirtyRow(generation)
    base_len = old.size if present is not None else 0
    dirty = msgspec.structs.replace(
        dirty, base_generation=old.generation, base_len=base_len, present=tuple(present or ())
    )
    b.put(t.DIRTY, ino, dirty)
    b.put(t.INODES, ino, msgspec.structs.replace(inode, generation=generation))
    return Reopened(row, dirty, freed)


def _write_on(b: Batch, old: ObjectRow, *, block_bytes: int, present: Sequence[int] | None) -> Reopened:
    """Chunks that are here whole are the file's again; those that are not were uploaded, and stay its parts."""
    freed = 0
    parts: list[int] = []
    masks: list[int] = []
    for index, chunk_id in enumerate(old.chunks):
        chunk = b.get(t.CHUNKS, chunk_id) if chunk_id else None
        here = b.get(t.RESIDENCY, chunk_id) if chunk_id else None
        if chunk is not None and here is not None:
            freed += objects.chunk_disk_bytes(here.mask, chunk, block_bytes)
            b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(here, mask=0))
        whole = objects.full_mask(chunk.length if chunk is not None else old.length_of(index), block_bytes)
        is_part = present is not None and chunk is not None and bool(chunk.key) and present[index] != whole
        parts.append(chunk_id if is_part else 0)
        masks.append(present[index] if present is not None and is_part else whole)
        if chunk_id and not is_part:
            objects.release_chunk(b, chunk_id)
        elif here is not None and here.mask:
            b.record(p.LocalEvicted(0), segment_id=chunk_id)  # its blocks here are the writer's now
    objects.account(b, -freed)
    objects.unqueue_upload(b, old.ino, old.generation)
    row = ObjectRow(old.ino, old.generation, ObjectState.DIRTY, chunk_bytes=old.chunk_bytes, created_ms=old.created_ms)
    dirty = DirtyRow(old.generation, segment_id=segments.opened(b, old.generation))
    if any(parts):
        row = msgspec.structs.replace(row, chunks=tuple(parts))
        dirty = msgspec.structs.replace(dirty, base_len=old.size, present=tuple(masks))
    b.put(t.OBJECTS, (old.ino, old.generation), row)
    b.put(t.DIRTY, old.ino, dirty)
    return Reopened(row, dirty, freed)


def unwritten(b: Batch, seal: Seal, *, block_bytes: int) -> ObjectRow | None:
    """The writer closed without a change: the published generation is the file's again, its bytes are all here.

    None where there is nothing to go back to: the object was never published.
    """
    ino = seal.ino
    inode, dirty = _inode(b, ino), b.get(t.DIRTY, ino)
    if dirty is None or not dirty.base_generation:
        return None
    old = objects.get_object(b, ino, dirty.base_generation)
    if old.state != ObjectState.PUBLISHED or any(objects.get_object(b, ino, dirty.generation).chunks):
        return None
    b.delete(t.OBJECTS, (ino, dirty.generation))
    segments.retire(b, dirty.segment_id)
    b.delete(t.DIRTY, ino)
    for chunk_id in old.data_chunks:
        chunk = b.get(t.CHUNKS, chunk_id)
        if chunk is None:
            raise objects.ObjectGoneError(f"chunk {chunk_id} of object {ino}.{old.generation} is gone")
        b.record(p.HydrationDone(chunk.length), segment_id=chunk_id, logical_offset=chunk.length)
        mask = objects.full_mask(chunk.length, block_bytes)
        here = b.get(t.RESIDENCY, chunk_id) or ResidencyRow()
        before = objects.chunk_disk_bytes(here.mask, chunk, block_bytes)
        b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(here, mask=mask))
        objects.account(b, objects.chunk_disk_bytes(mask, chunk, block_bytes) - before)
    old = msgspec.structs.replace(old, backing=seal.backing)
    b.put(t.OBJECTS, (ino, old.generation), old)
    inode = msgspec.structs.replace(_timed(inode, seal.times), generation=old.generation)
    b.put(t.INODES, ino, msgspec.structs.replace(inode, size=old.size, hole_bytes=old.hole_bytes))
    return old


def note_present(b: Batch, ino: int, *, base_len: int, present: Sequence[int]) -> None:
    """What of a partly fetched file is in its backing file now, written or fetched; synced before this.

    Parts behind `base_len` are no longer the file's.
    """
    dirty = b.get(t.DIRTY, ino)
    row = b.get(t.OBJECTS, (ino, dirty.generation)) if dirty is not None else None
    if dirty is None or row is None:
        return
    b.put(t.DIRTY, ino, msgspec.structs.replace(dirty, base_len=base_len, present=tuple(present)))
    kept = -(-base_len // row.chunk_bytes)
    if any(row.chunks[kept:]):
        b.put(t.OBJECTS, (ino, row.generation), msgspec.structs.replace(row, chunks=row.chunks[:kept]))
        for chunk_id in row.chunks[kept:]:
            objects.release_chunk(b, chunk_id)


def _seal(b: Batch, one: Seal, block_bytes: int) -> ObjectRow:
    """The bytes are hashed and synced: the object has chunks, the inode the size and times it was left with."""
    inode, digest, times = _inode(b, one.ino), one.digest, one.times
    row = objects.seal(
        b, one.ino, one.generation, digest, one.backing, block_bytes=block_bytes, parts=one.parts, ahead=one.ahead
    )
    inode = msgspec.structs.replace(
        inode,
        mtime_ns=times.mtime_ns,
        atime_ns=times.atime_ns,
        ctime_ns=max(inode.ctime_ns, times.ctime_ns),
        size=digest.size,
        hole_bytes=digest.hole_bytes,
    )
    b.put(t.INODES, one.ino, inode)
    return row


def _timed(inode: InodeRow, times: Times) -> InodeRow:
    return msgspec.structs.replace(
        inode, mtime_ns=times.mtime_ns, atime_ns=times.atime_ns, ctime_ns=max(inode.ctime_ns, times.ctime_ns)
    )


def seal_all(b: Batch, seals: Sequence[Seal], *, block_bytes: int) -> list[ObjectRow | None]:
    """Many seals, one commit; None for a file that was unlinked meanwhile."""
    rows: list[ObjectRow | None] = []
    inos, keys = [one.ino for one in seals], [(one.ino, one.generation) for one in seals]
    b.read_ahead(t.INODES, inos)
    b.read_ahead(t.DIRTY, inos)
    b.read_ahead(t.OBJECTS, keys)
    b.read_ahead(t.UNPUBLISHED, keys)
    for one in seals:
        try:
            rows.append(_seal(b, one, block_bytes))
        except objects.ObjectGoneError:  # raised before anything of it changed
            rows.append(None)
    return rows
