"""Whether the rows agree with each other: objects ↔ chunks ↔ blobs, names ↔ inodes, references, counters.

The rows are the log's; what does not add up here was logged so. Counters and reference counts follow from other rows
and can be put right; anything else is listed.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from aof2.engine import packrows
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import BlobRow, ChunkRow, ObjectRow, ObjectState, ResidencyRow
from aof2.engine.catalog.store import View
from aof2.engine.objects import HOT_BYTES, PENDING_BYTES, WARM_BYTES, chunk_disk_bytes, full_mask, on_disk
from aof2.engine.remote.keys import is_pack
from aof2.engine.verify.context import OneStream, name_of
from aof2.engine.verify.findings import Finding, Kind, SetCounter, SetPack, SetRefs, Severity
from aof2.engine.verify.index import Index
from aof2.engine.verify.names import check_names


def check_rows(s: OneStream, index: Index) -> Iterator[Finding]:
    """All of it for one tenant; fills the index of references on the way."""
    yield from check_objects(s)
    if s.ctx.scope is not None:
        return
    yield from check_names(s)
    yield from check_chunks(s)
    index.add_refs(s.stream_id, _references(s))
    yield from check_refcounts(s, index)
    yield from check_packs(s)
    yield from check_counters(s)


def check_objects(s: OneStream) -> Iterator[Finding]:
    """An object's chunks are there, in order, as long as the object; published ones are in the remote."""
    for row in s.objects():
        s.ctx.count(objects=1)
        for problem, chunk_id in _object_problems(s, row):
            message = f"{s.tenant}: object {name_of(row)}: {problem}"
            yield s.say(Kind.OBJECT, Severity.ERROR, message, object=name_of(row), chunk_id=chunk_id)


def _object_problems(s: OneStream, row: ObjectRow) -> Iterator[tuple[str, int | None]]:
    if row.state == ObjectState.DIRTY:
        return
    size = 0
    published = row.state in (ObjectState.PUBLISHED, ObjectState.TOMBSTONED)
    for index, chunk_id in enumerate(row.chunks):
        if not chunk_id:
            size += row.length_of(index)
            continue
        chunk = s.get(t.CHUNKS, chunk_id)
        if chunk is None:
            yield f"chunk {chunk_id} has no row", chunk_id
            return
        size += chunk.length
        if (chunk.ino, chunk.index) != (row.ino, index):
            yield f"chunk {chunk_id} is chunk {chunk.index} of inode {chunk.ino}", chunk_id
        if published and not chunk.key:
            yield f"published, but chunk {chunk_id} names no blob", chunk_id
        if chunk.key and s.get(t.BLOBS, chunk.sha256) is None:
            yield f"chunk {chunk_id} is under {chunk.key}, which has no row", chunk_id
    if size != row.size:
        yield f"{row.size} bytes, its chunks have {size}", None
    if row.state == ObjectState.SEALED and s.get(t.UNPUBLISHED, (row.ino, row.generation)) is None:
        yield "sealed, but not queued for upload", None


def check_chunks(s: OneStream) -> Iterator[Finding]:
    """Every chunk belongs to an object, every residency and warm row to a chunk that has those blocks."""

    def stray(message: str, chunk_id: int) -> Finding:
        return s.say(Kind.OBJECT, Severity.WARNING, f"{s.tenant}: {message}", chunk_id=chunk_id)

    for chunk_id, chunk in s.scan(t.CHUNKS):
        s.ctx.count(chunks=1)
        row = s.get(t.OBJECTS, (chunk.ino, chunk.generation))
        if row is None or chunk.index >= len(row.chunks) or row.chunks[chunk.index] != chunk_id:
            yield stray(f"chunk {chunk_id} belongs to no object", chunk_id)
    for chunk_id, here in s.scan(t.RESIDENCY):
        owner = s.get(t.CHUNKS, chunk_id)
        if owner is None and (here.mask or here.warm_bytes):
            yield stray(f"chunk {chunk_id} is said to be here, and has no row", chunk_id)
        elif owner is not None and here.mask & ~full_mask(owner.length, s.ctx.block_bytes):
            yield stray(f"chunk {chunk_id} is said to have blocks behind its end", chunk_id)
    for chunk_id, _ in s.scan(t.WARM):
        if s.get(t.CHUNKS, chunk_id) is None:
            yield stray(f"chunk {chunk_id} is said to be warm, and has no row", chunk_id)


def _references(s: OneStream) -> Iterator[tuple[bytes, int]]:
    for chunk_id, chunk in s.scan(t.CHUNKS):
        if chunk.key:
            here = s.get(t.RESIDENCY, chunk_id) or ResidencyRow()
            whole = here.mask == full_mask(chunk.length, s.ctx.block_bytes)
            yield chunk.sha256, chunk_id if whole else 0


def check_refcounts(s: OneStream, index: Index) -> Iterator[Finding]:
    """A blob has as many references as chunks name it, and they name it by its key."""
    for sha256, blob in s.scan(t.BLOBS):
        refs = index.refs(s.stream_id, sha256).refs
        if refs != blob.refs:
            fix = SetRefs(stream_id=s.stream_id, sha256=sha256.hex(), refs=refs)
            message = f"{s.tenant}: {blob.key} counts {blob.refs} reference(s), {refs} chunk(s) name it"
            yield s.say(Kind.REFCOUNT, Severity.WARNING, message, fix=fix, key=blob.key)
    for chunk_id, chunk in s.scan(t.CHUNKS):
        found = s.get(t.BLOBS, chunk.sha256) if chunk.key else None
        if found is not None and not _same_place(chunk, found):
            message = f"{s.tenant}: chunk {chunk_id} is {_place(chunk)}, its content's blob is {_place(found)}"
            yield s.say(Kind.OBJECT, Severity.ERROR, message, chunk_id=chunk_id, key=chunk.key)


def check_packs(s: OneStream) -> Iterator[Finding]:
    """A pack counts the blobs that lie in it."""
    rows, counts = dict(s.scan(t.PACKS)), packs_counted(s.view, s.stream_id)
    for key in sorted(rows.keys() | counts.keys()):
        row, (members, member_bytes) = rows.get(key), counts.get(key, (0, 0))
        if row is None or (row.members, row.member_bytes) != (members, member_bytes):
            message = f"{s.tenant}: {key} counts {row.members if row else 0} blob(s), {members} lie in it"
            fix = SetPack(stream_id=s.stream_id, key=key)
            yield s.say(Kind.REFCOUNT, Severity.WARNING, message, fix=fix, key=key)


def packs_counted(view: View, stream_id: int) -> dict[str, tuple[int, int]]:
    """By the key of a pack: how many blobs lie in it, and how long they are together."""
    counts: dict[str, tuple[int, int]] = {}
    for _, blob in view.scan(stream_id, t.BLOBS):
        if is_pack(blob.key):
            members, size = counts.get(blob.key, (0, 0))
            counts[blob.key] = (members + 1, size + blob.stored_bytes)
    return counts


def _same_place(chunk: ChunkRow, blob: BlobRow) -> bool:
    """Chunk rows from before they had a place of their own know only the key."""
    return chunk.location == blob.location if chunk.stored_bytes else chunk.key == blob.key


def _place(row: ChunkRow | BlobRow) -> str:
    return f"{row.stored_bytes} bytes at {row.offset} of {row.key}"


def check_counters(s: OneStream) -> Iterator[Finding]:
    """What quotas count is what the residency rows add up to; ids that were given out are behind their counter."""
    for counter, right in counted(s.view, s.stream_id, s.ctx.block_bytes).items():
        said = s.get(t.COUNTERS, counter) or 0
        if said != right:
            fix = SetCounter(stream_id=s.stream_id, counter=counter)
            message = f"{s.tenant}: counter {counter} says {said}, the rows add up to {right}"
            yield s.say(Kind.COUNTER, Severity.WARNING, message, fix=fix, key=counter)
    last = max((chunk_id for chunk_id, _ in s.scan(t.CHUNKS)), default=0)
    given = s.get(t.COUNTERS, "chunk_id") or 0
    if last > given:
        message = f"{s.tenant}: chunk {last} exists, the counter says {given} were given out"
        yield s.say(Kind.COUNTER, Severity.ERROR, message, key="chunk_id")


def counted(view: View, stream_id: int, block_bytes: int) -> dict[str, int]:
    """The accounting counters as the rows have them."""
    hot = warm = 0
    for chunk_id, here in view.scan(stream_id, t.RESIDENCY):
        chunk = view.get(stream_id, t.CHUNKS, chunk_id) if here.mask else None
        if chunk is not None:
            hot += chunk_disk_bytes(here.mask, chunk, block_bytes)
        warm += here.warm_bytes
    pending = sum(on_disk(size) for _, size in view.scan(stream_id, t.UNPUBLISHED))
    counts = {HOT_BYTES: hot, WARM_BYTES: warm, PENDING_BYTES: pending}
    return counts | packrows.added_up(view, stream_id) if packrows.is_counted(view, stream_id) else counts
