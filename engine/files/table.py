"""Files of tenants of kind `files`: create, open, read, write, truncate, close, whatever tier their bytes are in.

    closed, clean ── open to read ──► passthrough (here whole) or ranged (the rest is fetched)
         ▲        ── open to write ─► the same, and dirty: the catalog says so, durably, before the open is answered
         └── sealed in the background after the last close (`seal.py`)

Invariants
- One backing file an inode, one mode for all who have it open (`state.py`).
- A dirty file's size and times are its backing file's; a clean one's are the catalog's.
- A block that is not here is fetched before a byte of it is read or partly written; a fetch never lands on a block that
  was written meanwhile (`OpenFile.io`).
- Nothing here waits for the remote but reads and partial writes of what is not here.

Owner: the trio thread; blocking file work on worker threads.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine import namespace, objects
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, DirtyRow, InodeRow, ObjectRow, ObjectState
from aof2.engine.files import marks
from aof2.engine.files.parts import NO_ROOM, Parts, data_bytes
from aof2.engine.files.room import WriteRoom
from aof2.engine.files.seal import Sealer
from aof2.engine.files.state import Handle, Kernel, Mode, NodeFlags, OpenFile, Stamp, wants_write
from aof2.engine.local.hot import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate, read_exactly

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

# Larger requests may wait for the disk: not on the loop.
INLINE_BYTES: Final = 128 << 10
MILESTONE_BLOCKS: Final = 16
SPECIAL_BITS: Final = 0o6000
CAPABILITY: Final = b"security.capability"


def stream_of(ino: int) -> int:
    return ino >> INO_STREAM_SHIFT


class Files:
    """The files that are open or unsealed, and what can be done with them."""

    def __init__(self, volume: Volume, kernel: Kernel) -> None:
        self.volume = volume
        self.kernel = kernel
        self.passthrough = True
        self.passthrough_why = ""
        self.block_bytes = volume.settings.engine.block_bytes
        self._files: dict[int, OpenFile] = {}
        self._handles: dict[int, Handle] = {}
        self._opening: Counter[int] = Counter()
        self._locks: dict[int, tuple[trio.Lock, int]] = {}
        self._next_fh = 1
        self.parts = Parts(self)
        self.room = WriteRoom(self)
        self.sealer = Sealer(self)
        volume.hydrator.on_landed = self._landed

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The background: sealing what was closed, watching what grows."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.sealer.run)
                await nursery.start(self.room.run)
                task_status.started()
        finally:
            for file in self._files.values():
                self.room.let_go(file)
                file.close_fd()
                if file.dirty and file.base is not None:
                    file.base.close_file()

    # -- who has what ------------------------------------------------------------------------------------------

    def is_open(self, ino: int) -> bool:
        """Whether somebody has it open, or is about to. Also called on the writer thread."""
        file = self._files.get(ino)
        return bool(self._opening.get(ino)) or (file is not None and file.handles > 0)

    def file(self, ino: int) -> OpenFile | None:
        return self._files.get(ino)

    def open_files(self) -> list[OpenFile]:
        return [file for file in self._files.values() if file.handles]

    def dirty_files(self) -> list[OpenFile]:
        return [file for file in self._files.values() if file.dirty]

    def open_count(self) -> int:
        return len(self._handles)

    def unsealed_count(self) -> int:
        """At most so many dirty files; counted by nobody."""
        return len(self._files)

    def dirty_count(self) -> int:
        return len(self.dirty_files())

    def dirty_bytes(self) -> int:
        return sum(file.charged_bytes for file in self.dirty_files())

    def handle(self, fh: int) -> Handle:
        try:
            return self._handles[fh]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def is_held(self, ino: int) -> bool:
        """Whether somebody changes the file's state, or waits to."""
        return ino in self._locks

    @asynccontextmanager
    async def holding(self, ino: int) -> AsyncIterator[None]:
        """One at a time for what changes a file's state. Locks exist only while somebody wants them."""
        lock, users = self._locks.get(ino) or (trio.Lock(), 0)
        self._locks[ino] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(ino)
            if users > 1:
                self._locks[ino] = (lock, users - 1)

    # -- opening -----------------------------------------------------------------------------------------------

    async def create(
        self, parent: int, name: bytes, flags: int, *, mode: int, uid: int, gid: int
    ) -> tuple[InodeRow, int]:
        """A new, empty file, open."""
        chunk_bytes = self.volume.settings.engine.chunk_bytes
        work = partial(namespace.create, parent=parent, name=name, mode=mode, uid=uid, gid=gid, chunk_bytes=chunk_bytes)
        row = await result_of(self.volume.writer.submit(stream_of(parent), work))
        return row, self._open_new(row, flags)

    async def create_unnamed(self, parent: int, flags: int, *, mode: int, uid: int, gid: int) -> tuple[InodeRow, int]:
        """A new, empty file without a name, open: gone with its last close unless it is linked."""
        chunk_bytes = self.volume.settings.engine.chunk_bytes
        work = partial(namespace.create_unnamed, parent=parent, mode=mode, uid=uid, gid=gid, chunk_bytes=chunk_bytes)
        row = await result_of(self.volume.writer.submit(stream_of(parent), work))
        fh = self._open_new(row, flags)
        self._handles[fh].file.unlinked = True
        return row, fh

    def _open_new(self, row: InodeRow, flags: int) -> int:
        stream_id = stream_of(row.ino)
        tenant = self.volume.tenant_names()[stream_id]
        path = self.volume.hot.path(tenant, row.ino, row.generation)
        file = OpenFile((stream_id, row.ino, row.generation), tenant, path, ObjectState.DIRTY)
        file.new_name = True
        fd = self.volume.hot.create(path)
        try:
            self._files[row.ino] = file
            file.mode = self._mode_for_writing(file, row)
            self._register(file, row, fd)
        finally:
            os.close(fd)
        return self._new_handle(file, flags)

    def born(self, row: InodeRow, fh: int, flags: int, *, closed: bool) -> None:
        """A file that the channel created, and passed through; `closed` again already."""
        stream_id = stream_of(row.ino)
        tenant = self.volume.tenant_names()[stream_id]
        path = self.volume.hot.path(tenant, row.ino, row.generation)
        file = OpenFile((stream_id, row.ino, row.generation), tenant, path, ObjectState.DIRTY)
        file.new_name = True
        self._files[row.ino] = file
        if closed:
            self._charge(file)
            self.sealer.closed(file)
            return
        file.mode, file.registered, file.handles = Mode.PASSTHROUGH, True, 1
        handle = Handle(file, flags)
        self._handles[fh] = handle
        if handle.writes:
            file.writers = 1
            self.room.opened(file)

    async def born_released(self, fh: int, *, dropped: bool) -> None:
        """Its creator closed it; `dropped`: the channel let go of the backing file by itself."""
        handle = self._handles.get(fh)
        if handle is not None:
            if dropped:
                handle.file.registered = False
            await self.release(fh)

    def make_backing(self, row: InodeRow) -> None:
        """The backing file of a new file that nobody opens (mknod)."""
        os.close(self._open_backing_of(row))

    def _open_backing_of(self, row: InodeRow) -> int:
        stream_id = stream_of(row.ino)
        tenant = self.volume.tenant_names()[stream_id]
        fd = self.volume.hot.create(self.volume.hot.path(tenant, row.ino, row.generation))
        file = OpenFile(
            (stream_id, row.ino, row.generation),
            tenant,
            self.volume.hot.path(tenant, row.ino, row.generation),
            ObjectState.DIRTY,
        )
        file.new_name = True
        self._files[row.ino] = file
        self.sealer.closed(file)
        return fd

    async def open(self, ino: int, flags: int) -> int:
        """A handle. Opening to write, the catalog knows that the file is dirty before this returns."""
        self._opening[ino] += 1
        try:
            async with self.holding(ino):
                row, file = await self._load(ino)
                if wants_write(flags):
                    await self._make_writable(file, row, keep=not flags & os.O_TRUNC)
                if flags & os.O_TRUNC:
                    await self._truncate(file, 0)
                if file.mode is None:
                    file.mode = await self._choose_mode(file, row, writes=wants_write(flags))
                self._ensure_registered(file, row)
                return self._new_handle(file, flags)
        except BaseException:
            self._forget_unused(ino)
            raise
        finally:
            self._opening[ino] -= 1
            if not self._opening[ino]:
                del self._opening[ino]

    def _forget_unused(self, ino: int) -> None:
        """An open that failed leaves nothing behind; a dirty file stays for the sealer."""
        file = self._files.get(ino)
        if file is None or file.handles or self._opening[ino] > 1:
            return
        if file.dirty:
            self.sealer.closed(file)
        else:
            self._let_go(file)

    async def _load(self, ino: int) -> tuple[InodeRow, OpenFile]:
        stream_id = stream_of(ino)
        with self.volume.catalog.view() as view:
            row = view.get(stream_id, t.INODES, ino)
            obj = view.get(stream_id, t.OBJECTS, (ino, row.generation)) if row is not None else None
            dirty = view.get(stream_id, t.DIRTY, ino) if obj is not None and obj.state == ObjectState.DIRTY else None
        if row is None or obj is None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        file = self._files.get(ino)
        if file is None:
            file = await self._make_file(row, obj, dirty)
            self._files[ino] = file
        file.unlinked = row.nlink == 0
        return row, file

    async def _make_file(self, row: InodeRow, obj: ObjectRow, dirty: DirtyRow | None) -> OpenFile:
        stream_id = stream_of(row.ino)
        tenant = self.volume.tenant_names()[stream_id]
        key = (stream_id, row.ino, row.generation)
        file = OpenFile(key, tenant, self.volume.hot.path(tenant, row.ino, row.generation), obj.state)
        if dirty is not None:
            await self._resume_dirty(file, obj, dirty)
            return file
        file.base = await self.volume.hydrator.open(key, tenant)
        file.base_len = obj.size
        file.whole = False
        return file

    async def _resume_dirty(self, file: OpenFile, obj: ObjectRow, dirty: DirtyRow) -> None:
        """A dirty file from before a restart."""
        file.new_name = True
        file.whole = not dirty.present
        file.noted_partial = not file.whole
        if dirty.present:
            base = None
            if dirty.base_generation:
                base = await self.volume.hydrator.open((file.key[0], file.ino, dirty.base_generation), file.tenant)
                self.volume.handles.detach(base.key)
                base.close_file()
            file.base = await trio.to_thread.run_sync(self.parts.resume, file, obj, dirty, base)
            # A crash may have come between cutting the file and saying so.
            file.base_len = min(dirty.base_len, file.stat().st_size)
            self.parts.forget_behind(file)
        self._charge(file)

    # -- dirty -------------------------------------------------------------------------------------------------

    async def _make_writable(self, file: OpenFile, row: InodeRow, *, keep: bool) -> None:
        """Marks a clean file dirty, durably. `keep`: its bytes are still wanted."""
        file.seal_attempt += 1
        if file.dirty:
            return
        base = file.source
        hydrator, handles = self.volume.hydrator, self.volume.handles
        old_key = file.key
        await hydrator.quiesce_object(old_key)
        await hydrator.attach(base)
        await hydrator.prove(base)
        hydrator.ensure_backing(base)
        # Also where the file is about to be cut: a crash before that leaves the old bytes.
        file.whole = base.fully_resident
        if not file.whole:
            await trio.to_thread.run_sync(self.parts.punch_absent, base)
        present = None if file.whole else tuple(base.masks)
        work = partial(marks.reopen, ino=file.ino, block_bytes=self.block_bytes, present=present)
        reopened = await result_of(self.volume.writer.submit(file.key[0], work, sync=True))
        handles.detach(old_key)
        self._become(file, reopened.row.generation)
        base.path = file.path
        file.state = ObjectState.DIRTY
        file.noted_partial = not file.whole
        if file.whole:
            base.close_file()
            file.base = None
        file.base_len = 0 if file.whole else base.size
        file.charged_bytes = reopened.freed_bytes
        if keep:
            os.utime(file.path, ns=(row.atime_ns, row.mtime_ns))
            file.clean_stamp, file.clean_ns = Stamp.of(os.stat(file.path)), time.time_ns()

    def _become(self, file: OpenFile, generation: int) -> None:
        """The backing file under the name of the generation it is now. Recovery does the same after a crash."""
        path = self.volume.hot.path(file.tenant, file.ino, generation)
        if path != file.path:
            self.volume.env.files.rename(file.path, path)
            file.new_name = True
        file.key, file.path = (file.key[0], file.ino, generation), path

    # -- modes -------------------------------------------------------------------------------------------------

    def _mode_for_writing(self, file: OpenFile, row: InodeRow) -> Mode:
        if not self.passthrough or not file.whole or self._is_special(row):
            return Mode.RANGED
        return Mode.PASSTHROUGH if self.room.lets_pass(file.tenant) else Mode.RANGED

    def _is_special(self, row: InodeRow) -> bool:
        """Whether a write by another user has to take something away from the file: the kernel must ask."""
        if row.mode & SPECIAL_BITS:
            return True
        with self.volume.catalog.view() as view:
            return view.get(stream_of(row.ino), t.XATTRS, (row.ino, CAPABILITY)) is not None

    async def _choose_mode(self, file: OpenFile, row: InodeRow, *, writes: bool) -> Mode:
        if file.dirty:
            if writes:
                return self._mode_for_writing(file, row)
            return Mode.PASSTHROUGH if self.passthrough and file.whole else Mode.RANGED
        base = file.source
        await self.volume.hydrator.attach(base)
        if base.fully_resident and self.passthrough:
            await self.volume.hydrator.prove(base)
            if base.fully_resident:
                self.volume.hydrator.ensure_backing(base)
                return Mode.PASSTHROUGH
        return Mode.RANGED

    def _ensure_registered(self, file: OpenFile, row: InodeRow) -> None:
        if file.registered:
            return
        if file.base is not None:
            file.open_base()
            self.volume.hydrator.ensure_backing(file.base)
            self._register(file, row, file.base.fd)
            return
        fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._register(file, row, fd)
        finally:
            os.close(fd)

    def _register(self, file: OpenFile, row: InodeRow, fd: int) -> None:
        all_present = file.mode is Mode.PASSTHROUGH
        flags = NodeFlags.ALL_PRESENT if all_present else NodeFlags.NONE
        bits = int(flags)
        file.special = self._is_special(row)
        if file.special:
            bits |= NodeFlags.SUID
        count = 0 if all_present or file.base is None else file.base.block_count
        self.kernel.node(
            file.ino, fd, mode=file.mode or Mode.RANGED, flags=bits, block_bytes=self.block_bytes, block_count=count
        )
        file.registered, file.masked, file.told = True, not all_present, 0
        if not all_present and file.base is not None:
            self._tell_present(file)
        if file.dirty:
            self.room.tell_ahead(file, file.stat().st_size)

    def _tell_present(self, file: OpenFile) -> None:
        """The blocks that are here, run by run."""
        base = file.source
        first = 0
        for block in range(base.block_count + 1):
            if block < base.block_count and base.is_ready(block):
                continue
            if block > first:
                self.parts.tell(file, first, block - first)
            first = block + 1

    def _landed(self, key: tuple[int, int, int], first: int, count: int) -> None:
        """Blocks came in: from now on the channel answers for them."""
        file = self._files.get(key[1])
        if file is None or file.base is None or file.base.key != key:
            return
        if file.dirty:  # the quota counts them already, and now they are this file's
            lengths = (file.base.block_len(block) for block in range(first, first + count))
            file.charged_bytes += sum(map(objects.on_disk, lengths))
            self.parts.tell(file, first, count)
            return
        # Every so many blocks one is kept back: reading it comes here, and so the read-ahead hears how far a reader is.
        stop = first + count
        while first < stop:
            milestone = -(-first // MILESTONE_BLOCKS) * MILESTONE_BLOCKS
            self.parts.tell(file, first, min(milestone, stop) - first)
            first = min(milestone, stop) + 1

    def refused(self, ino: int) -> None:
        """The kernel would not pass this file through after all: the channel serves it as a ranged one."""
        file = self._files.get(ino)
        if file is not None:
            file.mode, file.masked = Mode.RANGED, False

    def _new_handle(self, file: OpenFile, flags: int) -> int:
        fh, self._next_fh = self._next_fh, self._next_fh + 1
        handle = Handle(file, flags)
        self._handles[fh] = handle
        file.handles += 1
        if handle.writes:
            file.writers += 1
            self.sealer.wait(file)
            self.room.opened(file)
        self.kernel.handle(file.ino, fh, struct.pack("<QQ", file.ino, flags & 0xFFFFFFFF))
        return fh

    # -- reading and writing -----------------------------------------------------------------------------------

    async def read(self, fh: int, offset: int, length: int) -> bytes:
        file = self.handle(fh).file
        if not file.dirty and file.base is not None:
            data = await self.volume.hydrator.read(file.base, offset, length)
            self._passed(file, offset, length)
            return data
        if not file.whole:
            return await self._read_partly(file, offset, length)
        return await self._pread(file, offset, length)

    async def glance(self, fh: int, offset: int, length: int) -> bytes | None:
        """A few bytes of a clean file that is not here, without what is around them; None: read as usual."""
        file = self.handle(fh).file
        if file.dirty or file.base is None:
            return None
        return await self.volume.hydrator.glance(file.base, offset, length)

    async def make_ready(self, fh: int, offset: int, length: int) -> bool:
        """Whether the channel can answer this read of a clean file by itself now: its blocks are here, and told."""
        file = self.handle(fh).file
        base = file.base
        if file.dirty or base is None or not file.registered or file.mode is not Mode.RANGED or not file.masked:
            return False
        if not length or offset >= base.size or not await self.volume.hydrator.make_ready(base, offset, length):
            return False
        last = (min(offset + length, base.size) - 1) // self.block_bytes
        self.parts.tell(file, offset // self.block_bytes, last + 1 - offset // self.block_bytes)
        return file.registered and file.base is base

    def _passed(self, file: OpenFile, offset: int, length: int) -> None:
        """Blocks that were kept back and are read now need not come here again."""
        base = file.base
        if base is None or not length:
            return
        first, last = offset // self.block_bytes, (offset + length - 1) // self.block_bytes
        for block in range(-(-first // MILESTONE_BLOCKS) * MILESTONE_BLOCKS, last + 1, MILESTONE_BLOCKS):
            if block < base.block_count and base.is_ready(block):
                self.parts.tell(file, block, 1)

    async def _pread(self, file: OpenFile, offset: int, length: int) -> bytes:
        fd = file.open_fd()
        if length <= INLINE_BYTES:
            return os.pread(fd, length, offset)
        return await trio.to_thread.run_sync(os.pread, fd, length, offset)

    async def _read_partly(self, file: OpenFile, offset: int, length: int) -> bytes:
        async with file.io:
            length = max(0, min(length, file.stat().st_size - offset))
            pages = await self._fetch(file, self._absent(file, offset, length))
            if not pages:
                return await self._pread(file, offset, length)
            return await trio.to_thread.run_sync(self._overlay, file, offset, length, pages)

    def _overlay(self, file: OpenFile, offset: int, length: int, pages: dict[int, bytes]) -> bytes:
        data = bytearray(read_exactly(file.open_fd(), offset, length))
        for block, page in pages.items():
            start = block * self.block_bytes
            page = page[: max(0, file.base_len - start)]
            low, high = max(offset, start), min(offset + length, start + len(page))
            if low < high:
                data[low - offset : high - offset] = page[low - start : high - start]
        return bytes(data)

    def _absent(self, file: OpenFile, offset: int, length: int) -> list[int]:
        if not length:
            return []
        first, last = offset // self.block_bytes, (offset + length - 1) // self.block_bytes
        return [block for block in range(first, last + 1) if file.is_absent(block, self.block_bytes)]

    async def _fetch(self, file: OpenFile, blocks: list[int], *, must_land: bool = False) -> dict[int, bytes]:
        """Blocks of the base into the backing file; those that found no room are returned. `file.io` is held."""
        if not blocks or file.base is None:
            return {}
        file.open_base()
        with file.keeping_times():
            pages, _ = await self.volume.hydrator.obtain(file.base, blocks)
        if must_land and pages:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pages

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        handle = self.handle(fh)
        file = handle.file
        more = len(self._half_covered(file, offset, len(data))) * self.block_bytes
        async with self.room.admit(file, offset, len(data), more=more), file.io:
            self.parts.touch(file, offset, len(data))
            await self._bring(file, self._half_covered(file, offset, len(data)))
            done = await self._pwrite(file, offset, data)
            self._note_written(file, offset, done)
            return done

    async def fetch(self, file: OpenFile, blocks: list[int]) -> dict[int, bytes]:
        """Brings blocks of a dirty file here, as far as there is room; those that found none. `file.io` is held."""
        return await self._fetch(file, blocks)

    async def _bring(self, file: OpenFile, blocks: list[int]) -> None:
        """The blocks are here; room was made for them before. `file.io` is held."""
        for block, page in (await self._fetch(file, blocks)).items():
            start = block * self.block_bytes
            await self._pwrite(file, start, page[: max(0, file.base_len - start)])
            file.source.take_over(block)
            self.parts.tell(file, block, 1)

    def _half_covered(self, file: OpenFile, offset: int, length: int) -> list[int]:
        """The absent blocks of which a write leaves something standing."""
        end = offset + length
        out = []
        for block in self._absent(file, offset, length):
            start = block * self.block_bytes
            stop = min(start + self.block_bytes, file.base_len)
            if offset > start or end < stop:
                out.append(block)
        return out

    async def _pwrite(self, file: OpenFile, offset: int, data: bytes) -> int:
        fd = file.open_fd()
        if len(data) <= INLINE_BYTES:
            self.volume.env.files.pwrite(fd, data, offset)
        else:
            await trio.to_thread.run_sync(self.volume.env.files.pwrite, fd, data, offset)
        return len(data)

    def _note_written(self, file: OpenFile, offset: int, length: int) -> None:
        base = file.base
        if base is None or not length:
            return
        first, last = offset // self.block_bytes, (offset + length - 1) // self.block_bytes
        for block in range(first, min(last + 1, base.block_count)):
            file.written.add(block)
            if not base.is_ready(block):
                base.take_over(block)
                self.parts.tell(file, block, 1)
        if last >= base.block_count:
            self.parts.tell(file, max(first, base.block_count), last + 1 - max(first, base.block_count))

    # -- size --------------------------------------------------------------------------------------------------

    async def truncate(self, ino: int, size: int) -> None:
        """Cuts or extends, open or not."""
        self._opening[ino] += 1
        try:
            async with self.holding(ino):
                row, file = await self._load(ino)
                await self._make_writable(file, row, keep=size > 0)
                await self._truncate(file, size)
        finally:
            self._forget_unused(ino)
            self._opening[ino] -= 1
            if not self._opening[ino]:
                del self._opening[ino]

    async def _truncate(self, file: OpenFile, size: int) -> None:
        self.room.let_go(file)
        await self._cut(file, size)
        await self.recharge(file)

    async def _cut(self, file: OpenFile, size: int) -> None:
        block = size // self.block_bytes
        cuts = size % self.block_bytes and file.is_absent(block, self.block_bytes)
        async with self.room.admit(file, size, 0, more=self.block_bytes if cuts else 0), file.io:
            self.parts.touch_all_from(file, min(size, file.stat().st_size))
            if file.whole:
                os.truncate(file.path, size)
                return
            shorter = size < file.base_len
            if shorter and size % self.block_bytes and file.is_absent(block, self.block_bytes):
                await self._bring(file, [block])
            file.base_len = min(file.base_len, size)
            os.truncate(file.path, size)
            if shorter:
                self.parts.forget_behind(file)
            self._become_whole_if_so(file)
            if shorter:  # a crash must not bring back what was cut, behind what is written there from now on
                await trio.to_thread.run_sync(self._sync_backing, file)
                await self._note_present(file)

    def _become_whole_if_so(self, file: OpenFile) -> None:
        base = file.base
        if base is None or file.clearing:  # parts of it are being taken
            return
        count = -(-min(file.base_len, base.size) // self.block_bytes)
        if all(base.is_ready(block) for block in range(count)):
            base.close_file()
            file.base, file.whole, file.base_len = None, True, 0
            file.written = set()
            self.parts.tell(file, 0, max(1, -(-file.stat().st_size // self.block_bytes)))

    async def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        """Space for a range, or holes and zeros in it, on a ranged file. Reserves before a byte is taken."""
        file = self.handle(fh).file
        if not file.dirty:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        takes_only = not mode & ~FALLOC_KEEP_SIZE
        if not file.whole and not takes_only:
            await self._fill_or_refuse(file)
        taken = 0 if mode & FALLOC_PUNCH_HOLE else length
        async with self.room.admit(file, offset, taken), file.io:
            if not takes_only:
                if not file.whole:
                    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
                self.parts.touch_all_from(file, offset)  # some modes move what is behind the range
            await trio.to_thread.run_sync(fallocate, file.open_fd(), mode, offset, length)
        await self.recharge(file)

    async def _fill_or_refuse(self, file: OpenFile) -> None:
        """Holes and zeros are made in files that are here whole; one that cannot be has none."""
        try:
            await self.fill(file)
        except OSError as e:
            if e.errno in NO_ROOM:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)) from None
            raise

    async def seek(self, fh: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE. Of a file that is not all here nothing is known to be a hole but its end."""
        file = self.handle(fh).file
        size = file.stat().st_size if file.dirty or file.base is None else file.base.size
        if offset >= size:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        if file.dirty and file.whole:
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.lseek(fd, offset, whence)
            finally:
                os.close(fd)
        return offset if whence == os.SEEK_DATA else size

    async def drop_kernel_pages(self, ino: int) -> None:
        """The kernel gives up what it remembers of the file's bytes."""
        self.kernel.invalidate_inode(ino)

    # -- durability --------------------------------------------------------------------------------------------

    async def fsync(self, ino: int) -> None:
        """Bytes and records of this file are on the disk when this returns."""
        file = self._files.get(ino)
        if file is not None and file.dirty:
            await self._collect(file)
            async with file.io:
                present = () if file.base is None else tuple(file.base.masks)
                await trio.to_thread.run_sync(self._sync_backing, file)
                if present or file.noted_partial:
                    await self._note_present(file, present, sync=True)
                    return
        await self.sync_log(stream_of(ino))

    async def _note_present(
        self, file: OpenFile, present: tuple[int, ...] | None = None, *, sync: bool = False
    ) -> None:
        """Records which blocks are here, and up to where the others count. They are synced, and `file.io` is held."""
        if present is None:
            present = () if file.base is None else tuple(file.base.masks)
        work = partial(marks.note_present, ino=file.ino, base_len=file.base_len, present=present)
        await result_of(self.volume.writer.submit(file.key[0], work, sync=sync))
        file.noted_partial = bool(present)

    def _sync_backing(self, file: OpenFile) -> None:
        files = self.volume.env.files
        fd = files.open_ro(file.path)
        try:
            files.fsync(fd)
        finally:
            files.close(fd)
        if file.new_name:
            files.fsync_dir(file.path.parent)
            file.new_name = False

    async def sync_log(self, stream_id: int) -> None:
        await result_of(self.volume.writer.submit(stream_id, lambda b: None, sync=True))

    async def sync_all(self) -> None:
        """syncfs: everything dirty and the logs."""
        for file in self.dirty_files():
            await self.fsync(file.ino)
        for stream_id in self.volume.tenant_names():
            await self.sync_log(stream_id)

    async def recharge(self, file: OpenFile) -> None:
        """The quota counts the file as it is now."""
        await self._collect(file)
        self._charge(file)

    async def collect(self, file: OpenFile) -> None:
        await self._collect(file)

    async def _collect(self, file: OpenFile) -> None:
        """What the channel wrote by itself becomes known here."""
        if file.mode is Mode.RANGED and file.registered:
            granted = file.granted_bytes
            written = await self.kernel.collect(file.ino)
            for first, count in written.ranges:
                file.written.update(range(first, first + count))
                self.parts.touch_blocks(file, first, count)
            # The answer knows nothing of what was granted after the question.
            file.budget = written.budget_left + file.granted_bytes - granted if file.registered else 0

    # -- closing -----------------------------------------------------------------------------------------------

    async def release(self, fh: int) -> None:
        handle = self._handles.pop(fh, None)
        if handle is None:
            return
        file = handle.file
        async with self.holding(file.ino):
            if handle.writes:
                await self._collect(file)
            file.handles -= 1
            file.writers -= handle.writes
            if handle.writes:
                self.room.closed(file)
                self._charge(file)
                self.kernel.invalidate_attr(file.ino)  # stores through a mapping told nobody
            if file.handles:
                return
            self._closed(file)
            if file.unlinked:
                await self._drop_orphan(file)

    def _closed(self, file: OpenFile) -> None:
        if file.registered:
            self.kernel.drop(file.ino)
        file.registered, file.masked, file.mode = False, False, None
        if file.budget:
            file.budget, file.window_bytes = 0, 0
            self._charge(file)
        file.close_fd()
        if file.unlinked or self._opening.get(file.ino):
            return
        if file.dirty:
            self.sealer.closed(file)
        else:
            self._let_go(file)

    def _let_go(self, file: OpenFile) -> None:
        """Clean and closed: the catalog knows everything."""
        if file.base is not None:
            self.volume.hydrator.close(file.base)
            file.base = None
        self._files.pop(file.ino, None)

    def _charge(self, file: OpenFile) -> None:
        """The quota counts what a dirty file takes on the disk, and what is promised to its writers. What the channel
        wrote of its budget is to be collected first, or it counts twice."""
        if not file.dirty:
            return
        try:
            now_bytes = os.stat(file.path).st_blocks * 512
        except FileNotFoundError:
            now_bytes = 0
        now_bytes += file.budget + file.pending_bytes
        change, file.charged_bytes = now_bytes - file.charged_bytes, now_bytes
        if change > 0:
            self.volume.quota.note_used(file.tenant, change)
        elif change < 0:
            self.volume.evictor.give_back(file.tenant, -change)

    def charge(self, file: OpenFile) -> None:
        self._charge(file)

    # -- removal -----------------------------------------------------------------------------------------------

    async def removed(self, row: InodeRow) -> None:
        """The last name of a regular file is gone; its bytes go with it, or with the last close."""
        file = self._files.get(row.ino)
        if file is not None and file.handles:
            file.unlinked = True
            return
        if file is not None:
            self._discard(file)
        stream_id = stream_of(row.ino)
        key = (stream_id, row.ino, row.generation)
        with self.volume.catalog.view() as view:
            obj = view.get(stream_id, t.OBJECTS, (row.ino, row.generation))
        if obj is None:
            self.volume.handles.forget(key)
            tenant = self.volume.tenant_names()[stream_id]
            path = self.volume.hot.path(tenant, row.ino, row.generation)
            if file is None or not file.dirty:
                held = await trio.to_thread.run_sync(data_bytes, path) if key in self.parts.sealed else None
                freed = await trio.to_thread.run_sync(self.volume.remove_backing, key)
                self.parts.sealed.discard(key)
                self.volume.evictor.give_back(tenant, freed if held is None else held)
            else:
                self.volume.hot.unlink(path)

    def _discard(self, file: OpenFile) -> None:
        """A file that nobody has open is forgotten, and what it was charged given back."""
        file.seal_attempt += 1
        self.sealer.wait(file)
        file.close_fd()
        if file.dirty:
            self.volume.evictor.give_back(file.tenant, file.charged_bytes)
            if file.base is not None:
                file.base.close_file()
        elif file.base is not None:
            self.volume.hydrator.close(file.base)
        file.base = None
        self._files.pop(file.ino, None)

    async def _drop_orphan(self, file: OpenFile) -> None:
        """The last close of a file without a name."""
        work = partial(namespace.drop_orphan, ino=file.ino)
        path = file.path
        was_dirty = file.dirty
        row = await result_of(self.volume.writer.submit(file.key[0], work))
        self._discard(file)
        if was_dirty:
            self.volume.hot.unlink(path)
        elif row is not None:
            await self.removed(row)

    async def fill(self, file: OpenFile) -> None:
        """Fetches what a partly fetched dirty file still lacks."""
        async with file.io:
            if file.base is not None:
                count = -(-min(file.base_len, file.base.size) // self.block_bytes)
                absent = [block for block in range(count) if file.is_absent(block, self.block_bytes)]
                await self._fetch(file, absent, must_land=True)
            self._become_whole_if_so(file)

    async def adopt(self, ino: int) -> None:
        """A dirty file from before a restart: it is sealed, unless somebody opens it first."""
        async with self.holding(ino):
            _, file = await self._load(ino)
            if not file.handles:
                self.sealer.closed(file)

    def nameless(self, ino: int) -> None:
        """Another file took its last name. Whoever looked that up a moment ago may still open this one."""
        file = self._files.get(ino)
        if file is not None:
            file.unlinked = True
            if not file.handles:
                file.seal_attempt += 1
                self.sealer.wait(file)

    async def drop_nameless(self, ino: int) -> None:
        """The kernel forgot a file without a name: its bytes go, unless it is open after all."""
        async with self.holding(ino):
            if self.is_open(ino):
                return
            file = self._files.get(ino)
            if file is not None:
                await self._drop_orphan(file)
                return
            work = partial(namespace.drop_orphan, ino=ino)
            row = await result_of(self.volume.writer.submit(stream_of(ino), work))
            if row is not None:
                await self.removed(row)

    def linked(self, ino: int) -> None:
        """A file without a name got one again (O_TMPFILE, then link)."""
        file = self._files.get(ino)
        if file is not None:
            file.unlinked = False

    # -- sealing -----------------------------------------------------------------------------------------------

    async def seal_closed(self, inos: Collection[int] | None = None) -> int:
        """Seals what is closed and dirty now; how many files."""
        return await self.sealer.seal_now(inos)

    def sealed(self, file: OpenFile, row: ObjectRow, disk_bytes: int) -> None:
        """The sealer is done with a file: it is clean, and the catalog counts so much of it."""
        if file.base is not None:
            file.base.close_file()
            self.volume.pages.drop_object(file.ino, file.key[2])
            self.parts.sealed.add(file.key)
        change = disk_bytes - file.charged_bytes
        if change > 0:
            self.volume.quota.note_used(file.tenant, change)
        elif change < 0:
            self.volume.evictor.give_back(file.tenant, -change)
        self._files.pop(file.ino, None)
