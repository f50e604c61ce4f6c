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

import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import trio

from aof2.engine import objects
from aof2.engine.aio import open_nursery, result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ChunkRow, DirtyRow, ObjectRow, ObjectState
from aof2.engine.errors import Aof2Error
from aof2.engine.files import extents
from aof2.engine.files.assemble import Assembler
from aof2.engine.files.state import Mode, OpenFile, State
from aof2.engine.local.handles import Key, ObjectHandle, Use
from aof2.engine.local.reserve import is_no_room
from aof2.engine.locks import Rank, task_lock, waits_for
from aof2.engine.objects import ObjectGoneError, Uploaded, full_mask
from aof2.engine.runs import runs_of
from aof2.engine.tiering.hashing import ChunkDigest, digest_chunk
from aof2.engine.tiering.publish import Target

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

UPLOADS: Final = 2  # each holds a chunk in memory
WORTH_SHARE: Final = 4  # of hot_bytes: with less in open files, what is closed frees more
CLAIM_MAX_S: Final = 1.0
CLAIMS_MAX: Final = 1 << 24  # blocks of one file that the channel can note
CRASH_POINTS: Final = ("part.read", "part.begun", "part.uploaded", "part.recorded", "part.punched")


class _Read(NamedTuple):
    """A chunk in memory, read while its writers were held off."""

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
        self.assembler = Assembler(files.volume)
        self._lock = task_lock(Rank.PARTS)
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
            self._can_punch = extents.can_punch(self._volume.hot.root, self._block_bytes)
        return self._can_punch

    # -- what changes under us ---------------------------------------------------------------------------------

    def touch(self, file: OpenFile, offset: int, length: int) -> None:
        """A write goes here: a chunk that is being taken stays, and none of these counts as old."""
        if length:
            self._touch(file, range(offset // self._chunk_bytes, (offset + length - 1) // self._chunk_bytes + 1))

    def touch_all_from(self, file: OpenFile, offset: int) -> None:
        """Everything behind this changes: the file is cut, or extended."""
        if file.clearing:
            file.taken.unwritten -= {i for i in file.clearing if (i + 1) * self._chunk_bytes > offset}

    def touch_blocks(self, file: OpenFile, first: int, count: int) -> None:
        if count:
            self._touch(file, range(first // self._per_chunk, (first + count - 1) // self._per_chunk + 1))

    def _touch(self, file: OpenFile, chunks: Iterable[int]) -> None:
        now_s = trio.current_time()
        for index in chunks:
            file.taken.unwritten.discard(index)
            file.taken.wrote_s[index] = now_s

    def tell(self, file: OpenFile, first: int, count: int) -> None:
        """The channel may answer for these blocks, but for those of chunks that are being taken."""
        if count <= 0 or not file.channel.ranged:
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

    def is_taking(self, file: OpenFile, offset: int, length: int) -> bool:
        """Whether a chunk of this range is on its way out."""
        last = (offset + max(1, length) - 1) // self._chunk_bytes
        return any(offset // self._chunk_bytes <= index <= last for index in file.clearing)

    async def until_taken(self, file: OpenFile, offset: int, length: int) -> None:
        waits_for(Rank.FILE_IO)
        while self.is_taking(file, offset, length):
            await self._over.wait()

    def unclaim(self, file: OpenFile, first: int, count: int) -> None:
        """A passthrough writer may write to these blocks, but for those that are not here, and those of chunks that are
        being taken: what it wrote there would go with the punch."""
        if not file.channel.passed or not self._files.room.brake.on:
            return
        for run_first, run_count in runs_of(b for b in range(first, first + count) if self._is_free(file, b)):
            self._files.kernel.unclaim(file.ino, run_first, run_count)

    def _is_free(self, file: OpenFile, block: int) -> bool:
        return block // self._per_chunk not in file.clearing and not file.is_absent(block, self._block_bytes)

    def unclaim_behind(self, file: OpenFile, first: int) -> None:
        """What is behind this was cut off."""
        if file.channel.passed and self._files.room.brake.on:
            self._files.kernel.unclaim(file.ino, first, CLAIMS_MAX)

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
        dirty = self._files.known.dirty()
        held = sum(file.charged_bytes for file in dirty if self._is_takeable(file))
        others = any(not file.handles for file in dirty) or bool(self._volume.jobs.pending_bytes())
        return held > 0 and (not others or held >= self._volume.settings.cache.hot_bytes // WORTH_SHARE)

    def _is_takeable(self, file: OpenFile) -> bool:
        if not (file.dirty and file.handles and file.channel.registered):
            return False
        if file.channel.passed:
            return self._files.room.brake.on and file.channel.write_only
        return file.channel.masked

    async def _candidates(self, tenant: str | None, writing: tuple[int, int]) -> list[tuple[OpenFile, int, int]]:
        """(file, chunk, bytes of it on the disk), the largest file's oldest first."""
        found: list[tuple[OpenFile, int, int]] = []
        unfinished: list[tuple[OpenFile, int, int]] = []
        files = [f for f in self._files.known.dirty() if self._is_takeable(f) and tenant in (None, f.tenant)]
        for file in sorted(files, key=lambda f: -f.charged_bytes):
            sizes = await trio.to_thread.run_sync(extents.data_by_chunk, file.path, self._chunk_bytes)
            complete = file.stat().st_size // self._chunk_bytes
            busy = writing[1] // self._chunk_bytes if writing[0] == file.ino else -1
            chunks = [(i, size) for i, size in sizes.items() if i not in file.clearing]
            chunks.sort(key=lambda one, file=file: (file.taken.wrote_s.get(one[0], 0.0), one[0]))  # type: ignore[misc]
            found += [(file, index, size) for index, size in chunks if index < complete and index != busy]
            # Where the next append goes is not told before it is written: what it would go into stays.
            if file.channel.passed and not file.channel.appends:
                unfinished += [(file, index, size) for index, size in chunks if index >= complete or index == busy]
        # Only where there is nothing else: they go up again when they are finished. The asker's own last of all.
        unfinished.sort(key=lambda one: (one[0].ino == writing[0], -one[2]))
        return found or unfinished

    async def _read_or_release(self, file: OpenFile, index: int) -> _Read | None:
        read = None
        try:
            # Closed while it waited for its turn here, the file is the sealer's: taking parts would void its seal.
            if self._is_takeable(file):
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
        """The chunk as it is now, its writers held off from here on; None when it is gone or being written."""
        if index in file.clearing:
            return None
        file.taken.clearing.add(index)
        try:
            if not await self._hold_writers_off(file, index):
                self._let_be(file, index)
                return None
            async with file.io:
                await self._files.charges.collect(file)
                size = file.stat().st_size
                length = min(self._chunk_bytes, size - index * self._chunk_bytes)
                mapped = file.channel.mode is Mode.PASSTHROUGH and not file.channel.write_only
                if not file.dirty or length <= 0 or mapped:
                    self._let_be(file, index)
                    return None
                self._prepare(file, index, length)
                file.taken.unwritten.add(index)
                file.taken.running = file.running
                start = index * self._chunk_bytes
                data = await trio.to_thread.run_sync(self.assembler.read_range, file, start, length)
            digest = await trio.to_thread.run_sync(self._digest, file, index, data)
        except BaseException:
            self._let_be(file, index)
            raise
        self._volume.env.failpoint("part.read")
        return _Read(file, file.key, index, data, digest)

    async def _hold_writers_off(self, file: OpenFile, index: int) -> bool:
        """From here on a write to the chunk is told first, and none is on its way; False: not now."""
        first = index * self._per_chunk
        if file.channel.mode is Mode.PASSTHROUGH:
            if not await self._claim(file, first):
                return False
            try:
                await trio.to_thread.run_sync(extents.wait_for_direct_writes, file.path, index * self._chunk_bytes)
            except PermissionError:
                return False  # the channel stopped its writer: until there is room nothing of the file can be punched
        elif file.channel.registered and file.channel.masked:
            await self._files.kernel.clear(file.ino, first, self._per_chunk)
        return True

    async def _claim(self, file: OpenFile, first: int) -> bool:
        """Whether the channel holds writes to the chunk. A write that stands still, because the disk does, may keep it
        from that: then another file's chunk goes instead."""
        with trio.move_on_after(CLAIM_MAX_S):
            return await self._files.kernel.claim(file.ino, first, self._per_chunk)
        return False

    def _let_be(self, file: OpenFile, index: int) -> None:
        """The chunk stays where it is."""
        self._end(file, index)
        first = index * self._per_chunk
        self.unclaim(file, first, self._per_chunk)
        if file.channel.registered and file.channel.masked and first < file.channel.told:
            for block in range(first, first + self._per_chunk):
                if not file.is_absent(block, self._block_bytes):
                    self.tell(file, block, 1)

    def _end(self, file: OpenFile, index: int) -> None:
        file.taken.unwritten.discard(index)
        file.taken.clearing.discard(index)
        self._over.set()
        self._over = trio.Event()

    def _digest(self, file: OpenFile, index: int, data: memoryview) -> ChunkDigest:
        digest = digest_chunk(data, block_bytes=self._block_bytes)
        running = file.running
        if index == len(running.chunks) and len(data) == self._chunk_bytes:
            running.sha256.update(data)
            running.chunks.append(digest.sha256)
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
            if index not in file.taken.unwritten or file.key != read.key or not file.dirty:
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
        if file.channel.mode is Mode.PASSTHROUGH:
            await self._files.room.brake.recount(file)
        else:
            await self._files.charges.recharge(file)

    def _prepare(self, file: OpenFile, index: int, length: int) -> None:
        """From here on blocks of the chunk may become absent: a caller that opens the file asks for each."""
        base = file.base
        if base is None:
            row = ObjectRow(file.ino, file.key[2], ObjectState.DIRTY, chunk_bytes=self._chunk_bytes)
            base = self._base_of(file, row)
            file.become(State.DIRTY_PARTIAL, base)
        base.key = file.key  # its pages are no longer another generation's
        while len(base.chunks) <= index:
            self._append(base, ChunkRow(0, file.ino, file.key[2], len(base.chunks), self._chunk_bytes))
        end = index * self._chunk_bytes + length
        base.row = msgspec.structs.replace(base.row, size=max(base.row.size, end))
        self.forget_behind(file)
        file.base_len = max(file.base_len, end)

    def _base_of(self, file: OpenFile, row: ObjectRow) -> ObjectHandle:
        """Where absent blocks of a dirty file are to come from: what lands there is the writer's."""
        return ObjectHandle(file.key, file.tenant, file.path, row, [], [], self._block_bytes, Use.WRITTEN)

    def _adopt(self, file: OpenFile, chunk: ChunkRow) -> None:
        """From here on the part is where the chunk's blocks come from."""
        base = file.source
        base.chunks[chunk.index] = chunk
        base.holes[chunk.index] = chunk.holes
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
        base.holes.append(0)
        base.trusted.append(base.masks[-1])

    # -- sealing -----------------------------------------------------------------------------------------------

    async def complete(self, file: OpenFile) -> None:
        """Before a seal: each chunk of a closed file is here whole, or a part that is as it was uploaded."""
        while file.clearing:
            await self._over.wait()
        if not file.partial:
            return None
        if not any(self.assembler.is_part(file, index) for index in range(len(file.source.chunks))):
            try:
                return await self._files.content.fill(file)
            except OSError as e:
                if not is_no_room(e) or not self.can_punch:
                    raise
        try:
            for index in range(-(-file.stat().st_size // self._chunk_bytes)):
                await self._complete_chunk(file, index)
        finally:
            with trio.CancelScope(shield=True):
                async with file.io:  # no fetch is writing into it
                    if not file.handles:
                        file.close_fd()
                        file.source.close_file()

    async def _complete_chunk(self, file: OpenFile, index: int) -> None:
        async with file.io:
            size = file.stat().st_size
            if not file.absent_mask(index, self._per_chunk, self._block_bytes):
                return
            if not file.partial or await trio.to_thread.run_sync(self.assembler.is_complete, file, index, size):
                return
            blocks = range(index * self._per_chunk, (index + 1) * self._per_chunk)
            absent = [block for block in blocks if file.is_absent(block, self._block_bytes)]
            pages = await self._files.content.fetch(file, absent)
        if pages:  # there is no room for all of it: it goes back as it is now
            async with self._uploads:
                read = await self._read(file, index)
                if read is not None:
                    await self._upload(read)

    # -- after a restart ---------------------------------------------------------------------------------------

    def resume(self, file: OpenFile, obj: ObjectRow, dirty: DirtyRow, base: ObjectHandle | None) -> ObjectHandle:
        """Where the absent blocks of a dirty file from before come from. On a worker thread."""
        with self._volume.catalog.view() as view:
            rows = [view.get(file.key[0], t.CHUNKS, chunk_id) for chunk_id in obj.chunks]
        row = ObjectRow(file.ino, file.key[2], ObjectState.DIRTY, dirty.base_len, self._chunk_bytes)
        handle = self._base_of(file, row)
        found = extents.whole_blocks(file.path, self._per_chunk, self._block_bytes) if self.can_punch else {}
        for index, mask in enumerate(dirty.present):
            part = rows[index] if index < len(rows) else None
            of_base = base.chunks[index] if base is not None and index < len(base.chunks) else None
            empty = ChunkRow(0, file.ino, file.key[2], index, self._chunk_bytes)
            self._append(handle, part or of_base or empty)
            mask |= self._behind(handle.chunks[index])
            mask |= found.get(index, 0)
            handle.masks[index] = handle.trusted[index] = mask
        return handle

    def forget_behind(self, file: OpenFile) -> None:
        """The base ends at `base_len`, for good: whatever comes behind it is the file's own."""
        base = file.source
        base.take_over_from(-(-file.base_len // self._block_bytes))

    def punch_absent(self, base: ObjectHandle) -> None:
        """Before an object that is partly here is written to: what may not be read of it is a hole."""
        if self.can_punch:
            extents.punch_absent(self._volume.env, base, self._block_bytes)
