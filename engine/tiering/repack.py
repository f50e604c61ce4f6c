"""Packs in which little is needed any more are written anew: their live members, together, in a pack of their own.

    sparse packs → their members, oldest first → read and proven one by one → announced → put → the rows go over

Invariants
- A member is live while a chunk refers to its content, whatever keeps that chunk: a name, a tombstone in its window, a
  generation that retention keeps, a snapshot. What nothing refers to any more stays behind, and goes by garbage
  collection.
- A member is copied as it is, and only when it is proven by its footer, each block and the SHA-256 in its row.
- Rows name the new pack only when the remote has all of it, in one commit, and only those that say what they said when
  the member was read. The members' UploadStarted are in the log before a byte is put; where garbage collection gave
  that upload up meanwhile, the commit is refused.
- The old pack is not touched: its row counts who left, and when (`packrows`).

Owner: `find_…` and `read` on a worker thread, `announce` and `moved` on the catalog's. A crash leaves a pack that no
row names: an attempt with the same members finds it there, otherwise garbage collection clears it away by its pending
uploads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, islice
from typing import Final, NamedTuple

from aof2.engine import objects, packrows, segments
from aof2.engine.blob import pack
from aof2.engine.blob.reader import BlobReader
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import BlobRow, ChunkRow, PackRow
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.errors import CorruptError, TransientError, UnsupportedError
from aof2.engine.manifest import payloads as p
from aof2.engine.remote import keys
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.location import LocatedBlob
from aof2.engine.remote.store import RemoteStore
from aof2.engine.tiering.packs import BULK_OBJECTS_MAX, PACK_BYTES_MAX

SCAN_PAGE: Final = 4096
GAP_BYTES: Final = 64 << 10  # read along rather than asked for apart


class GivenUpError(TransientError):
    """Garbage collection gave the new pack up before its rows could name it. Put it under another name."""


class Moving(NamedTuple):
    """A live member of a sparse pack, and every chunk of its content."""

    sha256: bytes
    blob: BlobRow
    chunk_ids: tuple[int, ...]

    @property
    def upload_id(self) -> int:
        """The chunk under whose number its upload is logged."""
        return self.chunk_ids[0]


class Bad(NamedTuple):
    """A member that is not what its row says, and why."""

    moving: Moving
    error: Exception


class Written(NamedTuple):
    """A new pack, in memory: what goes into it, where there, and the bytes of all but its directory."""

    moving: list[Moving]
    members: list[pack.Member]
    body: bytearray
    bad: list[Bad]

    def key(self, tenant: str, checkpoint_id: int) -> str:
        hashed = pack.name_hash(tenant, self.members)
        return keys.pack_key(tenant, checkpoint_id, self.members[0].chunk_id, hashed)

    def whole(self, tenant: str) -> bytes:
        return bytes(self.body) + pack.encode_directory(self.members, pack.name_hash(tenant, self.members))


# -- which, on a worker thread ----------------------------------------------------------------------------------------


def is_sparse(row: PackRow, share: float) -> bool:
    """Whether less than that share of it is needed. A pack of its members alone never is."""
    return bool(row.members) and packrows.live_bytes(row) < share * row.pack_bytes


def find_sparse(catalog: Catalog, tenant_id: int, share: float) -> dict[str, PackRow]:
    """Packs to be written anew, what was made first before the others."""
    with catalog.view() as view:
        found = [(key, row) for key, row in view.scan(tenant_id, t.PACKS) if is_sparse(row, share)]
    return dict(sorted(found, key=lambda pair: packrows.first_chunk(pair[0])))


def find_moving(catalog: Catalog, tenant_id: int, packs: Collection[str]) -> list[Moving]:
    """The live members of these packs, pack by pack, in their order there. Goes through all blobs and chunks."""
    order = {key: at for at, key in enumerate(packs)}
    blobs = _paged(catalog, tenant_id, t.BLOBS)
    found = {sha256: blob for sha256, blob in blobs if blob.key in order and blob.refs}
    chunks: dict[bytes, list[int]] = {}
    for chunk_id, chunk in _paged(catalog, tenant_id, t.CHUNKS):
        if chunk.key and chunk.sha256 in found:
            chunks.setdefault(chunk.sha256, []).append(chunk_id)
    moving = [Moving(sha256, blob, tuple(chunks[sha256])) for sha256, blob in found.items() if sha256 in chunks]
    return sorted(moving, key=lambda one: (order[one.blob.key], one.blob.offset))


def _paged(catalog: Catalog, tenant_id: int, table: t.Table[t.K, t.R]) -> Iterator[tuple[t.K, t.R]]:
    """All rows, in short looks."""
    after: bytes | None = None
    while True:
        with catalog.view() as view:
            page = list(islice(view.scan(tenant_id, table, after=after), SCAN_PAGE))
        if not page:
            return
        yield from page
        after = table.pack_key(page[-1][0])


def split(moving: Sequence[Moving]) -> Iterator[list[Moving]]:
    """What goes into one pack each."""
    batch: list[Moving] = []
    size = pack.length_of(0, 0)
    for one in moving:
        length = one.blob.stored_bytes + pack.ENTRY.size
        if batch and (len(batch) == BULK_OBJECTS_MAX or size + length > PACK_BYTES_MAX):
            yield batch
            batch, size = [], pack.length_of(0, 0)
        batch.append(one)
        size += length
    if batch:
        yield batch


# -- reading, on a worker thread --------------------------------------------------------------------------------------


def read(remote: RemoteStore, batch: Sequence[Moving]) -> Written:
    """The members' blobs, each proven, one behind the other. Those that are not right are told apart."""
    out = Written([], [], bytearray(), [])
    for key, members in groupby(batch, key=lambda one: one.blob.key):
        for stretch in _stretches(list(members)):
            start = stretch[0].blob.offset
            try:
                data = memoryview(remote.get_range(key, start, stretch[-1].blob.location.end - start))
            except (CorruptError, RemoteMissingError):
                data = memoryview(b"")  # cut short, or gone: each by itself
            for one in stretch:
                at = one.blob.offset - start
                _add(out, remote, one, data[at : at + one.blob.stored_bytes])
    return out


def _stretches(members: Sequence[Moving]) -> Iterator[list[Moving]]:
    """Members that are read by one request."""
    run: list[Moving] = []
    for one in members:
        if run and not 0 <= one.blob.offset - run[-1].blob.location.end <= GAP_BYTES:
            yield run
            run = []
        run.append(one)
    yield run


def _add(out: Written, remote: RemoteStore, one: Moving, stored: memoryview) -> None:
    """Bytes can be damaged on the way: they are asked for once more before the member is called damaged."""
    try:
        try:
            member = _proven(one, stored, len(out.body))
        except CorruptError:
            stored = memoryview(LocatedBlob(remote, one.blob.location).read(0, one.blob.stored_bytes))
            member = _proven(one, stored, len(out.body))
    except (CorruptError, RemoteMissingError, UnsupportedError) as e:
        out.bad.append(Bad(one, e))
        return
    out.body.extend(stored)
    out.moving.append(one)
    out.members.append(member)


def _proven(one: Moving, stored: memoryview, at: int) -> pack.Member:
    blob = one.blob
    if len(stored) != blob.stored_bytes:
        raise CorruptError(f"{len(stored)} of {blob.stored_bytes} bytes of a member", path=blob.key, offset=blob.offset)
    held = BlobReader(
        lambda start, length: bytes(stored[start : start + length]), len(stored), sha256=one.sha256, path=blob.key
    )
    for _ in held.blocks():
        pass
    return pack.member_of(held.footer, at)


# -- rows, on the catalog thread --------------------------------------------------------------------------------------


def announce(b: Batch, moving: Sequence[Moving], key: str) -> None:
    objects.upload_started(b, [(one.upload_id, key) for one in moving])


def is_given_up(view: View, stream_id: int, moving: Sequence[Moving], key: str) -> bool:
    """Whether a delete of that key is queued, which could come after the put."""
    prefix = t.STREAM.pack(stream_id) + t.SEGMENT_PENDING_DELETE
    slots = (prefix + one.upload_id.to_bytes(8, "big") + key.encode() for one in moving)
    return any(view.raw("segments", slot) is not None for slot in slots)


def moved(b: Batch, written: Written, key: str, etag: str, pack_bytes: int) -> int:
    """The remote has the new pack: what its members were read for is there from now on; how many that is. Of one that
    changed its place, or got or lost a chunk meanwhile, the rows stay as they are."""
    if not all(objects.upload_pending(b.view, b.stream_id, one.upload_id, key) for one in written.moving):
        raise GivenUpError(f"{key} was given up before its rows named it")
    done = 0
    for one, member in zip(written.moving, written.members, strict=True):
        if not _is_still(b, one):
            _end_upload(b, one, key, etag)
            continue
        up = objects.Uploaded(
            one.upload_id, key, etag, member.stored_len, "", True, offset=member.offset, pack_bytes=pack_bytes
        )
        objects.blob_rebuilt(b, one.sha256, one.chunk_ids, up)
        done += 1
    if not done:
        b.record(p.Tier2DeleteQueued(key), segment_id=written.moving[0].upload_id)
    return done


def _is_still(b: Batch, one: Moving) -> bool:
    blob = b.get(t.BLOBS, one.sha256)
    if blob is None or blob.location != one.blob.location or blob.refs != len(one.chunk_ids):
        return False
    chunks = [b.get(t.CHUNKS, chunk_id) for chunk_id in one.chunk_ids]
    return all(chunk is not None and _is_of(chunk, one) for chunk in chunks)


def _is_of(chunk: ChunkRow, one: Moving) -> bool:
    return chunk.sha256 == one.sha256 and chunk.key == one.blob.key


def _end_upload(b: Batch, one: Moving, key: str, etag: str) -> None:
    """It is dead in the new pack from the start; its content is where it was, if anywhere."""
    b.record(p.UploadDone(key, etag), segment_id=one.upload_id)
    chunk = b.get(t.CHUNKS, one.upload_id)
    blob = b.get(t.BLOBS, one.sha256)
    if chunk is None:
        segments.retire(b, one.upload_id)
    elif blob is not None:
        b.record(p.UploadDone(blob.key, blob.etag), segment_id=one.upload_id, logical_offset=chunk.length)
