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

from aof2.engine import packrows, segments
from aof2.engine.catalog import ops as o
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import BlobRow, ChunkRow, DirtyRow, ObjectRow, ObjectState, ResidencyRow
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error, TransientError
from aof2.engine.local.sparse import on_disk as on_disk  # what counts bytes counts them here
from aof2.engine.manifest import payloads as p
from aof2.engine.remote.keys import AnyPackKey, WholeBlobKey, chunk_blob_key, is_pack, parse_key
from aof2.engine.tiering.hashing import ChunkDigest, ObjectDigest

HOT_BYTES: Final = "hot_bytes"
WARM_BYTES: Final = segments.WARM_BYTES
PENDING_BYTES: Final = "pending_bytes"
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
    offset: int = 0  # of the blob in the object under `key`
    pack_bytes: int = 0  # of that object, where blobs share it


def found(blob: BlobRow, chunk: ChunkRow) -> Uploaded:
    """The chunk's content is in the remote already, as this blob."""
    return Uploaded(
        chunk.chunk_id, blob.key, blob.etag, blob.stored_bytes, chunk.compression, False, offset=blob.offset
    )


def full_mask(length: int, block_bytes: int) -> int:
    return (1 << -(-length // block_bytes)) - 1


def mask_bytes(mask: int, length: int, block_bytes: int) -> int:
    """How many bytes of a chunk of `length` the blocks in `mask` hold."""
    count = mask.bit_count() * block_bytes
    last = (length - 1) // block_bytes
    short = (last + 1) * block_bytes - length
    return count - short if length and mask >> last & 1 else count


def disk_bytes(mask: int, length: int, block_bytes: int) -> int:
    """What those blocks take on the disk: what is accounted, so that a million tiny files count as what they are."""
    count = mask.bit_count() * block_bytes
    last = (length - 1) // block_bytes
    short = (last + 1) * block_bytes - on_disk(length)
    return count - short if length and mask >> last & 1 else count


def chunk_disk_bytes(mask: int, chunk: ChunkRow | ChunkDigest, block_bytes: int) -> int:
    """The same of a chunk's blocks: its holes take nothing."""
    return disk_bytes(mask & ~chunk.holes, chunk.length, block_bytes)


def digest_disk_bytes(digest: ObjectDigest, block_bytes: int) -> int:
    """What an object that is all here is counted as."""
    data = (c for c in digest.chunks if not c.is_hole)
    return sum(chunk_disk_bytes(full_mask(c.length, block_bytes), c, block_bytes) for c in data)


def chunk_bytes_here(mask: int, chunk: ChunkRow, block_bytes: int) -> int:
    """How many bytes of data of the chunk the blocks in `mask` hold."""
    return mask_bytes(mask & ~chunk.holes, chunk.length, block_bytes)


def bytes_here(view: View, stream_id: int, row: ObjectRow, block_bytes: int) -> tuple[int, int]:
    """How many bytes of an object are in hot_cache, of how many: holes are nowhere, and needed nowhere."""
    local = total = 0
    for chunk_id in row.data_chunks:
        chunk = view.get(stream_id, t.CHUNKS, chunk_id)
        here = view.get(stream_id, t.RESIDENCY, chunk_id) or ResidencyRow()
        if chunk is not None:
            local += chunk_bytes_here(here.mask, chunk, block_bytes)
            total += chunk_bytes_here(full_mask(chunk.length, block_bytes), chunk, block_bytes)
    return local, total


def get_object(b: Batch, ino: int, generation: int) -> ObjectRow:
    row = b.get(t.OBJECTS, (ino, generation))
    if row is None:
        raise ObjectGoneError(f"object {ino}.{generation} is gone")
    return row


def create(b: Batch, ino: int, generation: int, *, chunk_bytes: int) -> ObjectRow:
    """A new, empty, dirty generation."""
    row = ObjectRow(ino, generation, ObjectState.DIRTY, chunk_bytes=chunk_bytes, created_ms=b.now_ms)
    b.put(t.OBJECTS, (ino, generation), row)
    b.put(t.DIRTY, ino, DirtyRow(generation, segment_id=segments.opened(b, generation)))
    return row


def seal(
    b: Batch,
    ino: int,
    generation: int,
    digest: ObjectDigest,
    backing: tuple[int, int, int],
    *,
    block_bytes: int,
    parts: Mapping[int, int] | None = None,
    ahead: Mapping[int, int] | None = None,
    record: p.SealSegment | None = None,
) -> ObjectRow:
    """The bytes are hashed and synced: gives them chunks, fully resident.

    `parts`: chunks that were uploaded before and did not change since, by index, with their blocks that are here.
    `ahead`: the ids of chunks that are on their way already, by index. `record`: what the log says of a one-chunk
    object whose bytes were sealed in another form.
    """
    row = get_object(b, ino, generation)
    kept, given = parts or {}, ahead or {}
    dirty = b.get(t.DIRTY, ino)
    chunk_ids: list[int] = []
    for index, c in enumerate(digest.chunks):
        if c.is_hole:
            chunk_ids.append(0)
            continue
        mask = kept.get(index, full_mask(c.length, block_bytes))
        if index in kept:
            chunk_id = row.chunks[index]
            if mask:
                hydrated(b, chunk_id, mask_bytes(mask, c.length, block_bytes))
        else:
            chunk_id = given.get(index) or segments.taken(b, dirty, row.generation, index * row.chunk_bytes)
            dirty = None
            _seal_chunk(b, row, index, c, chunk_id, record)
        chunk_ids.append(chunk_id)
        b.put(t.RESIDENCY, chunk_id, ResidencyRow(mask))
        account(b, chunk_disk_bytes(mask, c, block_bytes))
    if dirty is not None:
        segments.retire(b, dirty.segment_id)  # opened, and no chunk came of it
    for chunk_id in {*row.chunks} - {*chunk_ids}:
        release_chunk(b, chunk_id)
    row = msgspec.structs.replace(
        row,
        state=ObjectState.SEALED,
        size=digest.size,
        chunks=tuple(chunk_ids),
        sha256=digest.sha256,
        backing=backing,
        sealed_ms=b.now_ms,
        hole_bytes=digest.hole_bytes,
        hashed=digest.hashed,
    )
    b.put(t.OBJECTS, (ino, generation), row)
    queue_upload(b, ino, generation, digest.data_bytes)
    b.delete(t.DIRTY, ino)
    return row


def queue_upload(b: Batch, ino: int, generation: int, data_bytes: int) -> None:
    """A sealed object waits for its upload. What waits is summed up on the way: it is asked for at every open."""
    unqueue_upload(b, ino, generation)
    b.put(t.UNPUBLISHED, (ino, generation), data_bytes)
    _count_pending(b, on_disk(data_bytes))


def unqueue_upload(b: Batch, ino: int, generation: int) -> None:
    """It is in the remote, gone, or being written to again."""
    queued = b.get(t.UNPUBLISHED, (ino, generation))
    if queued is not None:
        b.delete(t.UNPUBLISHED, (ino, generation))
        _count_pending(b, -on_disk(queued))


def _count_pending(b: Batch, change: int) -> None:
    if change:
        b.put(t.COUNTERS, PENDING_BYTES, max(0, (b.get(t.COUNTERS, PENDING_BYTES) or 0) + change))


def pending_bytes(view: View, stream_id: int) -> int:
    """What is sealed and not in the remote, as it lies on the disk."""
    return view.get(stream_id, t.COUNTERS, PENDING_BYTES) or 0


def count_pending_anew(b: Batch) -> None:
    """For a volume from before this was counted."""
    b.put(t.COUNTERS, PENDING_BYTES, sum(on_disk(size) for _, size in b.scan(t.UNPUBLISHED)))


def _seal_chunk(
    b: Batch, row: ObjectRow, index: int, c: ChunkDigest, chunk_id: int, record: p.SealSegment | None
) -> None:
    chunk = ChunkRow(chunk_id, row.ino, row.generation, index, c.length, c.sha256, c.crc64, c.block_crcs, holes=c.holes)
    b.apply(o.UpsertChunk(chunk))
    _put_pieces(b, chunk_id, c.piece_crcs)
    _sealed_segment(b, chunk_id, row, c, record)


def _put_pieces(b: Batch, chunk_id: int, piece_crcs: bytes) -> None:
    if piece_crcs:
        b.put(t.PIECES, chunk_id, piece_crcs)


def _sealed_segment(
    b: Batch, chunk_id: int, row: ObjectRow, c: ChunkDigest, record: p.SealSegment | None = None
) -> None:
    """The watermark is how far the log had got: everything before that record is before the seal."""
    sealed = record or p.SealSegment(c.length, c.crc64, row.ino, b.ordinal, 0)
    b.record(sealed, segment_id=chunk_id, logical_offset=c.length)


def hydrated(b: Batch, chunk_id: int, resident_bytes: int) -> None:
    b.record(p.HydrationDone(resident_bytes), segment_id=chunk_id, logical_offset=resident_bytes)


# -- parts: chunks of an object that is still being written ----------------------------------------------------------


class PartIds(NamedTuple):
    """What a part's key is made of."""

    chunk_id: int
    checkpoint_id: int


def part_begun(b: Batch, ino: int, generation: int, index: int, digest: ChunkDigest) -> PartIds:
    """A chunk of a dirty object is about to be uploaded: its name. No row speaks of it before it is in the remote."""
    row, ids = _named_ahead(b, ino, generation, index)
    _sealed_segment(b, ids.chunk_id, row, digest)
    return ids


def ahead_begun(b: Batch, tenant: str, ino: int, generation: int, index: int, sha256: bytes) -> tuple[PartIds, str]:
    """A chunk of an object that is being sealed sets off: its name, and its key. Its row comes with the seal; where
    that does not come, the upload is one that was given up."""
    _, ids = _named_ahead(b, ino, generation, index)
    key = chunk_blob_key(tenant, ids.checkpoint_id, ids.chunk_id, generation, sha256)
    upload_started(b, [(ids.chunk_id, key)])
    return ids, key


def _named_ahead(b: Batch, ino: int, generation: int, index: int) -> tuple[ObjectRow, PartIds]:
    row, dirty = _dirty_object(b, ino, generation)
    checkpoint_id = dirty.checkpoint_id or b.next_id("checkpoint_id")
    chunk_id = segments.taken(b, dirty, row.generation, index * row.chunk_bytes)
    b.put(t.DIRTY, ino, msgspec.structs.replace(dirty, checkpoint_id=checkpoint_id, segment_id=0))
    return row, PartIds(chunk_id, checkpoint_id)


def part_done(b: Batch, chunk: ChunkRow, up: Uploaded, *, block_bytes: int, piece_crcs: bytes = b"") -> ChunkRow:
    """It is in the remote, and will be punched out of the backing file: from this commit on its bytes are there."""
    row, dirty = _dirty_object(b, chunk.ino, chunk.generation)
    blob = _reference(b, chunk, up)
    chunk = _located(chunk, blob, up.compression)
    b.apply(o.UpsertChunk(chunk))
    _put_pieces(b, chunk.chunk_id, piece_crcs)
    b.record(p.UploadDone(blob.key, blob.etag), segment_id=chunk.chunk_id, logical_offset=chunk.length)
    b.record(p.LocalEvicted(chunk.length), segment_id=chunk.chunk_id, logical_offset=chunk.length)
    chunks = [*row.chunks, *(0 for _ in range(chunk.index + 1 - len(row.chunks)))]
    replaced, chunks[chunk.index] = chunks[chunk.index], chunk.chunk_id
    b.put(t.OBJECTS, (row.ino, row.generation), msgspec.structs.replace(row, chunks=tuple(chunks)))
    release_chunk(b, replaced)
    whole = full_mask(row.chunk_bytes, block_bytes)
    present = [*dirty.present, *(whole for _ in range(chunk.index + 1 - len(dirty.present)))]
    present[chunk.index] = 0
    base_len = max(dirty.base_len, chunk.index * row.chunk_bytes + chunk.length)
    b.put(t.DIRTY, row.ino, msgspec.structs.replace(dirty, base_len=base_len, present=tuple(present)))
    return chunk


def _dirty_object(b: Batch, ino: int, generation: int) -> tuple[ObjectRow, DirtyRow]:
    row, dirty = b.get(t.OBJECTS, (ino, generation)), b.get(t.DIRTY, ino)
    if row is None or dirty is None or row.state != ObjectState.DIRTY or dirty.generation != generation:
        raise ObjectGoneError(f"object {ino}.{generation} is not being written any more")
    return row, dirty


def upload_started(b: Batch, keys: Sequence[tuple[int, str]]) -> None:
    for chunk_id, key in keys:
        b.record(p.UploadStarted(key), segment_id=chunk_id)


def pack_started(b: Batch, key: str, chunk_ids: Sequence[int]) -> None:
    """`upload_started` of each member of a pack."""
    b.record_of_each(p.UploadStarted(key), chunk_ids)


def upload_failed(b: Batch, chunk_id: int, key: str, reason_code: int) -> None:
    b.record(p.UploadFailed(key, reason_code), segment_id=chunk_id)


class BlobGoneError(TransientError):
    """The blob that was to be shared went before the commit. Upload the content again."""


def published(
    b: Batch,
    ino: int,
    generation: int,
    checkpoint_id: int,
    uploads: Sequence[Uploaded],
    *,
    purge_after_ms: int = 0,
) -> ObjectRow:
    """Every chunk's content is in the remote: names where, and moves the checkpoint's watermark.

    Older published generations of the inode are superseded: retention may let them go `purge_after_ms` from now.
    """
    row = get_object(b, ino, generation)
    for up in uploads:
        chunk = b.get(t.CHUNKS, up.chunk_id)
        if chunk is None:
            raise ObjectGoneError(f"chunk {up.chunk_id} of object {ino}.{generation} is gone")
        blob = _blob_of(b, chunk) if chunk.key else _reference(b, chunk, up)
        b.apply(o.UpsertChunk(_located(chunk, blob, up.compression)))
        b.record(p.UploadDone(blob.key, blob.etag), segment_id=up.chunk_id, logical_offset=chunk.length)
    b.apply(o.SetWatermark(CHECKPOINT, checkpoint_id))
    return _set_published(b, row, checkpoint_id, purge_after_ms)


def _set_published(b: Batch, row: ObjectRow, checkpoint_id: int, purge_after_ms: int) -> ObjectRow:
    """The last of it: its bytes are located. The watermark is the caller's."""
    ino, generation = row.ino, row.generation
    if generation > 1:
        supersede(b, ino, generation, purge_at_ms=b.now_ms + purge_after_ms)
    row = msgspec.structs.replace(row, state=ObjectState.PUBLISHED, checkpoint_id=checkpoint_id, published_ms=b.now_ms)
    b.put(t.OBJECTS, (ino, generation), row)
    unqueue_upload(b, ino, generation)
    return row


def _located(chunk: ChunkRow, blob: BlobRow, compression: str) -> ChunkRow:
    """The chunk's row, with where its bytes are."""
    return msgspec.structs.replace(
        chunk, key=blob.key, offset=blob.offset, stored_bytes=blob.stored_bytes, compression=compression
    )


def _blob_of(b: Batch, chunk: ChunkRow) -> BlobRow:
    """The blob of a chunk that is in the remote already."""
    blob = b.get(t.BLOBS, chunk.sha256)
    if blob is None:
        raise BlobGoneError(f"{chunk.key} of chunk {chunk.chunk_id} is gone")
    return blob


def _reference(b: Batch, chunk: ChunkRow, up: Uploaded) -> BlobRow:
    """One more chunk with this content; the one blob that holds it for all of them."""
    blob = b.get(t.BLOBS, chunk.sha256)
    if blob is None:
        owner = chunk.chunk_id if up.pack_bytes else blob_segment(up.key)
        if not up.fresh or (owner != chunk.chunk_id and not upload_pending(b.view, b.stream_id, owner, up.key)):
            raise BlobGoneError(f"{up.key} was to be shared by chunk {chunk.chunk_id} and is gone")
        blob = BlobRow(up.key, up.stored_bytes, chunk.length, 1, up.etag, offset=up.offset)
        if up.pack_bytes:
            packrows.join(b, up.key, up.stored_bytes, up.pack_bytes)
        b.put(t.BLOBS, chunk.sha256, blob)
        return blob
    if blob.key != up.key and up.fresh:
        # Another upload of the same content was recorded first: ours is one too many.
        b.record(p.UploadDone(up.key, up.etag), segment_id=up.chunk_id, logical_offset=chunk.length)
        if not up.pack_bytes:
            b.record(p.Tier2DeleteQueued(up.key), segment_id=up.chunk_id)
    blob = msgspec.structs.replace(blob, refs=blob.refs + 1, unreferenced_ms=0)
    b.put(t.BLOBS, chunk.sha256, blob)
    return blob


# -- packs: remote objects that blobs share --------------------------------------------------------------------------


class ToPublish(NamedTuple):
    """One object of a bulk: with the upload of its one chunk, or, where it is empty or all holes, none."""

    ino: int
    generation: int
    sha256: bytes
    chunk_id: int
    upload: Uploaded | None


def published_in_bulk(
    b: Batch, bulk: Sequence[ToPublish], checkpoint_id: int, *, purge_after_ms: int = 0
) -> list[tuple[int, int]]:
    """`published` of many objects in one commit, for those that are still what was uploaded; which those are.

    A member of a pack whose object went, or is written again, is dead in it from the start. A pack that no blob is in
    after all is queued for deletion.
    """
    done: list[tuple[int, int]] = []
    packs: dict[str, int] = {}
    located: dict[tuple[str, str], list[tuple[int, int]]] = {}  # by key and etag: (chunk, its length)
    b.read_ahead(t.OBJECTS, [(one.ino, one.generation) for one in bulk])
    b.read_ahead(t.UNPUBLISHED, [(one.ino, one.generation) for one in bulk])
    b.read_ahead(t.CHUNKS, [one.chunk_id for one in bulk if one.chunk_id])
    b.read_ahead(t.BLOBS, [one.sha256 for one in bulk if one.chunk_id])
    for one in bulk:
        row, up = b.get(t.OBJECTS, (one.ino, one.generation)), one.upload
        if up is not None and up.pack_bytes and up.fresh:
            packs.setdefault(up.key, up.chunk_id)
        chunks = (one.chunk_id,) if one.chunk_id else ()
        if row is None or row.state != ObjectState.SEALED or row.data_chunks != chunks:
            _end_upload(b, up)
            continue
        if up is not None and not up.fresh and b.get(t.BLOBS, one.sha256) is None:
            continue  # the blob that was to be shared went: the next attempt uploads it
        if up is not None:
            chunk = b.get(t.CHUNKS, up.chunk_id)
            if chunk is None:
                raise ObjectGoneError(f"chunk {up.chunk_id} of object {one.ino}.{one.generation} is gone")
            blob = _blob_of(b, chunk) if chunk.key else _reference(b, chunk, up)
            b.apply(o.UpsertChunk(_located(chunk, blob, up.compression)))
            located.setdefault((blob.key, blob.etag), []).append((up.chunk_id, chunk.length))
        _set_published(b, row, checkpoint_id, purge_after_ms)
        done.append((one.ino, one.generation))
    for (key, etag), some in located.items():
        ids, lengths = zip(*some, strict=True)
        b.record_of_each(p.UploadDone(key, etag), ids, lengths)
    if done:
        b.apply(o.SetWatermark(CHECKPOINT, checkpoint_id))
    for key, chunk_id in packs.items():
        if b.get(t.PACKS, key) is None:
            b.record(p.Tier2DeleteQueued(key), segment_id=chunk_id)
    return done


def _end_upload(b: Batch, up: Uploaded | None) -> None:
    """It is in its pack, and no row will name it: nothing of it is pending any more."""
    if up is None or not up.fresh or not upload_pending(b.view, b.stream_id, up.chunk_id, up.key):
        return
    b.record(p.UploadDone(up.key, up.etag), segment_id=up.chunk_id)
    if b.get(t.CHUNKS, up.chunk_id) is None:
        segments.retire(b, up.chunk_id)


def upload_pending(view: View, stream_id: int, chunk_id: int, key: str) -> bool:
    """Whether an upload of this chunk was begun under this key and has not ended, well or in a delete."""
    slot = t.STREAM.pack(stream_id) + t.SEGMENT_PENDING_UPLOAD + chunk_id.to_bytes(8, "big") + key.encode()
    return view.raw("segments", slot) is not None


def supersede(b: Batch, ino: int, generation: int, *, purge_at_ms: int) -> int:
    """Marks what published generations before this one hold as replaced; how many chunks that was."""
    marked = 0
    for (_, older), row in b.scan(t.OBJECTS, prefix=ino.to_bytes(8, "big")):
        if older >= generation or row.state != ObjectState.PUBLISHED:
            continue
        for chunk_id in row.data_chunks:
            chunk = b.get(t.CHUNKS, chunk_id)
            if chunk is not None and not chunk.superseded:
                b.apply(o.UpsertChunk(msgspec.structs.replace(chunk, superseded=True, purge_at_ms=purge_at_ms)))
                marked += 1
    return marked


def release_chunk(b: Batch, chunk_id: int) -> None:
    """The chunk is no more: its row goes, and its blob has one reference less. Its local bytes must be gone before."""
    chunk = b.get(t.CHUNKS, chunk_id)
    if chunk is None:
        return
    residency = b.get(t.RESIDENCY, chunk_id)
    if residency is not None and (residency.mask or residency.warm_bytes):
        raise StillResidentError(f"chunk {chunk_id} still has local bytes; evict it first")
    blob = b.get(t.BLOBS, chunk.sha256) if chunk.key else None
    if blob is not None:
        refs = max(0, blob.refs - 1)
        unreferenced_ms = 0 if refs else b.now_ms
        b.put(t.BLOBS, chunk.sha256, msgspec.structs.replace(blob, refs=refs, unreferenced_ms=unreferenced_ms))
    b.apply(o.DeleteChunk(chunk_id))
    segments.retire(b, chunk_id)


def discard_chunk(b: Batch, chunk_id: int) -> None:
    """A chunk of an object that was never published goes; its backing file, once the commit is durable."""
    chunk, here = b.get(t.CHUNKS, chunk_id), b.get(t.RESIDENCY, chunk_id)
    if chunk is not None and here is not None and here.mask:
        account(b, -chunk_disk_bytes(here.mask, chunk, block_bytes_of(chunk)))
        b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(here, mask=0))
    release_chunk(b, chunk_id)


def block_bytes_of(chunk: ChunkRow) -> int:
    """What its blocks were: a power of two, so that the length and their number leave only one."""
    return 1 << (-(-chunk.length // (len(chunk.block_crcs) // 8)) - 1).bit_length()


class StillResidentError(Aof2Error):
    """Rows are not dropped while their bytes are on the local disk. Evict, then try again."""


def release_object(b: Batch, ino: int, generation: int) -> None:
    """A generation that retention gave up goes: its chunks and its row."""
    row = b.get(t.OBJECTS, (ino, generation))
    if row is None:
        return
    for chunk_id in row.data_chunks:
        release_chunk(b, chunk_id)
    b.delete(t.OBJECTS, (ino, generation))
    unqueue_upload(b, ino, generation)


def queue_blob_delete(b: Batch, sha256: bytes, *, unreferenced_before_ms: int) -> int:
    """Takes an unreferenced blob out of the catalog and queues its remote object for deletion; how many bytes go.

    0: it is gone, or in use again, or unreferenced for too short a time, or the pack it is in has others. No upload
    finds the blob by its hash from this commit on, so the object may be deleted as soon as the commit is durable.
    """
    blob = b.get(t.BLOBS, sha256)
    if blob is None or blob.refs or blob.unreferenced_ms > unreferenced_before_ms:
        return 0
    pack = b.get(t.PACKS, blob.key) if is_pack(blob.key) else None
    b.delete(t.BLOBS, sha256)
    if not packrows.leave(b, blob, moved_before_ms=unreferenced_before_ms):
        return 0
    b.record(p.Tier2DeleteQueued(blob.key), segment_id=blob_segment(blob.key))
    return pack.pack_bytes if pack is not None else blob.stored_bytes


def blob_segment(key: str) -> int:
    """The chunk under whose name a blob was uploaded."""
    parsed = parse_key(key)
    return parsed.chunk_id if isinstance(parsed, WholeBlobKey | AnyPackKey) else 0


def blob_rebuilt(b: Batch, sha256: bytes, chunk_ids: Sequence[int], up: Uploaded) -> None:
    """A blob was put again: a damaged or missing one under its key; a member of a pack as an object of its own, or in
    another pack. Nothing needs repair any more."""
    blob = b.get(t.BLOBS, sha256)
    if blob is None or (blob.key != up.key and not is_pack(blob.key)):
        return
    old_key = blob.key
    if old_key != up.key:
        packrows.moved(b, blob)
        if up.pack_bytes:
            packrows.join(b, up.key, up.stored_bytes, up.pack_bytes)
    blob = msgspec.structs.replace(
        blob, key=up.key, offset=up.offset, stored_bytes=up.stored_bytes, etag=up.etag, verified_ms=b.now_ms
    )
    b.put(t.BLOBS, sha256, blob)
    for chunk_id in chunk_ids:
        chunk = b.get(t.CHUNKS, chunk_id)
        if chunk is not None and chunk.key == old_key:
            b.apply(o.UpsertChunk(_located(chunk, blob, chunk.compression)))
        b.record(p.UploadDone(up.key, up.etag), segment_id=chunk_id, logical_offset=blob.raw_bytes)


def account(b: Batch, change: int) -> None:
    if change:
        b.put(t.COUNTERS, HOT_BYTES, max(0, (b.get(t.COUNTERS, HOT_BYTES) or 0) + change))
