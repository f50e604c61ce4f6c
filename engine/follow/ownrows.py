"""What of a follower's rows is this machine's own, and how the writer's commits are replayed around it.

    residency, warm, pins       rows of their own; the writer's are passed over
    `backing` of an object      a field of the writer's row; this machine's stays in it
    counters of hot and warm    sums of the above

Everything else is as the writer's log says. So the rows are those of the writer, but for what is above.

Invariants
- A row of the writer's log never changes what is above, but for this: where a chunk or an object goes, so does what is
  said of its bytes here. What that was is told (`Changes`), for the files to be deleted.
- Rows of this machine's are put back over a snapshot only where the chunk there has the same content.

Owner: the catalog's writer thread, or the one that opens the volume. A crash leaves whole transactions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from aof2.engine import objects
from aof2.engine.catalog import snapshots
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch, Mutation
from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ResidencyRow, Row
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.catalog.writer import apply_mutations
from aof2.engine.manifest.snapshot import Snapshot

OWN_TABLES: Final = frozenset((table.number, table.tag) for table in (t.RESIDENCY, t.WARM, t.PINS))
OWN_COUNTERS: Final = frozenset(
    t.COUNTERS.key(name)
    for name in (objects.HOT_BYTES, objects.WARM_BYTES, "job_id")  # compressions have one, too
)
_OBJECTS: Final = (t.OBJECTS.number, t.OBJECTS.tag)
_CHUNKS: Final = (t.CHUNKS.number, t.CHUNKS.tag)
_DENTRIES: Final = (t.DENTRIES.number, t.DENTRIES.tag)
_INODES: Final = (t.INODES.number, t.INODES.tag)
_XATTRS: Final = (t.XATTRS.number, t.XATTRS.tag)


def is_own(number: int, key: bytes) -> bool:
    """Whether such a row is this machine's alone."""
    return (number, key[:1]) in OWN_TABLES or (number == t.COUNTERS.number and key in OWN_COUNTERS)


class Changes:
    """What replay did to one stream's rows, as far as other parts act on it."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.names: set[tuple[int, bytes]] = set()  # (directory, name)
        self.inos: set[int] = set()
        self.xattrs: set[tuple[int, bytes]] = set()
        self.gone: dict[tuple[int, int], int] = {}  # (inode, generation) that went → bytes of it that were here
        self.cooled: list[int] = []  # chunks whose warm blob is not needed any more
        self.jumped = False  # the rows are a snapshot's: anything may have changed

    def __bool__(self) -> bool:
        return bool(self.names or self.inos or self.xattrs or self.gone or self.cooled or self.jumped)


class OwnChunk(Row, frozen=True):
    """What of one chunk is on this disk."""

    chunk_id: int
    ino: int
    generation: int
    sha256: bytes
    mask: int
    warm_bytes: int
    backing: tuple[int, int, int] | None


class Own(Row, frozen=True):
    """All that is this machine's of one stream's rows."""

    chunks: list[OwnChunk]
    pins: dict[int, int]


class OwnRows:
    """Replays around them. `take` gives what the replays since the last time changed."""

    def __init__(self) -> None:
        self._changes: dict[int, Changes] = {}
        self._cleared: dict[int, Own] = {}  # of streams whose rows wait for a snapshot

    def take(self, stream_id: int) -> Changes:
        return self._changes.pop(stream_id, None) or Changes(stream_id)

    def _of(self, stream_id: int) -> Changes:
        return self._changes.setdefault(stream_id, Changes(stream_id))

    def apply(self, txn: Any, catalog: Catalog, stream_id: int, mutations: Iterable[Mutation]) -> None:
        """A commit of the writer's into the rows."""
        view, changes = catalog.view_of(txn), self._of(stream_id)
        kept: list[Mutation] = []
        freed = [0, 0]
        for number, key, value in mutations:
            if is_own(number, key):
                continue
            slot = (number, key[:1])
            if slot == _OBJECTS:
                value = self._object(view, changes, key, value)
            elif slot == _CHUNKS and value is None:
                kept += _without_chunk(view, changes, t.CHUNKS.unpack_key(key[1:]), freed)
            elif slot == _DENTRIES:
                changes.names.add(t.DENTRIES.unpack_key(key[1:]))
            elif slot == _INODES:
                changes.inos.add(t.INODES.unpack_key(key[1:]))
            elif slot == _XATTRS:
                changes.xattrs.add(t.XATTRS.unpack_key(key[1:]))
            kept.append((number, key, value))
        for counter, less in zip((objects.HOT_BYTES, objects.WARM_BYTES), freed, strict=True):
            if less:
                left = max(0, (view.get(stream_id, t.COUNTERS, counter) or 0) - less)
                kept.append((t.COUNTERS.number, t.COUNTERS.key(counter), t.encode(left)))
        apply_mutations(txn, catalog, stream_id, kept)

    def _object(self, view: View, changes: Changes, key: bytes, value: bytes | None) -> bytes | None:
        """The writer's row, with what its backing file is here."""
        ino, generation = t.OBJECTS.unpack_key(key[1:])
        changes.inos.add(ino)  # what is shown of the file may be another generation
        old = view.get(changes.stream_id, t.OBJECTS, (ino, generation))
        if value is None:
            if old is not None and old.backing is not None:
                changes.gone.setdefault((ino, generation), 0)
            return None
        row = t.OBJECTS.decode(value)
        backing = old.backing if old is not None else None
        return value if row.backing == backing else t.encode(msgspec.structs.replace(row, backing=backing))

    # -- snapshots ---------------------------------------------------------------------------------------------

    def jump(self, txn: Any, catalog: Catalog, stream_id: int, snapshot: Snapshot) -> None:
        """The stream's rows become those of a snapshot of the writer's; this machine's stay where they still hold."""
        self.clear(txn, catalog, stream_id)
        own = self._cleared.pop(stream_id)
        self.load(txn, catalog, stream_id, snapshot)
        lost = put_own(txn, catalog, stream_id, own)
        changes = self._of(stream_id)
        changes.jumped = True
        for chunk in lost:
            changes.gone[chunk.ino, chunk.generation] = 0  # counted anew, from the rows
            if chunk.warm_bytes:
                changes.cooled.append(chunk.chunk_id)

    def clear(self, txn: Any, catalog: Catalog, stream_id: int) -> None:
        """Remembers what is this machine's for the jump that follows."""
        own = dump_own(catalog.view_of(txn), stream_id)
        if own.chunks or own.pins or stream_id not in self._cleared:
            self._cleared[stream_id] = own
        snapshots.clear(txn, catalog, stream_id)

    def load(self, txn: Any, catalog: Catalog, stream_id: int, snapshot: Snapshot) -> None:
        """A snapshot of the writer's into empty rows, without what is the writer's machine's."""
        snapshots.load(txn, catalog, stream_id, snapshot, hooks=_HOOKS)


def _without_backing(_key: bytes, value: bytes) -> bytes:
    row = t.OBJECTS.decode(value)
    return value if row.backing is None else t.encode(msgspec.structs.replace(row, backing=None))


def _unless_own(key: bytes, value: bytes) -> bytes | None:
    return None if key in OWN_COUNTERS else value


_HOOKS: Final[snapshots.Hooks] = {
    **dict.fromkeys(OWN_TABLES, lambda _key, _value: None),
    _OBJECTS: _without_backing,
    (t.COUNTERS.number, t.COUNTERS.tag): _unless_own,
}


def _without_chunk(view: View, changes: Changes, chunk_id: int, freed: list[int]) -> Iterator[Mutation]:
    """The chunk's row goes; what was said of its bytes here goes with it."""
    here = view.get(changes.stream_id, t.RESIDENCY, chunk_id)
    chunk = view.get(changes.stream_id, t.CHUNKS, chunk_id)
    if here is None or chunk is None:
        return
    size = _disk_bytes(here.mask, chunk)
    freed[0] += size
    freed[1] += here.warm_bytes
    changes.gone[chunk.ino, chunk.generation] = changes.gone.get((chunk.ino, chunk.generation), 0) + size
    if here.warm_bytes:
        changes.cooled.append(chunk_id)
    yield t.RESIDENCY.number, t.RESIDENCY.key(chunk_id), None
    yield t.WARM.number, t.WARM.key(chunk_id), None


def _disk_bytes(mask: int, chunk: ChunkRow) -> int:
    return objects.chunk_disk_bytes(mask, chunk, objects.block_bytes_of(chunk)) if mask else 0


# -- all of it -----------------------------------------------------------------------------------------------------


def dump_own(view: View, stream_id: int) -> Own:
    """What is this machine's of the stream's rows."""
    chunks: list[OwnChunk] = []
    for chunk_id, here in view.scan(stream_id, t.RESIDENCY):
        chunk = view.get(stream_id, t.CHUNKS, chunk_id)
        if chunk is None:
            continue
        row = view.get(stream_id, t.OBJECTS, (chunk.ino, chunk.generation))
        backing = row.backing if row is not None else None
        chunks.append(
            OwnChunk(chunk_id, chunk.ino, chunk.generation, chunk.sha256, here.mask, here.warm_bytes, backing)
        )
    return Own(chunks, dict(view.scan(stream_id, t.PINS)))


def place_own(b: Batch, chunks: Iterable[OwnChunk], pins: dict[int, int]) -> list[OwnChunk]:
    """Puts them into rows that say nothing of this machine yet; those that mean nothing there any more."""
    lost: list[OwnChunk] = []
    for own in chunks:
        chunk = b.get(t.CHUNKS, own.chunk_id)
        row = b.get(t.OBJECTS, (own.ino, own.generation))
        if chunk is None or row is None or not _is_same(chunk, row, own):
            lost.append(own)
            continue
        b.put(t.RESIDENCY, own.chunk_id, ResidencyRow(own.mask, own.warm_bytes))
        if own.warm_bytes:
            b.put(t.WARM, own.chunk_id, own.warm_bytes)
        if row.backing != own.backing:
            b.put(t.OBJECTS, (own.ino, own.generation), msgspec.structs.replace(row, backing=own.backing))
        _count(b, objects.HOT_BYTES, _disk_bytes(own.mask, chunk))
        _count(b, objects.WARM_BYTES, own.warm_bytes)
    for ino, since_ms in pins.items():
        b.put(t.PINS, ino, since_ms)
    return lost


def _is_same(chunk: ChunkRow, row: ObjectRow, own: OwnChunk) -> bool:
    same = (chunk.sha256, chunk.ino, chunk.generation) == (own.sha256, own.ino, own.generation)
    return same and own.chunk_id in row.chunks


def _count(b: Batch, counter: str, more: int) -> None:
    if more:
        b.put(t.COUNTERS, counter, (b.get(t.COUNTERS, counter) or 0) + more)


def put_own(txn: Any, catalog: Catalog, stream_id: int, own: Own) -> list[OwnChunk]:
    """`place_own`, in a transaction of its own."""
    b = Batch(catalog.view_of(txn), stream_id, 0, 0)
    lost = place_own(b, own.chunks, own.pins)
    apply_mutations(txn, catalog, stream_id, b.finish(subscribed=False))
    return lost
