"""The life of a segment in the log beside its rows: opened, compressed, dropped, retired. Each is part of a batch.

A chunk's id is its segment id. The first one of an object is given when the object is opened for writing, so that the
log says when tier 0 began to hold it; the seal uses that id. Where no chunk comes of it (an empty file, one that was
removed, a writer that changed nothing) the segment is retired. A retired segment leaves the fold and the snapshots.

Invariants
- After each batch, the tiers that the fold says hold a chunk are those of its rows: `tiers_of` says which. verify
  compares the two.
- A compression that was admitted ends in Done or Failed, but for a crash in between: then the next one of that chunk
  starts anew.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import entry_of
from aof2.engine.catalog.rows import ChunkRow, DirtyRow, ResidencyRow
from aof2.engine.catalog.store import View
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.manifest.index import Residency
from aof2.engine.manifest.tier_events import segment_retired, warm_dropped

WARM_BYTES: Final = "warm_bytes"
U32_MASK: Final = 0xFFFF_FFFF


def tiers_of(chunk: ChunkRow, here: ResidencyRow | None) -> int:
    """The tiers that hold some of a chunk, as its rows have it."""
    tiers = 0
    if here is not None and here.mask:
        tiers |= Residency.TIER0
    if here is not None and here.warm_bytes:
        tiers |= Residency.TIER1
    if chunk.key:
        tiers |= Residency.TIER2
    return tiers


def needs_repair(view: View, stream_id: int, chunk_ids: Iterable[int]) -> bool:
    """Whether the remote was found not to have one of them as it should (HydrationFailed 4), and no upload since."""
    found = (entry_of(view, stream_id, chunk_id) for chunk_id in chunk_ids)
    return any(entry is not None and entry.needs_repair for entry in found)


# -- opened, retired -----------------------------------------------------------------------------------------------


def opened(b: Batch, generation: int, *, base_offset: int = 0, segment_id: int = 0) -> int:
    """Tier 0 starts a segment: a new one, or one that turns out to begin elsewhere; its id."""
    segment_id = segment_id or b.next_id("chunk_id")
    b.record(p.SegmentOpened(base_offset, generation & U32_MASK), segment_id=segment_id, logical_offset=base_offset)
    return segment_id


def taken(b: Batch, dirty: DirtyRow | None, generation: int, base_offset: int) -> int:
    """The id of a chunk that is there now: the segment that was opened with the object, if no other chunk has it.

    The caller puts the dirty row back without it.
    """
    waiting = dirty.segment_id if dirty is not None else 0
    if waiting and not base_offset:
        return waiting
    return opened(b, generation, base_offset=base_offset, segment_id=waiting)


def retire(b: Batch, segment_id: int) -> None:
    """Nothing more will be said of it."""
    if segment_id:
        b.record(segment_retired(), segment_id=segment_id)


def unopened(b: Batch, ino: int) -> None:
    """The object is not written any more: a segment that was opened for it and got no chunk goes."""
    dirty = b.get(t.DIRTY, ino)
    if dirty is not None:
        retire(b, dirty.segment_id)


# -- warm ----------------------------------------------------------------------------------------------------------


def compression_started(b: Batch, chunk_id: int) -> int:
    """A chunk is being compressed for tier 1; the number of that job."""
    job_id = b.next_id("job_id") & U32_MASK
    b.record(p.CompressionStarted(job_id), segment_id=chunk_id)
    return job_id


def compression_failed(b: Batch, chunk_id: int, reason: ReasonCode) -> None:
    if b.get(t.CHUNKS, chunk_id) is not None:
        b.record(p.CompressionFailed(int(reason)), segment_id=chunk_id)


def warmed(b: Batch, chunk_id: int, stored_bytes: int) -> None:
    """A compressed copy of the chunk is on the local disk, whole and synced."""
    old = b.get(t.RESIDENCY, chunk_id) or ResidencyRow()
    b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(old, warm_bytes=stored_bytes))
    b.put(t.COUNTERS, WARM_BYTES, (b.get(t.COUNTERS, WARM_BYTES) or 0) + stored_bytes - old.warm_bytes)
    b.put(t.WARM, chunk_id, stored_bytes)
    b.record(p.CompressionDone(stored_bytes, 0), segment_id=chunk_id, logical_offset=stored_bytes)


def cooled(b: Batch, chunk_ids: Sequence[int]) -> None:
    """The compressed copies are given up; the remote has the bytes."""
    for chunk_id in chunk_ids:
        old = b.get(t.RESIDENCY, chunk_id)
        b.delete(t.WARM, chunk_id)
        if old is not None and old.warm_bytes:
            b.put(t.RESIDENCY, chunk_id, msgspec.structs.replace(old, warm_bytes=0))
            b.put(t.COUNTERS, WARM_BYTES, max(0, (b.get(t.COUNTERS, WARM_BYTES) or 0) - old.warm_bytes))
            b.record(warm_dropped(old.warm_bytes), segment_id=chunk_id, logical_offset=old.warm_bytes)


# -- mending -------------------------------------------------------------------------------------------------------


def refold(b: Batch, chunk_id: int, folded: int, resident_bytes: int) -> None:
    """Records that bring the fold to what the rows say, where older ones left it elsewhere (`folded`)."""
    chunk, here = b.get(t.CHUNKS, chunk_id), b.get(t.RESIDENCY, chunk_id)
    if chunk is None:
        return
    right = tiers_of(chunk, here)
    blob = b.get(t.BLOBS, chunk.sha256) if chunk.key else None
    wrong = right ^ folded
    if wrong & Residency.TIER2 and blob is not None:
        b.record(p.UploadDone(chunk.key, blob.etag), segment_id=chunk_id, logical_offset=chunk.length)
    if wrong & Residency.TIER1:
        warm_bytes = here.warm_bytes if here is not None else 0
        b.record(p.CompressionDone(warm_bytes, 0) if warm_bytes else warm_dropped(0), segment_id=chunk_id)
    if wrong & Residency.TIER0:
        here_now = right & Residency.TIER0
        payload: p.Payload = p.HydrationDone(resident_bytes) if here_now else p.LocalEvicted(0)
        b.record(payload, segment_id=chunk_id, logical_offset=resident_bytes)
