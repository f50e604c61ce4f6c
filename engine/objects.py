"""What happens to an object, as changes to the catalog. Each function is one atomic batch on its tenant's stream.

    create → (written) → seal → published → evicted ⇄ resident → tombstone → purge

Every tier transition writes its manifest records in the same commit as its rows, so the log and the catalog cannot
disagree. Accounting rides along: the counter `hot_bytes` of a stream is the sum of what its residency rows say.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from aof2.engine.catalog import ops as o
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import BlobRow, ChunkRow, ObjectRow, ObjectState, ResidencyRow
from aof2.engine.errors import Aof2Error
from aof2.engine.manifest import payloads as p
from aof2.engine.tiering.hashing import ObjectDigest

HOT_BYTES: Final = "hot_bytes"
CHECKPOINT: Final = "checkpoint"


class ObjectGoneError(Aof2Error):
    """The object or this generation of it is no longer there. Look it up again."""


class Uploaded(NamedTuple):
    """One chunk's blob in the remote, put there or found there."""

    chunk_id: int
    key: str
    etag: str
    stored_bytes: int
    compression: str
    fresh: bool  # False: the content was already in the remote under this key


def full_mask(length: int, block_bytes: int) -> int:
    return (1 << -(-length // block_bytes)) - 1


def mask_bytes(mask: int, length: int, block_bytes: int) -> int:
    """How many bytes of a chunk of `length` the blocks in `mask` hold."""
    count = mask.bit_count() * block_bytes
    last = (length - 1) // block_bytes
    short = (last + 1) * block_bytes - length
    return count - short if length and mask >> last & 1 else count


def get_object(b: Batch, ino: int, generation: int) -> ObjectRow:
    row = b.get(t.OBJECTS, (ino, generation))
    if row is None:
        raise ObjectGoneError(f"object {ino}.{generation} is gone")
    return row


def create(b: Batch, ino: int, generation: int, *, chunk_bytes: int) -> ObjectRow:
    """A new, empty, dirty generation."""
    row = ObjectRow(ino, generation, ObjectState.DIRTY, chunk_bytes=chunk_bytes, created_ms=b.now_ms)
    b.put(t.OBJECTS, (ino, generation), row)
    return row


def seal(
    b: Batch, ino: int, generation: int, digest: ObjectDigest, backing: tuple[int, int, int], *, block_bytes: int
) -> ObjectRow:
    """The bytes are hashed and synced: gives them chunks, fully resident."""
    row = get_object(b, ino, generation)
    chunk_ids: list[int] = []
    for index, c in enumerate(digest.chunks):
        chunk_id = b.next_id("chunk_id")
        chunk_ids.append(chunk_id)
        chunk = ChunkRow(chunk_id, ino, generation, index, c.length, c.sha256, c.crc64, c.block_crcs)
        b.apply(o.UpsertChunk(chunk))
        b.put(t.RESIDENCY, chunk_id, ResidencyRow(full_mask(c.length, block_bytes)))
        b.record(p.SegmentOpened(index * row.chunk_bytes, generation & 0xFFFFFFFF), segment_id=chunk_id)
        b.record(p.SealSegment(c.length, c.crc64, ino, 0, 0), segment_id=chunk_id, logical_offset=c.length)
    _account(b, digest.size)
    row = msgspec.structs.replace(
        row,
        state=ObjectState.SEALED,
        size=digest.size,
        chunks=tuple(chunk_ids),
        sha256=digest.sha256,
        backing=backing,
        sealed_ms=b.now_ms,
    )
    b.put(t.OBJECTS, (ino, generation), row)
    b.put(t.UNPUBLISHED, (ino, generation), digest.size)
    return row


def upload_started(b: Batch, keys: Sequence[tuple[int, str]]) -> None:
    for chunk_id, key in keys:
        b.record(p.UploadStarted(key), segment_id=chunk_id)


def upload_failed(b: Batch, chunk_id: int, key: str, reason_code: int) -> None:
    b.record(p.UploadFailed(key, reason_code), segment_id=chunk_id)


def published(b: Batch, ino: int, generation: int, checkpoint_id: int, uploads: Sequence[Uploaded]) -> ObjectRow:
    """Every chunk's content is in the remote: names where, and moves the checkpoint's watermark."""
    row = get_object(b, ino, generation)
    for up in uploads:
        chunk = b.get(t.CHUNKS, up.chunk_id)
        if chunk is None:
            raise ObjectGoneError(f"chunk {up.chunk_id} of object {ino}.{generation} is gone")
        if not chunk.key:
            _reference(b, chunk, up)
        b.apply(o.UpsertChunk(msgspec.structs.replace(chunk, key=up.key, compression=up.compression)))
        b.record(p.UploadDone(up.key, up.etag), segment_id=up.chunk_id, logical_offset=chunk.length)
    b.apply(o.SetWatermark(CHECKPOINT, checkpoint_id))
    row = msgspec.structs.replace(row, state=ObjectState.PUBLISHED, checkpoint_id=checkpoint_id, published_ms=b.now_ms)
    b.put(t.OBJECTS, (ino, generation), row)
    b.delete(t.UNPUBLISHED, (ino, generation))
    return row


def _reference(b: Batch, chunk: ChunkRow, up: Uploaded) -> None:
    blob = b.get(t.BLOBS, chunk.sha256)
    if blob is None:
        blob = BlobRow(up.key, up.stored_bytes, chunk.length, 0, up.etag)
    b.put(t.BLOBS, chunk.sha256, msgspec.structs.replace(blob, refs=blob.refs + 1, unreferenced_ms=0))


def resident(
    b: Batch,
    ino: int,
    generation: int,
    masks: Mapping[int, int],
    backing: tuple[int, int, int] | None,
    *,
    block_bytes: int,
) -> None:
    """Blocks that came in since (chunk id → bits to set); their bytes are synced."""
    row = get_object(b, ino, generation)
    for chunk_id, added in masks.items():
        chunk = b.get(t.CHUNKS, chunk_id)
        if chunk is None:
            continue  # purged meanwhile: nothing to account
        old = b.get(t.RESIDENCY, chunk_id) or ResidencyRow()
        mask = old.mask | added
        b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(old, mask=mask))
        before, after = (mask_bytes(m, chunk.length, block_bytes) for m in (old.mask, mask))
        _account(b, after - before)
        b.record(p.HydrationDone(after), segment_id=chunk_id, logical_offset=after)
    if backing is not None:
        b.put(t.OBJECTS, (ino, generation), msgspec.structs.replace(row, backing=backing))


def hydration_failed(b: Batch, chunk_id: int, reason_code: int) -> None:
    b.record(p.HydrationFailed(reason_code), segment_id=chunk_id)


def evicted(b: Batch, chunk_ids: Sequence[int], *, block_bytes: int) -> int:
    """Gives up the local bytes of chunks that are in the remote; how many bytes. Refuses any that are not."""
    freed = 0
    for chunk_id in chunk_ids:
        chunk = b.get(t.CHUNKS, chunk_id)
        old = b.get(t.RESIDENCY, chunk_id)
        if chunk is None or old is None or not old.mask:
            continue
        if not chunk.key:
            raise NotDurableError(f"chunk {chunk_id} is not in the remote yet")
        size = mask_bytes(old.mask, chunk.length, block_bytes)
        freed += size
        b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(old, mask=0))
        b.record(p.LocalEvicted(size), segment_id=chunk_id, logical_offset=chunk.length)
    _account(b, -freed)
    return freed


class NotDurableError(Aof2Error):
    """The bytes exist only here. Upload them first; they are never evicted before."""


def lost(b: Batch, chunk_id: int, bad: int, *, block_bytes: int) -> None:
    """Local blocks failed their checksum: they are not here any more."""
    chunk, old = b.get(t.CHUNKS, chunk_id), b.get(t.RESIDENCY, chunk_id)
    if chunk is None or old is None:
        return
    mask = old.mask & ~bad
    gone = mask_bytes(old.mask, chunk.length, block_bytes) - mask_bytes(mask, chunk.length, block_bytes)
    b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(old, mask=mask))
    _account(b, -gone)


def _account(b: Batch, change: int) -> None:
    if change:
        b.put(t.COUNTERS, HOT_BYTES, max(0, (b.get(t.COUNTERS, HOT_BYTES) or 0) + change))
