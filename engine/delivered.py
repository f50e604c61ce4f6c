"""Objects that come published: their bytes were in the remote, under the inbox, before any row spoke of them.

Each of their chunks is, in the log, a segment that was opened, sealed, uploaded and evicted, in the one commit that
publishes the job: so `why`, verify, audit and restore find what they find of every other file.

Invariants
- A blob whose content the catalog has already is one too many: its chunk refers to the one that is there.
- A pack in which no row locates anything is queued for deletion by the same commit.

Owner: the catalog's writer thread, for the length of a batch. A crash leaves the tree before or after the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from aof2.engine import packrows
from aof2.engine.catalog import ops as o
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import BlobRow, ChunkRow, ObjectRow, ObjectState
from aof2.engine.inbox.check import CheckedBlob
from aof2.engine.manifest import payloads as p
from aof2.engine.objects import CHECKPOINT

GENERATION = 1


def begin_job(b: Batch) -> int:
    """The number of the checkpoint that the job is."""
    checkpoint_id = b.next_id("checkpoint_id")
    b.apply(o.SetWatermark(CHECKPOINT, checkpoint_id))
    return checkpoint_id


def make_object(
    b: Batch,
    ino: int,
    sha256: bytes,
    chunks: Sequence[CheckedBlob],
    *,
    chunk_bytes: int,
    checkpoint_id: int,
    chunk_ids: Sequence[int] = (),
    base_offset: int = 0,
    sealed: p.SealSegment | None = None,
) -> ObjectRow:
    """Published from the start, and cold. `chunk_ids`: where numbers were given out before; `sealed`, `base_offset`:
    what the log says of a one-chunk object that was sealed in another form."""
    ids: list[int] = []
    for index, one in enumerate(chunks):
        chunk_id = chunk_ids[index] if chunk_ids else b.next_id("chunk_id")
        ids.append(chunk_id)
        place, sums = (chunk_id, ino, GENERATION, index), (one.length, one.sha256, one.crc64, one.block_crcs)
        chunk = ChunkRow(*place, *sums, compression=one.compression)
        said = sealed or p.SealSegment(one.length, one.crc64, ino, b.ordinal, 0)
        _add_chunk(b, chunk, one, index * chunk_bytes + base_offset, said)
    row = ObjectRow(
        ino,
        GENERATION,
        ObjectState.PUBLISHED,
        size=sum(one.length for one in chunks),
        chunk_bytes=chunk_bytes,
        chunks=tuple(ids),
        sha256=sha256,
        checkpoint_id=checkpoint_id,
        created_ms=b.now_ms,
        sealed_ms=b.now_ms,
        published_ms=b.now_ms,
    )
    b.put(t.OBJECTS, (ino, GENERATION), row)
    return row


def _add_chunk(b: Batch, chunk: ChunkRow, one: CheckedBlob, base_offset: int, sealed: p.SealSegment) -> None:
    blob = _refer(b, one)
    b.apply(
        o.UpsertChunk(msgspec.structs.replace(chunk, key=blob.key, offset=blob.offset, stored_bytes=blob.stored_bytes))
    )
    said: list[p.Payload] = [
        p.SegmentOpened(base_offset, GENERATION),
        sealed,
        p.UploadStarted(one.key),
        p.UploadDone(one.key, one.etag),
    ]
    if blob.key != one.key:
        said.append(p.UploadDone(blob.key, blob.etag))  # where its content really is
    for record in (*said, p.LocalEvicted(chunk.length)):
        b.record(record, segment_id=chunk.chunk_id, logical_offset=chunk.length)


def _refer(b: Batch, one: CheckedBlob) -> BlobRow:
    """One more chunk with this content."""
    blob = b.get(t.BLOBS, one.sha256)
    if blob is None:
        blob = BlobRow(one.key, one.stored_bytes, one.length, 1, one.etag, offset=one.offset)
        if one.pack_bytes:
            packrows.join(b, one.key, one.stored_bytes, one.pack_bytes)
    else:
        blob = msgspec.structs.replace(blob, refs=blob.refs + 1, unreferenced_ms=0)
    b.put(t.BLOBS, one.sha256, blob)
    return blob


def drop_unnamed(b: Batch, blobs: Iterable[CheckedBlob], chunk_id: int) -> None:
    """Objects of the job in which nothing is that a row locates go. `chunk_id`: under which the log says so."""
    contents: dict[str, list[bytes]] = {}
    for one in blobs:
        contents.setdefault(one.key, []).append(one.sha256)
    for key, hashes in contents.items():
        rows = (b.get(t.BLOBS, sha256) for sha256 in hashes)
        if not any(row is not None and row.key == key for row in rows):
            b.record(p.Tier2DeleteQueued(key), segment_id=chunk_id)
