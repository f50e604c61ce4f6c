"""What a restored volume cannot find, and what becomes of it.

Bytes that were only on the lost machine are nowhere now. No file may look as if it had them: an object that is not on
the remote is dropped, with its chunks; its inode goes back to the newest published generation, or, when there is none,
goes too, with its names. Everything dropped is listed with its path. Before that, bytes are looked for: an upload that
was complete but not recorded any more, or equal content of another file, makes the object whole. A caller may have been
told that a file is durable whose log ends before the commit that publishes it: it is found by the key that the log of
its seal announced, and it counts only if its bytes prove to be those of the seal.

A published object whose blob is missing stays: its rows say what the bytes were, reads fail with NeedsRepair, and the
report lists it.

Invariants
- Only rows of objects that are not PUBLISHED or TOMBSTONED are dropped; nothing on the remote is touched.
- A blob that no row names is read before it is believed: a small one whole, of a large one what it says of itself.
- Each batch leaves the rows consistent: object, chunks, inode and names change together.

Owner: `restore`, on the thread that calls it. A crash leaves a folder that the next restore throws away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from aof2.engine import namespace, objects, segments
from aof2.engine.blob.pack import Member, read_directory
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import load_index, uploads_begun
from aof2.engine.catalog.rows import BlobRow, ChunkRow, InodeRow, ObjectRow, ObjectState
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.catalog.tables import Table
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.manifest.index import Residency
from aof2.engine.namespace.read import name_of
from aof2.engine.objects import Uploaded
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.keys import is_pack
from aof2.engine.remote.prover import HELD_BYTES, find, prove
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.audit import AUDIT_CHUNK, AUDIT_LOGSEQ

T = TypeVar("T")

BATCH_ROWS: Final = 500
_LOCAL: Final[tuple[Table[int, Any], ...]] = (t.RESIDENCY, t.WARM)


class Why(StrEnum):
    """Scripts see these names: they stay."""

    NEVER_SEALED = "never_sealed"  # was being written
    NEVER_UPLOADED = "never_uploaded"  # sealed, and not published
    BLOB_MISSING = "blob_missing"  # published, and its blob is not there
    WAL_MISSING = "wal_missing"  # a WAL segment that no checkpoint absorbed


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that could not be found. `outcome` says what was done about it."""

    tenant: str
    path: str
    why: Why
    outcome: str
    ino: int = 0
    generation: int = 0
    size: int = 0
    keys: list[str] = msgspec.field(default_factory=list)


class Findings(NamedTuple):
    lost: list[Lost]
    rescued: list[str]
    checked_blobs: int


class TenantSalvage:
    """One tenant's stream of a restored folder."""

    def __init__(
        self, catalog: Catalog, writer: CatalogWriter, store: RemoteStore, stream_id: int, tenant: str
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._store = store
        self._stream_id = stream_id
        self._tenant = tenant
        self._packs: dict[str, tuple[dict[bytes, Member], str]] = {}  # by key: members by content, etag

    def run(self) -> Findings:
        """Clears the residency, makes whole what can be, drops what is lost, checks what is published."""
        self._reset()
        blobs = {info.key: info.size for info in self._store.list(f"checkpoints/{self._tenant}/")}
        rescued: list[ObjectRow] = []
        losses: list[tuple[ObjectRow, Why]] = []
        for row in self._unpublished():
            uploads = self._find_uploads(row, blobs) if row.state == ObjectState.SEALED else None
            if uploads is None:
                why = Why.NEVER_SEALED if row.state == ObjectState.DIRTY else Why.NEVER_UPLOADED
                losses.append((row, why))
            else:
                self._publish(row, uploads)
                rescued.append(row)
        damaged, checked = self._check_published(blobs)
        damaged += self._lost_wals()
        lost = self._drop(losses) + damaged
        with self._catalog.view() as view:
            return Findings(lost, [self._path(view, row.ino) for row in rescued], checked)

    def _path(self, view: View, ino: int) -> str:
        """`tenant/dir/name`; an inode without a name is called by its number."""
        try:
            path = namespace.path_of(view, self._stream_id, ino).decode(errors="backslashreplace")
        except OSError:
            path = f"<inode {ino}>"
        return f"{self._tenant}/{path}"

    # -- residency ---------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Nothing is on this machine, said in the log: a rebuild of the rows must not bring the old machine back."""
        with self._catalog.view() as view:
            resident = [chunk_id for table in _LOCAL for chunk_id, _ in view.scan(self._stream_id, table)]
            entries = _resident_entries(view, self._stream_id)
            backed = [key for key, row in view.scan(self._stream_id, t.OBJECTS) if row.backing is not None]
        for part in _parts(sorted({*resident, *entries})):
            self._writer.call(self._stream_id, partial(_clear_chunks, chunk_ids=part))
        for keys in _parts(backed):
            self._writer.call(self._stream_id, partial(_clear_backing, keys=keys))
        self._writer.call(self._stream_id, _clear_counters, sync=True)

    # -- what was never published ------------------------------------------------------------------------------

    def _unpublished(self) -> list[ObjectRow]:
        with self._catalog.view() as view:
            rows = [row for _, row in view.scan(self._stream_id, t.OBJECTS)]
        return [row for row in rows if row.state in (ObjectState.DIRTY, ObjectState.SEALED)]

    def _find_uploads(self, row: ObjectRow, blobs: Mapping[str, int]) -> list[Uploaded] | None:
        """Where each chunk's content is on the remote after all; None when one of them is nowhere."""
        found: list[Uploaded] = []
        for chunk_id in row.data_chunks:
            with self._catalog.view() as view:
                chunk = view.get(self._stream_id, t.CHUNKS, chunk_id)
                blob = view.get(self._stream_id, t.BLOBS, chunk.sha256) if chunk else None
                begun = uploads_begun(view, self._stream_id, chunk_id)
            if chunk is None:
                return None
            if blob is not None and blob.refs > 0 and blob.location.fits(blobs.get(blob.key, -1)):
                found.append(objects.found(blob, chunk))
                continue
            pending = [key for key in begun if key in blobs]
            uploaded = next((up for key in pending if (up := self._verified(chunk, key, blobs[key]))), None)
            if uploaded is None:
                return None
            found.append(uploaded)
        return found

    def _verified(self, chunk: ChunkRow, key: str, size: int) -> Uploaded | None:
        """A blob that was put and not recorded, if it is this chunk's content."""
        if is_pack(key):
            return self._verified_member(chunk, key, size)
        try:
            head = self._store.head_blob(key)
            if size > HELD_BYTES:
                footer = find(self._store, key, size, chunk.sha256)
            else:
                footer = prove(self._store, BlobRow(key, size, chunk.length, 1), chunk.sha256, chunk)
        except (CorruptError, UnsupportedError, RemoteMissingError):
            return None
        compressed = any(frame.codec for frame in footer.frames)
        return Uploaded(chunk.chunk_id, key, head.etag if head else "", size, "zstd" if compressed else "", True)

    def _verified_member(self, chunk: ChunkRow, key: str, size: int) -> Uploaded | None:
        """The same of a member of a pack, which its directory gives the place of."""
        try:
            if key not in self._packs:
                members = read_directory(partial(self._store.get_range, key), size, tenant=self._tenant, path=key)
                head = self._store.head_blob(key)
                self._packs[key] = ({one.sha256: one for one in members}, head.etag if head else "")
            found, etag = self._packs[key]
            one = found.get(chunk.sha256)
            if one is None:
                return None
            blob = BlobRow(key, one.stored_len, chunk.length, 1, offset=one.offset)
            prove(self._store, blob, chunk.sha256, chunk)
        except (CorruptError, UnsupportedError, RemoteMissingError):
            return None
        compression = "zstd" if one.compressed else ""
        return Uploaded(
            chunk.chunk_id, key, etag, one.stored_len, compression, True, offset=one.offset, pack_bytes=size
        )

    def _publish(self, row: ObjectRow, uploads: Sequence[Uploaded]) -> None:
        def work(b: Batch) -> None:
            checkpoint_id = b.get(t.COUNTERS, "checkpoint_id") or 0
            objects.published(b, ino=row.ino, generation=row.generation, checkpoint_id=checkpoint_id, uploads=uploads)
            for chunk_id in row.data_chunks:  # in the remote now, and on this machine never
                b.record(p.LocalEvicted(0), segment_id=chunk_id)

        self._writer.call(self._stream_id, work, sync=True)

    # -- what is lost ------------------------------------------------------------------------------------------

    def _drop(self, losses: Sequence[tuple[ObjectRow, Why]]) -> list[Lost]:
        lost: list[Lost] = []
        for row, why in losses:
            with self._catalog.view() as view:
                path = self._path(view, row.ino)
            work = partial(_drop_object, ino=row.ino, generation=row.generation)
            size, outcome = self._writer.call(self._stream_id, work)
            lost.append(self._lost(row, path, why, outcome, size=row.size or size))
        self._writer.flush()
        return lost

    def _lost(
        self, row: ObjectRow, path: str, why: Why, outcome: str, *, size: int = 0, keys: Sequence[str] = ()
    ) -> Lost:
        return Lost(
            tenant=self._tenant,
            path=path,
            why=why,
            outcome=outcome,
            ino=row.ino,
            generation=row.generation,
            size=size,
            keys=list(keys),
        )

    # -- what is published -------------------------------------------------------------------------------------

    def _check_published(self, blobs: Mapping[str, int]) -> tuple[list[Lost], int]:
        """Each published chunk's blob is there, with its size. Those that are not are marked NeedsRepair."""
        damaged: list[Lost] = []
        missing: list[int] = []
        checked: set[str] = set()
        with self._catalog.view() as view:
            for _, row in view.scan(self._stream_id, t.OBJECTS):
                if row.state not in (ObjectState.PUBLISHED, ObjectState.TOMBSTONED):
                    continue
                bad: list[str] = []
                for chunk_id in row.data_chunks:
                    key = self._missing_blob(view, chunk_id, blobs, checked)
                    if key is not None:
                        bad.append(key)
                        missing.append(chunk_id)
                if bad:
                    outcome = "kept; reading it fails until it is repaired"
                    path = self._path(view, row.ino)
                    damaged.append(self._lost(row, path, Why.BLOB_MISSING, outcome, size=row.size, keys=bad))
        for part in _parts(missing):
            self._writer.call(self._stream_id, partial(_mark_missing, chunk_ids=part), sync=True)
        return damaged, len(checked)

    def _missing_blob(self, view: View, chunk_id: int, blobs: Mapping[str, int], checked: set[str]) -> str | None:
        chunk = view.get(self._stream_id, t.CHUNKS, chunk_id)
        if chunk is None or not chunk.key:
            return f"chunk {chunk_id}"
        checked.add(chunk.key)
        blob = view.get(self._stream_id, t.BLOBS, chunk.sha256)
        size = blobs.get(chunk.key)
        return chunk.key if size is None or (blob is not None and not blob.location.fits(size)) else None

    def _lost_wals(self) -> list[Lost]:
        with self._catalog.view() as view:
            wals = [(ino, wal) for (ino, _), wal in view.scan(self._stream_id, t.WALS) if not wal.covered_by]
            paths = {ino: self._path(view, ino) for ino, _ in wals}
        return [
            Lost(
                tenant=self._tenant,
                path=paths[ino],
                why=Why.WAL_MISSING,
                outcome=f"segment {wal.segment_id} ({wal.path}) is listed only",
                ino=ino,
                size=wal.end_offset - wal.first_offset,
            )
            for ino, wal in wals
        ]


# -- batches -----------------------------------------------------------------------------------------------------


def _clear_chunks(b: Batch, *, chunk_ids: Sequence[int]) -> None:
    for chunk_id in chunk_ids:
        chunk = b.get(t.CHUNKS, chunk_id)
        segments.cooled(b, [chunk_id])
        b.delete(t.RESIDENCY, chunk_id)
        b.delete(t.WARM, chunk_id)
        if chunk is not None and chunk.key:  # an eviction always follows an upload: the others are lost, not evicted
            b.record(p.LocalEvicted(0), segment_id=chunk_id, logical_offset=chunk.length)


def _clear_backing(b: Batch, *, keys: Sequence[tuple[int, int]]) -> None:
    for key in keys:
        row = b.get(t.OBJECTS, key)
        if row is not None:
            b.put(t.OBJECTS, key, msgspec.structs.replace(row, backing=None))


def _clear_counters(b: Batch) -> None:
    """No local bytes; and the audit log is as long as what was uploaded of it, so it is compared anew."""
    for counter in (objects.HOT_BYTES, segments.WARM_BYTES):
        b.put(t.COUNTERS, counter, 0)
    for counter in (AUDIT_LOGSEQ, AUDIT_CHUNK):
        b.delete(t.COUNTERS, counter)


def _drop_object(b: Batch, *, ino: int, generation: int) -> tuple[int, str]:
    """Drops a generation whose bytes are nowhere; the inode's size before, and what became of the file."""
    row = b.get(t.OBJECTS, (ino, generation))
    for chunk_id in row.data_chunks if row else ():
        objects.release_chunk(b, chunk_id)
    b.delete(t.OBJECTS, (ino, generation))
    objects.unqueue_upload(b, ino, generation)
    if row is not None and row.state == ObjectState.DIRTY:
        segments.unopened(b, ino)
        b.delete(t.DIRTY, ino)
    inode = b.get(t.INODES, ino)
    if inode is None or inode.generation != generation:
        return 0, "dropped"
    older = _newest_published(b, inode)
    if older is not None:
        b.put(
            t.INODES,
            ino,
            msgspec.structs.replace(inode, generation=older.generation, size=older.size, hole_bytes=older.hole_bytes),
        )
        return inode.size, f"taken back to generation {older.generation}"
    for name in _names(b, inode):
        b.delete(t.DENTRIES, name)
    namespace.erase(b, ino)
    return inode.size, "dropped"


def _names(b: Batch, inode: InodeRow) -> list[tuple[int, bytes]]:
    """(parent, name) of every link."""
    if inode.nlink > 1:
        return [(parent, name) for (_, parent, name), _ in b.scan(t.LINKS, prefix=inode.ino.to_bytes(8, "big"))]
    try:
        return [(inode.parent, name_of(b.view, b.stream_id, inode))] if inode.nlink else []
    except OSError:
        return []  # it was open, and has no name


def _newest_published(b: Batch, inode: InodeRow) -> ObjectRow | None:
    rows = [row for _, row in b.scan(t.OBJECTS, prefix=inode.ino.to_bytes(8, "big"))]
    published = [row for row in rows if row.state == ObjectState.PUBLISHED and row.generation < inode.generation]
    return max(published, key=lambda row: row.generation, default=None)


def _mark_missing(b: Batch, *, chunk_ids: Sequence[int]) -> None:
    for chunk_id in chunk_ids:
        b.record(p.HydrationFailed(ReasonCode.OBJECT_MISSING), segment_id=chunk_id)


def _resident_entries(view: View, stream_id: int) -> list[int]:
    """Segments that the folded records believe to be on the local disk."""
    entries = load_index(view, stream_id).entries
    return [segment_id for segment_id, entry in entries.items() if entry.residency & Residency.TIER0]


def _parts(items: Iterable[T]) -> Iterable[list[T]]:
    rows = list(items)
    return (rows[i : i + BATCH_ROWS] for i in range(0, len(rows), BATCH_ROWS))
