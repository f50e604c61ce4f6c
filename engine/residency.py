"""Which blocks of a chunk are here, as changes to the catalog: they came in, were evicted, or failed their checksum.

Each function is one atomic batch on its tenant's stream, rows and manifest records together, and keeps the counter
`hot_bytes` (`objects.account`).

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ChunkRow, ObjectState, ResidencyRow
from aof2.engine.errors import Aof2Error
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import ReasonCode

REMOTE_TIER: Final = 2


class NotDurableError(Aof2Error):
    """The bytes exist only here. Upload them first; they are never evicted before."""


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
    row = objects.get_object(b, ino, generation)
    for chunk_id, added in masks.items():
        chunk = b.get(t.CHUNKS, chunk_id)
        if chunk is None:
            continue  # purged meanwhile: nothing to account
        old = b.get(t.RESIDENCY, chunk_id) or ResidencyRow()
        mask = old.mask | added | chunk.holes
        b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(old, mask=mask))
        before, now = (objects.chunk_disk_bytes(m, chunk, block_bytes) for m in (old.mask, mask))
        objects.account(b, now - before)
        if mask:
            objects.hydrated(b, chunk_id, objects.mask_bytes(mask, chunk.length, block_bytes))
    if backing is not None:
        b.put(t.OBJECTS, (ino, generation), msgspec.structs.replace(row, backing=backing))


def landed(b: Batch, members: Sequence[tuple[ChunkRow, tuple[int, int, int]]], *, block_bytes: int) -> set[int]:
    """Chunks that are all of an object each came in whole, with their backing files' identities; the ids of those whose
    object is still what was fetched. Their bytes are synced."""
    b.read_ahead(t.OBJECTS, [(chunk.ino, chunk.generation) for chunk, _ in members])
    b.read_ahead(t.RESIDENCY, [chunk.chunk_id for chunk, _ in members])
    kept: list[int] = []
    lengths: list[int] = []
    more_bytes = 0
    for chunk, backing in members:
        row = b.get(t.OBJECTS, (chunk.ino, chunk.generation))
        old = b.get(t.RESIDENCY, chunk.chunk_id) or ResidencyRow()
        if row is None or row.state != ObjectState.PUBLISHED or row.chunks != (chunk.chunk_id,) or old.mask:
            continue
        mask = objects.full_mask(chunk.length, block_bytes)
        b.put(t.RESIDENCY, chunk.chunk_id, ResidencyRow(mask, old.warm_bytes))
        b.put(t.OBJECTS, (chunk.ino, chunk.generation), msgspec.structs.replace(row, backing=backing))
        more_bytes += objects.chunk_disk_bytes(mask, chunk, block_bytes)
        kept.append(chunk.chunk_id)
        lengths.append(chunk.length)
    if kept:
        objects.account(b, more_bytes)
        b.record_of_each(p.HydrationStarted(REMOTE_TIER), kept)
        b.records.add_columns(p.HydrationDone, kept, lengths, logical_offsets=lengths, timestamp_ms=b.now_ms)
    return set(kept)


def hydration_started(b: Batch, chunk_id: int, tier: int) -> None:
    if b.get(t.CHUNKS, chunk_id) is not None:  # not purged meanwhile
        b.record(p.HydrationStarted(tier), segment_id=chunk_id)


def hydration_failed(b: Batch, chunk_id: int, reason_code: int) -> None:
    if b.get(t.CHUNKS, chunk_id) is not None:
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
        size = objects.mask_bytes(old.mask, chunk.length, block_bytes)
        freed += objects.chunk_disk_bytes(old.mask, chunk, block_bytes)
        b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(old, mask=0))
        b.record(p.LocalEvicted(size), segment_id=chunk_id, logical_offset=chunk.length)
    objects.account(b, -freed)
    return freed


def lost(b: Batch, chunk_id: int, bad: int, *, block_bytes: int) -> int:
    """Local blocks failed their checksum: they are not here any more; how many bytes that were."""
    chunk, old = b.get(t.CHUNKS, chunk_id), b.get(t.RESIDENCY, chunk_id)
    if chunk is None or old is None:
        return 0
    mask = old.mask & ~bad | old.mask & chunk.holes
    mask = mask if mask & ~chunk.holes else 0
    gone = objects.chunk_disk_bytes(old.mask, chunk, block_bytes) - objects.chunk_disk_bytes(mask, chunk, block_bytes)
    b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(old, mask=mask))
    objects.account(b, -gone)
    if mask != old.mask:
        kept_bytes = objects.mask_bytes(mask, chunk.length, block_bytes)
        lost_bytes = objects.mask_bytes(old.mask, chunk.length, block_bytes) - kept_bytes
        if chunk.key:
            b.record(p.LocalEvicted(lost_bytes), segment_id=chunk_id, logical_offset=chunk.length)
        else:
            b.record(p.HydrationFailed(int(ReasonCode.OBJECT_MISSING)), segment_id=chunk_id)  # they were only here
        if kept_bytes:
            objects.hydrated(b, chunk_id, kept_bytes)
    return gone
