"""Small sealed objects go to the remote together: chosen, read, checked, put as one pack, published in one commit.

Objects of at most one chunk below MEMBER_BYTES_MAX are a bulk, in the order of their plan, so that what was made
together stays together: up to PACK_BYTES_MAX of new content is one pack (`blob/pack.py`). Content that the remote has
is not packed again, and an empty object has none; both are published with the bulk.

Invariants
- What a bulk is follows from the rows alone: an attempt that finds the same objects makes the same pack under the same
  key. The members' UploadStarted are in the log before a byte is put.
- A member is what was sealed, by crc64 and SHA-256, or it is left out; then the pack has another name, and is announced
  under that one.
- Its rows name a pack only after the remote has all of it: one durable commit for all its members. Of an object that
  was removed or opened to be written to meanwhile, the commit says nothing.
- A pack is in memory while a worker thread has it, and only then.

Owner: the trio thread drives, a worker thread reads, packs and puts. A crash leaves a pack that no row names: an
attempt with the same members finds it there, otherwise garbage collection clears it away by its pending uploads.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple

import trio

from aof2 import native
from aof2.engine import objects
from aof2.engine.aio import result_of
from aof2.engine.blob import pack
from aof2.engine.blob.writer import LEVEL, SAVED_SHIFT, BlobWriter, compress_all
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import BlobRow, ChunkRow, ObjectRow, ObjectState
from aof2.engine.errors import CorruptError, TransientError
from aof2.engine.local.hot import read_exactly
from aof2.engine.objects import ToPublish, Uploaded
from aof2.engine.remote import keys
from aof2.engine.remote.source import Buffer, ChunksSource
from aof2.engine.tiering.hashing import add_zeros, block_crc
from aof2.engine.tiering.publish import Along, Publisher
from aof2.engine.tiering.tally import Tally
from aof2.native import small
from aof2.native.small import SmallStatus

MEMBER_BYTES_MAX: Final = 1 << 20
PACK_BYTES_MAX: Final = (16 << 20) - (64 << 10)  # what S3 takes in one piece
MEMBER_EXTRA_BYTES: Final = 224  # a small blob's footer and its entry
BULK_OBJECTS_MAX: Final = 4096
MEMBERS_MIN: Final = 4
"""Fewer new blobs go one by one: in parallel they are there as soon, and each can be deleted alone."""
CRASH_POINTS: Final = ("packs.announced", "packs.packed", "packs.put", "packs.recorded")


class Item(NamedTuple):
    """An object of a bulk. Without a chunk it is empty, or all a hole; `blob`: where its content is already."""

    row: ObjectRow
    chunk: ChunkRow | None = None
    blob: BlobRow | None = None


class Bulk(NamedTuple):
    """Objects that are published together. `members` are those of them whose content the pack brings."""

    items: list[Item]
    members: list[ChunkRow]


GetChunk = Callable[[int], ChunkRow | None]
GetBlob = Callable[[bytes], BlobRow | None]


def choose(rows: Sequence[ObjectRow], chunk_of: GetChunk, blob_of: GetBlob) -> tuple[list[Bulk], list[ObjectRow]]:
    """The bulks that these sealed objects make, and what is left to be published one by one."""
    bulks: list[Bulk] = []
    rest: list[ObjectRow] = []
    items: list[Item] = []
    members: list[ChunkRow] = []
    inside: set[bytes] = set()
    size = 0
    for row in rows:
        item = _item(row, chunk_of, blob_of)
        if item is None:
            rest.append(row)
            continue
        new = item.chunk is not None and item.blob is None and item.chunk.sha256 not in inside
        length = item.chunk.length + MEMBER_EXTRA_BYTES if item.chunk is not None and new else 0
        if items and (len(items) == BULK_OBJECTS_MAX or size + length > PACK_BYTES_MAX):
            bulks.append(Bulk(items, members))
            items, members, inside, size = [], [], set(), 0
        items.append(item)
        if item.chunk is not None and item.blob is None and item.chunk.sha256 not in inside:
            members.append(item.chunk)
            inside.add(item.chunk.sha256)
            size += item.chunk.length + MEMBER_EXTRA_BYTES
    if items:
        bulks.append(Bulk(items, members))
    if sum(len(bulk.members) for bulk in bulks) < MEMBERS_MIN:
        return [], list(rows)
    return bulks, rest


def _item(row: ObjectRow, chunk_of: GetChunk, blob_of: GetBlob) -> Item | None:
    if len(row.chunks) > 1 or row.size >= MEMBER_BYTES_MAX:
        return None
    if not row.data_chunks:
        return Item(row)
    chunk = chunk_of(row.chunks[0])
    if chunk is None or chunk.key or chunk.sha256 != row.sha256:
        return None
    return Item(row, chunk, blob_of(chunk.sha256))


def key_of(tenant: str, checkpoint_id: int, members: Sequence[ChunkRow]) -> str:
    return keys.pack_key(tenant, checkpoint_id, members[0].chunk_id, pack.name_hash(tenant, members))


def announce(b: Batch, tenant: str, checkpoint_id: int, bulks: Iterable[Bulk]) -> set[str]:
    """UploadStarted of every member; the keys of the packs."""
    announced: set[str] = set()
    for bulk in bulks:
        if bulk.members:
            key = key_of(tenant, checkpoint_id, bulk.members)
            objects.pack_started(b, key, [chunk.chunk_id for chunk in bulk.members])
            announced.add(key)
    return announced


class _Put(NamedTuple):
    """What a worker thread did: put a pack, or found chunks that are not what was sealed, and why."""

    uploads: dict[bytes, Uploaded]  # by content
    changed: dict[int, CorruptError]


class _Staged(NamedTuple):
    """Blobs one behind the other, their entries in the directory, and what is not what was sealed."""

    blobs: list[bytearray]
    entries: bytearray
    changed: dict[int, CorruptError]


class Packer:
    """Publishes bulks of one volume."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._block_bytes = publisher.block_bytes

    async def publish(
        self,
        stream_id: int,
        tenant: str,
        bulk: Bulk,
        checkpoint_id: int,
        compression: str,
        tally: Tally,
        *,
        announced: frozenset[str] = frozenset(),
        along: Along | None = None,
    ) -> tuple[list[tuple[int, int]], dict[tuple[int, int], CorruptError]]:
        """The objects that were published, and those that are not what was sealed. What is in neither was removed or
        opened to be written to, or is to be published alone."""
        env, writer = self._publisher.hot.env, self._publisher.writer
        bulk = self._still(stream_id, bulk)
        changed: dict[int, CorruptError] = {}
        ups: dict[bytes, Uploaded] = {}
        if bulk.members:
            put = await self._upload(stream_id, tenant, bulk.members, checkpoint_id, compression, tally, announced)
            changed, ups = put.changed, put.uploads
        todo = [one for item in bulk.items if (one := _to_publish(item, ups, changed)) is not None]
        tally.blobs_done([one.chunk_id for one in todo if one.chunk_id])
        besides = along() if along is not None else None

        def work(b: Batch) -> list[tuple[int, int]]:
            done = objects.published_in_bulk(b, todo, checkpoint_id, purge_after_ms=self._publisher.purge_after_ms)
            if besides is not None:
                besides(b)
            return done

        with tally.at("publish"):
            done = await result_of(writer.submit(stream_id, work, sync=True))
        env.failpoint("packs.recorded")
        bad = {
            (item.row.ino, item.row.generation): changed[item.chunk.chunk_id]
            for item in bulk.items
            if item.chunk is not None and item.chunk.chunk_id in changed
        }
        return done, bad

    def _still(self, stream_id: int, bulk: Bulk) -> Bulk:
        """Without what went, or is written again, since it was chosen; in one look."""
        with self._publisher.catalog.view() as view:
            rows = view.get_many(stream_id, t.OBJECTS, [(item.row.ino, item.row.generation) for item in bulk.items])
        items = [
            item
            for item, now in zip(bulk.items, rows, strict=True)
            if now is not None and now.state == ObjectState.SEALED and now.chunks == item.row.chunks
        ]
        if len(items) == len(bulk.items):
            return bulk
        here = {item.chunk.sha256: item.chunk for item in reversed(items) if item.chunk is not None}
        wanted = {chunk.sha256 for chunk in bulk.members}
        return Bulk(items, sorted((c for sha, c in here.items() if sha in wanted), key=lambda c: c.chunk_id))

    async def _announce(self, stream_id: int, key: str, members: Sequence[ChunkRow]) -> None:
        started = partial(objects.pack_started, key=key, chunk_ids=[chunk.chunk_id for chunk in members])
        await result_of(self._publisher.writer.submit(stream_id, started))
        self._publisher.hot.env.failpoint("packs.announced")

    async def _upload(
        self,
        stream_id: int,
        tenant: str,
        members: Sequence[ChunkRow],
        checkpoint_id: int,
        compression: str,
        tally: Tally,
        announced: frozenset[str],
    ) -> _Put:
        """One pack. What changed under way is left out, and the rest is packed again under its own name."""
        changed: dict[int, CorruptError] = {}
        while members:
            key = key_of(tenant, checkpoint_id, members)
            if key not in announced:
                await self._announce(stream_id, key, members)
            work = partial(self._pack, tenant, key, members, compression, tally)
            try:
                put = await trio.to_thread.run_sync(work, limiter=self._publisher.limiter)
            except TransientError as e:
                await result_of(self._publisher.writer.submit(stream_id, partial(_failed, members, key, e.reason_code)))
                raise
            if not put.changed:
                self._publisher.uploaded_bytes += next(iter(put.uploads.values())).pack_bytes
                return put._replace(changed=changed)
            changed |= put.changed
            members = [chunk for chunk in members if chunk.chunk_id not in changed]
        return _Put({}, changed)

    # -- on a worker thread ------------------------------------------------------------------------------------

    def _pack(self, tenant: str, key: str, chunks: Sequence[ChunkRow], compression: str, tally: Tally) -> _Put:
        """Reads, packs and puts; nothing is put where a chunk is not what was sealed."""
        env = self._publisher.hot.env
        began_s = env.monotonic_s()
        with tally.at("stage"):
            staged = self._stage(tenant, chunks, compression)
            if staged.changed:
                return _Put({}, staged.changed)
            length = sum(map(len, staged.blobs))
            directory = pack.directory_of(staged.entries, length, pack.name_hash(tenant, chunks))
            parts: list[Buffer] = [*staged.blobs, directory]  # of which no copy is made
            length += len(directory)
            crc = 0
            for part in parts:
                crc = native.crc64(part, crc)
            members = list(pack.entries_of(staged.entries))
            del staged
        chunk_ids = [one.chunk_id for one in members]
        staged_s = env.monotonic_s()
        tally.staged_all(chunk_ids, 0, staged_s - began_s)
        env.failpoint("packs.packed")
        with tally.at("upload"):
            etag = self._publisher.remote.put_blob(key, ChunksSource(lambda: parts), length, crc64=crc)
        tally.uploaded_all(chunk_ids, length, env.monotonic_s() - staged_s)
        env.failpoint("packs.put")
        return _Put({one.sha256: _uploaded(one, key, etag, length) for one in members}, {})

    def _stage(self, tenant: str, chunks: Sequence[ChunkRow], compression: str) -> _Staged:
        """Reads the chunks, in order, compares them with their seals and makes blobs of them: neighbours that are one
        block each in few calls, the others one by one."""
        staged = _Staged([], bytearray(), {})
        at = 0
        for is_plain, some in groupby(chunks, self._is_one_block):
            if is_plain:
                at += self._stage_blocks(tenant, list(some), compression, staged, at)
                continue
            for chunk in some:
                out = bytearray()
                try:
                    member = self._member(tenant, chunk, compression, out)
                except CorruptError as e:
                    staged.changed[chunk.chunk_id] = e
                except FileNotFoundError as e:
                    staged.changed[chunk.chunk_id] = CorruptError(str(e))
                else:
                    staged.blobs.append(out)
                    staged.entries.extend(pack.encode_entry(member._replace(offset=at)))
                    at += len(out)
        return staged

    def _is_one_block(self, chunk: ChunkRow) -> bool:
        return 0 < chunk.length <= self._block_bytes and not chunk.holes

    def _stage_blocks(self, tenant: str, chunks: Sequence[ChunkRow], compression: str, staged: _Staged, at: int) -> int:
        """Chunks of one block each; how many bytes their blobs take."""
        paths = [self._publisher.hot.path_text(tenant, chunk.ino, chunk.generation) for chunk in chunks]
        lengths = [chunk.length for chunk in chunks]
        crcs = [block_crc(chunk.block_crcs, 0) for chunk in chunks]
        sha256s = b"".join([chunk.sha256 for chunk in chunks])
        raw, statuses = small.read_small(paths, lengths, crcs, sha256s)
        for chunk, path, status in zip(chunks, paths, statuses, strict=True) if any(statuses) else ():
            if status == SmallStatus.CHANGED:
                staged.changed[chunk.chunk_id] = CorruptError(
                    f"chunk {chunk.chunk_id} is not what was sealed, or its file is cut", path=path
                )
            elif status == -errno.ENOENT:
                staged.changed[chunk.chunk_id] = CorruptError("backing file is missing", path=path)
            elif status:
                raise OSError(-status, os.strerror(-status), path)
        if staged.changed:
            return 0  # none of it goes into a pack
        packed, packed_lengths = compress_all(raw, lengths) if compression == "zstd" else (b"", [])
        blobs, entries = small.encode_pack(
            raw,
            lengths,
            chunk_ids=[chunk.chunk_id for chunk in chunks],
            generations=[chunk.generation for chunk in chunks],
            crc64s=crcs,
            sha256s=sha256s,
            block_bytes=self._block_bytes,
            base=at,
            packed=packed,
            packed_lengths=packed_lengths,
            saved_shift=SAVED_SHIFT,
        )
        staged.blobs.append(blobs)
        staged.entries.extend(entries)
        return len(blobs)

    def _member(self, tenant: str, chunk: ChunkRow, compression: str, out: bytearray) -> pack.Member:
        """The chunk's blob into `out`; CorruptError where its bytes are not those of the seal."""
        path = self._publisher.hot.path_text(tenant, chunk.ino, chunk.generation)
        writer = BlobWriter(
            out.extend,
            chunk_id=chunk.chunk_id,
            generation=chunk.generation,
            block_bytes=self._block_bytes,
            sha256=chunk.sha256,
            level=LEVEL if compression == "zstd" else 0,
        )
        sha = hashlib.sha256()
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for index, start in enumerate(range(0, chunk.length, self._block_bytes)):
                length = min(self._block_bytes, chunk.length - start)
                if chunk.holes >> index & 1:
                    writer.add_hole(length)
                    add_zeros(sha, length)
                    continue
                block = read_exactly(fd, start, length, path=path)
                sha.update(block)
                writer.add_block(block, block_crc(chunk.block_crcs, index))
        finally:
            os.close(fd)
        if sha.digest() != chunk.sha256:
            raise CorruptError(f"chunk {chunk.chunk_id} changed since it was sealed", path=path)
        return pack.member_of(writer.finish(), 0)


def _failed(members: Sequence[ChunkRow], key: str, reason_code: int, b: Batch) -> None:
    for chunk in members:
        objects.upload_failed(b, chunk.chunk_id, key, reason_code)


def _uploaded(one: pack.Member, key: str, etag: str, pack_bytes: int) -> Uploaded:
    compression = "zstd" if one.compressed else ""
    return Uploaded(
        one.chunk_id, key, etag, one.stored_len, compression, True, offset=one.offset, pack_bytes=pack_bytes
    )


def _to_publish(item: Item, ups: dict[bytes, Uploaded], changed: dict[int, CorruptError]) -> ToPublish | None:
    row, chunk = item.row, item.chunk
    if chunk is None:
        return ToPublish(row.ino, row.generation, row.sha256, 0, None)
    if item.blob is not None:
        return ToPublish(row.ino, row.generation, row.sha256, chunk.chunk_id, objects.found(item.blob, chunk))
    up = ups.get(chunk.sha256)
    if up is None or chunk.chunk_id in changed:
        return None
    if up.chunk_id != chunk.chunk_id:
        up = up._replace(chunk_id=chunk.chunk_id, fresh=False)  # equal content, which is in the pack once
    return ToPublish(row.ino, row.generation, row.sha256, chunk.chunk_id, up)
