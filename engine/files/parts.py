"""Parts: chunks of a file that is still being written, uploaded and punched out, so that it may outgrow the cache.

    chunk of a dirty file ── cleared at the channel, read, hashed ── uploaded ── recorded ── hole
                                                                                    │
                 its blocks are absent from here on: they come back like those of a cold file (`OpenFile.base`)

The catalog knows the parts of a dirty object by its `chunks`, and by DirtyRow which blocks are not in its backing file.
At the seal a part that is as it was uploaded stays the object's chunk; one that was written to is completed, from its
own blob, and hashed or uploaded anew.

Invariants
- A hole is punched only under `OpenFile.io`, after the commit that says where its bytes are is durable, and only when
  nothing was written to the chunk since it was read: the channel answers for none of its blocks meanwhile, and
  whatever else writes says so (`touch`).
- A block of a partly present, dirty file is in its backing file whole or not at all: after a crash its extents tell.
- Nothing here needs room: a chunk is put together, hashed and compressed in memory, one or two at a time.

Owner: the trio thread; reading, hashing and punching on worker threads. A crash leaves an upload that nothing speaks
of, which retention clears, or a part that is not punched yet, whose bytes are the same here and there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import trio

from aof2 import native
from aof2.engine import objects
from aof2.engine.aio import open_nursery, result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ChunkRow, DirtyRow, ObjectRow, ObjectState
from aof2.engine.errors import Aof2Error, CorruptError
from aof2.engine.files.state import Mode, OpenFile
from aof2.engine.local.handles import Key, ObjectHandle
from aof2.engine.local.hot import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate, read_exactly
from aof2.engine.objects import ObjectGoneError, Uploaded, full_mask
from aof2.engine.tiering.flights import NotAvailableError
from aof2.engine.tiering.hashing import ChunkDigest, ObjectDigest, block_crc, digest_chunk, digest_range
from aof2.engine.tiering.publish import Target

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

UPLOADS: Final = 2  # each holds a chunk in memory
FETCH_BYTES: Final = 8 << 20
WORTH_SHARE: Final = 4  # of hot_bytes: with less in open files, what is closed frees more
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
CRASH_POINTS: Final = ("part.read", "part.begun", "part.uploaded", "part.recorded", "part.punched")


class _Read(NamedTuple):
    """A chunk in memory, as it was when nobody could write to it."""

    file: OpenFile
    key: Key
    nth: int
    data: memoryview
    digest: ChunkDigest


class Parts:
    """Takes parts out of files, and puts files together again."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._volume = files.volume
        self._block_bytes = files.block_bytes
        self._chunk_bytes = files.volume.settings.engine.chunk_bytes
        self._per_chunk = self._chunk_bytes // self._block_bytes
        self._lock = trio.Lock()
        self._uploads = trio.Semaphore(UPLOADS)
        self._over = trio.Event()  # a chunk was taken, or let be
        self._can_punch: bool | None = None
        self.taken_bytes = 0
        self.sealed: set[Key] = self._sealed_before()  # with parts, and perhaps not yet published

    def _sealed_before(self) -> set[Key]:
        found: set[Key] = set()
        with self._volume.catalog.view() as view:
            for stream_id in self._volume.tenant_names():
                for key, _ in view.scan(stream_id, t.UNPUBLISHED):
                    row = view.get(stream_id, t.OBJECTS, key)
                    chunks = (view.get(stream_id, t.CHUNKS, c) for c in (row.chunks if row is not None else ()))
                    if any(chunk is not None and chunk.key for chunk in chunks):
                        found.add((stream_id, *key))
        return found

    @property
    def can_punch(self) -> bool:
        """Whether holes can be made, and found again."""
        if self._can_punch is None:
            self._can_punch = _probe(self._volume.hot.root, self._block_bytes)
        return self._can_punch

    # -- what changes under us ---------------------------------------------------------------------------------

    def touch(self, file: OpenFile, offset: int, length: int) -> None:
        """Somebody writes here: a chunk that is being taken is not, and none of these is an old one."""
        if length:
            self._touch(file, range(offset // self._chunk_bytes, (offset + length - 1) // self._chunk_bytes + 1))

    def touch_all_from(self, file: OpenFile, offset: int) -> None:
        """Everything behind this changes: the file is cut, or extended."""
        file.taking = {index for index in file.taking if (index + 1) * self._chunk_bytes <= offset}

    def touch_blocks(self, file: OpenFile, first: int, count: int) -> None:
        if count:
            self._touch(file, range(first // self._per_chunk, (first + count - 1) // self._per_chunk + 1))

    def _touch(self, file: OpenFile, chunks: Iterable[int]) -> None:
        now_s = trio.current_time()
        for index in chunks:
            file.taking.discard(index)
            file.wrote[index] = now_s

    def tell(self, file: OpenFile, first: int, count: int) -> None:
        """The channel may answer for these blocks, but for those of chunks that are being taken."""
        if count <= 0 or not file.registered or file.mode is not Mode.RANGED:
            return
        stop = first + count
        for index in sorted(file.clearing):
            low, high = index * self._per_chunk, (index + 1) * self._per_chunk
            if low < stop and first < high:
                if low > first:
                    self._files.kernel.blocks(file.ino, first, low - first)
                first = max(first, min(high, stop))
        if stop > first:
            self._files.kernel.blocks(file.ino, first, stop - first)

    # -- making room -------------------------------------------------------------------------------------------

    async def make_room(self, wanted: int, *, tenant: str | None = None, writing: tuple[int, int] = (0, 0)) -> int:
        """Takes the oldest chunks of open files until so much came free, or there are no more; how much did.

        `writing`: an inode, and the offset that its writer wants to go on from.
        """
        async with self._lock:
            if not self.can_punch or not self._is_worth_it():
                return 0
            before = self.taken_bytes
            try:
                async with open_nursery() as nursery:
                    planned = 0
                    for file, index, size in await self._candidates(tenant, writing):
                        if planned >= wanted:
                            break
                        await self._uploads.acquire()
                        read = await self._read_or_release(file, index)
                        if read is not None:
                            planned += size
                            nursery.start_soon(self._upload_and_release, read)
            except (Aof2Error, OSError) as e:
                log.info("no part was taken", extra={"error": str(e)})
            return self.taken_bytes - before

    def _is_worth_it(self) -> bool:
        dirty = self._files.dirty_files()
        held = sum(file.charged_bytes for file in dirty if _is_takeable(file))
        others = any(not file.handles for file in dirty) or bool(self._volume.jobs.pending_bytes())
        return held > 0 and (not others or held >= self._volume.settings.cache.hot_bytes // WORTH_SHARE)

    async def _candidates(self, tenant: str | None, writing: tuple[int, int]) -> list[tuple[OpenFile, int, int]]:
        """(file, chunk, bytes of it on the disk), the largest file's oldest first."""
        found: list[tuple[OpenFile, int, int]] = []
        files = [f for f in self._files.dirty_files() if _is_takeable(f) and tenant in (None, f.tenant)]
        for file in sorted(files, key=lambda f: -f.charged_bytes):
            sizes = await trio.to_thread.run_sync(_data_by_chunk, file.path, self._chunk_bytes)
            complete = file.stat().st_size // self._chunk_bytes
            busy = writing[1] // self._chunk_bytes if writing[0] == file.ino else -1
            chunks = [(i, size) for i, size in sizes.items() if i < complete and i != busy and i not in file.clearing]
            chunks.sort(key=lambda one, file=file: (file.wrote.get(one[0], 0.0), one[0]))  # type: ignore[misc]
            found += [(file, index, size) for index, size in chunks]
        return found

    async def _read_or_release(self, file: OpenFile, index: int) -> _Read | None:
        read = None
        try:
            read = await self._read(file, index)
        finally:
            if read is None:
                self._uploads.release()
        return read

    async def _upload_and_release(self, read: _Read) -> None:
        try:
            await self._upload(read)
        finally:
            self._uploads.release()

    # -- taking one --------------------------------------------------------------------------------------------

    async def _read(self, file: OpenFile, index: int) -> _Read | None:
        """The chunk as it is now, and nobody answers for it any more; None when it is gone or being written."""
        if file.clearing and index in file.clearing:
            return None
        file.clearing.add(index)
        try:
            if file.registered and file.masked:
                await self._files.kernel.clear(file.ino, index * self._per_chunk, self._per_chunk)
            async with file.io:
                await self._files.collect(file)
                size = file.stat().st_size
                length = min(self._chunk_bytes, size - index * self._chunk_bytes)
                if not file.dirty or self._files.file(file.ino) is not file or length <= 0:
                    self._let_be(file, index)
                    return None
                self._prepare(file, index, length)
                file.taking.add(index)
                data = await trio.to_thread.run_sync(self._read_range, file, index * self._chunk_bytes, length)
            digest = await trio.to_thread.run_sync(self._digest, file, index, data)
        except BaseException:
            self._let_be(file, index)
            raise
        self._volume.env.failpoint("part.read")
        return _Read(file, file.key, index, data, digest)

    def _let_be(self, file: OpenFile, index: int) -> None:
        """The chunk stays where it is."""
        self._end(file, index)
        first = index * self._per_chunk
        if file.registered and file.masked and first < file.told:
            for block in range(first, first + self._per_chunk):
                if not file.is_absent(block, self._block_bytes):
                    self.tell(file, block, 1)

    def _end(self, file: OpenFile, index: int) -> None:
        file.taking.discard(index)
        file.clearing.discard(index)
        self._over.set()
        self._over = trio.Event()

    def _digest(self, file: OpenFile, index: int, data: memoryview) -> ChunkDigest:
        digest = digest_chunk(data, block_bytes=self._block_bytes)
        if index == len(file.running.chunks) and len(data) == self._chunk_bytes:
            file.running.sha256.update(data)
            file.running.chunks.append(digest.sha256)
        return digest

    async def _upload(self, read: _Read) -> bool:
        """Whether the chunk is a part now. Where it was written to meanwhile, it is not."""
        file, index, digest = read.file, read.nth, read.digest
        stream_id, ino, generation = read.key
        submit, publisher = self._volume.writer.submit, self._volume.publisher
        try:
            begun = partial(objects.part_begun, ino=ino, generation=generation, index=index, digest=digest)
            ids = await result_of(submit(stream_id, begun, sync=True))
            self._volume.env.failpoint("part.begun")
            row = ObjectRow(ino, generation, ObjectState.DIRTY, chunk_bytes=self._chunk_bytes)
            settings = self._volume.settings.tenants.get(file.tenant)
            compression = settings.compression if settings is not None else "none"
            target = Target(stream_id, file.tenant, row, compression, read.data)
            chunk = ChunkRow(
                ids.chunk_id, ino, generation, index, digest.length, digest.sha256, digest.crc64, digest.block_crcs
            )
            return await publisher.put_part(target, chunk, ids.checkpoint_id, partial(self._record, read, chunk))
        except ObjectGoneError:
            return False  # unlinked meanwhile
        finally:
            if index in file.clearing:
                self._let_be(file, index)

    async def _record(self, read: _Read, chunk: ChunkRow, up: Uploaded) -> bool:
        file, index = read.file, read.nth
        self._volume.env.failpoint("part.uploaded")
        async with file.io:
            if index not in file.taking or file.key != read.key or self._files.file(file.ino) is not file:
                return False
            file.seal_attempt += 1  # a seal under way speaks of another file
            with trio.CancelScope(shield=True):
                await self._swap(file, chunk, up, read.digest.piece_crcs)
        return True

    async def _swap(self, file: OpenFile, chunk: ChunkRow, up: Uploaded, piece_crcs: bytes) -> None:
        """The remote has it: the disk gives it up. `file.io` is held."""
        work = partial(objects.part_done, chunk=chunk, up=up, block_bytes=self._block_bytes, piece_crcs=piece_crcs)
        chunk = await result_of(self._volume.writer.submit(file.key[0], work, sync=True))
        self._volume.env.failpoint("part.recorded")
        # To the end of a block: of a page that is punched in part, zeros would stay, and look like data.
        length = -(-chunk.length // self._block_bytes) * self._block_bytes
        with file.keeping_times():
            await trio.to_thread.run_sync(self._volume.hot.punch, file.path, chunk.index * self._chunk_bytes, length)
        self._volume.env.failpoint("part.punched")
        self._adopt(file, chunk)
        self._end(file, chunk.index)
        self.taken_bytes += chunk.length
        await self._files.recharge(file)

    def _prepare(self, file: OpenFile, index: int, length: int) -> None:
        """From here on blocks of the chunk may become absent: whoever opens the file asks for each."""
        base = file.base
        if base is None:
            row = ObjectRow(file.ino, file.key[2], ObjectState.DIRTY, chunk_bytes=self._chunk_bytes)
            base = file.base = ObjectHandle(file.key, file.tenant, file.path, row, [], [], self._block_bytes)
        base.key = file.key  # its pages are no longer another generation's
        while len(base.chunks) <= index:
            self._append(base, ChunkRow(0, file.ino, file.key[2], len(base.chunks), self._chunk_bytes))
        end = index * self._chunk_bytes + length
        base.row = msgspec.structs.replace(base.row, size=max(base.row.size, end))
        self.forget_behind(file)
        file.whole, file.base_len = False, max(file.base_len, end)

    def _adopt(self, file: OpenFile, chunk: ChunkRow) -> None:
        """From here on the part is where the chunk's blocks come from."""
        base = file.source
        base.chunks[chunk.index] = chunk
        base.masks[chunk.index] = base.trusted[chunk.index] = self._behind(chunk)
        base.added.pop(chunk.index, None)
        self._volume.pages.drop_object(file.ino, file.key[2])

    def _behind(self, chunk: ChunkRow) -> int:
        """Blocks behind the end of a short chunk: they never were anywhere else."""
        return full_mask(self._chunk_bytes, self._block_bytes) & ~full_mask(chunk.length, self._block_bytes)

    def _append(self, base: ObjectHandle, chunk: ChunkRow) -> None:
        """A chunk that is here whole."""
        base.chunks.append(chunk)
        base.masks.append(full_mask(self._chunk_bytes, self._block_bytes))
        base.trusted.append(base.masks[-1])

    # -- reading, on a worker thread ---------------------------------------------------------------------------

    def _read_range(self, file: OpenFile, offset: int, length: int, fd: int = -1) -> memoryview:
        """Bytes as a reader sees them, at most a chunk: from the backing file, and from where absent blocks are."""
        out = memoryview(bytearray(length))
        own = fd < 0
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC) if own else fd
        try:
            for first, count, absent in self._runs(file, offset, length):
                low = max(offset, first * self._block_bytes)
                high = min(offset + length, (first + count) * self._block_bytes)
                if absent:
                    self._fetch(file, first, count, out, offset)
                else:
                    out[low - offset : high - offset] = read_exactly(fd, low, high - low, path=str(file.path))
        finally:
            if own:
                os.close(fd)
        return out

    def _runs(self, file: OpenFile, offset: int, length: int) -> list[tuple[int, int, bool]]:
        """(first block, how many, absent): neighbours of one kind and one chunk, a few MiB at most."""
        runs: list[tuple[int, int, bool]] = []
        most = max(1, FETCH_BYTES // self._block_bytes)
        for block in range(offset // self._block_bytes, (offset + length - 1) // self._block_bytes + 1):
            absent = file.is_absent(block, self._block_bytes)
            if runs and runs[-1][2] == absent and runs[-1][1] < most and block % self._per_chunk:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, absent)
            else:
                runs.append((block, 1, absent))
        return runs

    def _fetch(self, file: OpenFile, first: int, count: int, out: memoryview, offset: int) -> None:
        chunk = file.source.chunks[first // self._per_chunk]
        with self._volume.catalog.view() as view:
            blob = view.get(file.key[0], t.BLOBS, chunk.sha256)
        if blob is None:
            raise NotAvailableError(f"chunk {chunk.chunk_id} has no copy anywhere", path=str(file.path))
        pages = self._volume.hydrator.fetcher.blocks(chunk, blob, first % self._per_chunk, count)
        for block, page in enumerate(pages, first):
            start = block * self._block_bytes
            high = min(start + len(page), file.base_len, offset + len(out))
            low = max(start, offset)
            if low < high:
                out[low - offset : high - offset] = page[low - start : high - start]

    # -- sealing -----------------------------------------------------------------------------------------------

    async def settle(self, file: OpenFile) -> None:
        """Before a seal: each chunk of a closed file is here whole, or a part that is as it was uploaded."""
        while file.clearing:
            await self._over.wait()
        if file.whole:
            return None
        if not any(self._is_part(file, index) for index in range(len(file.source.chunks))):
            try:
                return await self._files.fill(file)
            except OSError as e:
                if e.errno not in NO_ROOM or not self.can_punch:
                    raise
        try:
            for index in range(-(-file.stat().st_size // self._chunk_bytes)):
                await self._settle_chunk(file, index)
        finally:
            with trio.CancelScope(shield=True):
                async with file.io:  # nobody fetches into it
                    if not file.handles:
                        file.close_fd()
                        file.source.close_file()

    async def _settle_chunk(self, file: OpenFile, index: int) -> None:
        async with file.io:
            size = file.stat().st_size
            if file.whole or await trio.to_thread.run_sync(self._is_settled, file, index, size):
                return
            blocks = range(index * self._per_chunk, (index + 1) * self._per_chunk)
            absent = [block for block in blocks if file.is_absent(block, self._block_bytes)]
            pages = await self._files.fetch(file, absent)
        if pages:  # there is no room for all of it: it goes back as it is now
            async with self._uploads:
                read = await self._read(file, index)
                if read is not None:
                    await self._upload(read)

    def _is_part(self, file: OpenFile, index: int) -> bool:
        base = file.base
        if base is None or index >= len(base.chunks):
            return False
        chunk = base.chunks[index]
        return bool(chunk.chunk_id and chunk.key) and chunk.generation == file.key[2]

    def _here(self, file: OpenFile, index: int, length: int) -> int | None:
        """The blocks of a chunk that are here; None: all."""
        blocks = range(index * self._per_chunk, index * self._per_chunk + -(-length // self._block_bytes))
        mask = sum(1 << i for i, b in enumerate(blocks) if not file.is_absent(b, self._block_bytes))
        return None if mask == full_mask(length, self._block_bytes) else mask

    def _is_settled(self, file: OpenFile, index: int, size: int, fd: int = -1) -> bool:
        """Whether it is here whole, or a part whose blocks that are here are still the part's. On a worker thread."""
        start = index * self._chunk_bytes
        length = min(self._chunk_bytes, size - start)
        here = self._here(file, index, length)
        if here is None:
            return True
        if not self._is_part(file, index):
            return False
        chunk = file.source.chunks[index]
        if chunk.length != length or start + length > file.base_len:
            return False
        for i in range(-(-length // self._block_bytes)):
            at = i * self._block_bytes
            if here >> i & 1:
                data = self._read_range(file, start + at, min(self._block_bytes, length - at), fd)
                if native.crc64(data) != block_crc(chunk.block_crcs, i):
                    return False
        return True

    def digest(self, file: OpenFile, fd: int, size: int) -> tuple[ObjectDigest, dict[int, int]]:
        """What a seal says, and which chunks stay the parts they are, with their blocks that are here; CorruptError
        where one is neither whole nor settled. On a worker thread."""
        count = -(-size // self._chunk_bytes)
        parts: dict[int, int] = {}
        chunks: list[ChunkDigest] = []
        known = len(file.running.chunks)
        for index in range(min(known, count)):
            chunks.append(self._digest_at(file, fd, index, size, parts, None))
        if count == 1 and chunks:
            return ObjectDigest(size, chunks[0].sha256, tuple(chunks)), parts
        whole = file.running.sha256.copy()
        if known > count or [c.sha256 for c in chunks] != file.running.chunks:
            whole = hashlib.sha256()  # something was written over: all of it is read again
            for index in range(len(chunks)):
                self._stream(file, fd, index, size, whole)
        for index in range(len(chunks), count):
            chunks.append(self._digest_at(file, fd, index, size, parts, whole))
        sha256 = chunks[0].sha256 if count == 1 else whole.digest()
        return ObjectDigest(size, sha256, tuple(chunks)), parts

    def _digest_at(
        self, file: OpenFile, fd: int, index: int, size: int, parts: dict[int, int], whole: hashlib._Hash | None
    ) -> ChunkDigest:
        start = index * self._chunk_bytes
        length = min(self._chunk_bytes, size - start)
        here = self._here(file, index, length)
        if here is None:
            return digest_range(fd, start, length, self._block_bytes, whole, str(file.path))
        if not self._is_settled(file, index, size, fd):
            raise CorruptError(f"chunk {index} is not complete", path=str(file.path))
        parts[index] = here
        if whole is not None:
            self._stream(file, fd, index, size, whole)
        chunk = file.source.chunks[index]
        return ChunkDigest(chunk.length, chunk.sha256, chunk.crc64, chunk.block_crcs)

    def _stream(self, file: OpenFile, fd: int, index: int, size: int, whole: hashlib._Hash) -> None:
        start = index * self._chunk_bytes
        for at in range(start, min(start + self._chunk_bytes, size), FETCH_BYTES):
            whole.update(self._read_range(file, at, min(FETCH_BYTES, start + self._chunk_bytes - at, size - at), fd))

    # -- after a restart ---------------------------------------------------------------------------------------

    def resume(self, file: OpenFile, obj: ObjectRow, dirty: DirtyRow, base: ObjectHandle | None) -> ObjectHandle:
        """Where the absent blocks of a dirty file from before come from. On a worker thread."""
        with self._volume.catalog.view() as view:
            rows = [view.get(file.key[0], t.CHUNKS, chunk_id) for chunk_id in obj.chunks]
        size = os.stat(file.path).st_size
        row = ObjectRow(file.ino, file.key[2], ObjectState.DIRTY, dirty.base_len, self._chunk_bytes)
        handle = ObjectHandle(file.key, file.tenant, file.path, row, [], [], self._block_bytes)
        for index, mask in enumerate(dirty.present):
            part = rows[index] if index < len(rows) else None
            of_base = base.chunks[index] if base is not None and index < len(base.chunks) else None
            empty = ChunkRow(0, file.ino, file.key[2], index, self._chunk_bytes)
            self._append(handle, part or of_base or empty)
            mask |= self._behind(handle.chunks[index])
            if self.can_punch:
                mask |= self._found(file.path, index, size)
            handle.masks[index] = handle.trusted[index] = mask
        return handle

    def forget_behind(self, file: OpenFile) -> None:
        """The base ends at `base_len`, for good: whatever comes behind it is the file's own."""
        base = file.source
        for block in range(-(-file.base_len // self._block_bytes), base.block_count):
            base.take_over(block)

    def punch_absent(self, base: ObjectHandle) -> None:
        """Before an object that is partly here is written to: what may not be read of it is a hole. On a worker thread.

        Leftovers of an eviction that a crash cut short, blocks that failed their checksum: after the next crash they
        must not be taken for written.
        """
        if not self.can_punch:
            return
        punched = False
        for first, count in _runs_of(block for block in range(base.block_count) if not base.is_resident(block)):
            start = first * self._block_bytes
            with contextlib.suppress(OSError):
                if os.lseek(base.fd, start, os.SEEK_DATA) >= start + count * self._block_bytes:
                    continue
                fallocate(base.fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, start, count * self._block_bytes)
                punched = True
        if punched:
            self._volume.env.files.fsync(base.fd)

    def _found(self, path: Path, index: int, size: int) -> int:
        """The blocks of a chunk that were written, or fetched, since it was a hole: those without one."""
        mask = 0
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for i in range(self._per_chunk):
                start = index * self._chunk_bytes + i * self._block_bytes
                stop = min(start + self._block_bytes, size)
                if start < stop and _is_data(fd, start, stop):
                    mask |= 1 << i
        finally:
            os.close(fd)
        return mask


def _runs_of(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """(first, how many) of neighbours."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


def _is_takeable(file: OpenFile) -> bool:
    return file.dirty and file.handles > 0 and file.registered and file.masked and file.mode is Mode.RANGED


def _is_data(fd: int, start: int, stop: int) -> bool:
    with contextlib.suppress(OSError):
        return os.lseek(fd, start, os.SEEK_DATA) == start and os.lseek(fd, start, os.SEEK_HOLE) >= stop
    return False


def _data_by_chunk(path: Path, chunk_bytes: int) -> dict[int, int]:
    """How many bytes of data each chunk of a file has. On a worker thread."""
    sizes: dict[int, int] = {}
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        at = 0
        while True:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                return sizes  # nothing but a hole behind it
            at = os.lseek(fd, start, os.SEEK_HOLE)
            while start < at:
                stop = min(at, (start // chunk_bytes + 1) * chunk_bytes)
                sizes[start // chunk_bytes] = sizes.get(start // chunk_bytes, 0) + stop - start
                start = stop
    finally:
        os.close(fd)


def data_bytes(path: Path) -> int:
    """What a sparse file holds."""
    try:
        return sum(objects.on_disk(size) for size in _data_by_chunk(path, 1 << 62).values())
    except FileNotFoundError:
        return 0


def _probe(folder: Path, block_bytes: int) -> bool:
    """Whether a hole can be punched into a file in this folder, and is found as one. In a file of its own: several
    threads may ask at once."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as f:
            fd = f.fileno()
            os.pwrite(fd, b"x" * 2 * block_bytes, 0)
            fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, block_bytes)
            return not _is_data(fd, 0, block_bytes) and _is_data(fd, block_bytes, 2 * block_bytes)
    except OSError:
        return False
