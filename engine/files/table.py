"""Files of tenants of kind `files`: create, open, read, write, truncate, close, whatever tier their bytes are in.

    closed, clean ── open to read ──► passthrough (here whole) or ranged (the rest is fetched)
         ▲        ── open to write ─► the same, and dirty: the catalog says so, durably, before the open is answered
         └── sealed in the background after the last writer's close (`seal.py`)

It opens and closes; what is read and written goes through a handle (`handle.py`), and the rest is done by

    state.py    a file, and the states it goes through        atchannel.py   what the channel was told of it
    known.py    which files there are, and who holds one      content.py     reading, writing, fetching
    loading.py  from the catalog to a file, clean to dirty    sizes.py       cutting, extending, holes
    modes.py    passthrough or ranged, what the channel knows durability.py  fsync
    charges.py  what the quota counts                         removal.py     files without a name
    room.py     room for writers                              parts.py       files larger than the cache
    kept.py     which pages the kernel may keep               cold.py        reading past the caches
    reading.py  who reads while parts are elsewhere           copying.py     copy_file_range

Invariants
- One backing file an inode, one mode for all who have it open (`atchannel.py`).
- A dirty file's size and times are its backing file's; a clean one's are the catalog's.
- Nothing here waits for the remote but reads and partial writes of what is not here.

Owner: the trio thread; blocking file work on worker threads.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog.rows import InodeRow, ObjectRow
from aof2.engine.errors import os_error
from aof2.engine.files.atchannel import NOT_OPEN, AtChannel
from aof2.engine.files.charges import Charges
from aof2.engine.files.cold import ColdFiles
from aof2.engine.files.content import Content
from aof2.engine.files.durability import Durability
from aof2.engine.files.handle import Handle
from aof2.engine.files.kept import KeptPages
from aof2.engine.files.known import Known
from aof2.engine.files.loading import Loader
from aof2.engine.files.modes import Modes
from aof2.engine.files.parts import Parts
from aof2.engine.files.reading import Reading
from aof2.engine.files.recover import set_immutable
from aof2.engine.files.removal import Removal
from aof2.engine.files.room import WriteRoom
from aof2.engine.files.seal import Sealer
from aof2.engine.files.sizes import Sizes
from aof2.engine.files.state import Kernel, Mode, OpenFile, stream_of, wants_write
from aof2.engine.kinds.opens import Opens
from aof2.engine.runs import runs_of
from aof2.engine.tiering.recent import units_of

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

INODES_AT_ONCE: Final = 64  # clean files that make way when the disk runs out of inodes


async def _keep_privileges(_: int) -> None:
    """Of files without any."""


class HandleListener:
    """Hears of each handle."""

    def handle_given(self, file: OpenFile, fh: int) -> None:
        """Its file is open."""

    def handle_closed(self, file: OpenFile, fh: int) -> None:
        """The last one, where the file has no handles now."""


class Files:
    """The files that are open or unsealed, and what can be done with them."""

    def __init__(
        self,
        volume: Volume,
        kernel: Kernel,
        opens: Opens | None = None,
        kill_privileges: Callable[[int], Awaitable[object]] = _keep_privileges,
        make_loader: Callable[[Files], Loader] = Loader,
        listener: HandleListener | None = None,
    ) -> None:
        self.volume = volume
        self.kernel = kernel
        self.kill_privileges = kill_privileges  # another user writes to a file with suid, sgid or capabilities
        self.block_bytes = volume.settings.engine.block_bytes
        self._recency = volume.recent.hot
        self._opens = Opens() if opens is None else opens
        self.open_count = 0
        self._stopped: set[int] = set()  # by `refuse_writes`
        self._listener = listener or HandleListener()
        self.known = Known()
        self.kept = KeptPages()
        self.parts = Parts(self)
        self.room = WriteRoom(self)
        self.sealer = Sealer(self)
        self.charges = Charges(self)
        self._loader = make_loader(self)
        self.modes = Modes(self)
        self.content = Content(self)
        self.cold = ColdFiles(volume, kernel, self.content.patience)
        self.durability = Durability(self)
        self.sizes = Sizes(self)
        self._reading = Reading(self)
        self.removal = Removal(self)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The background: sealing what was closed, watching what grows."""
        try:
            with self.volume.hydrator.heard_by(self):
                async with trio.open_nursery() as nursery:
                    await nursery.start(self.sealer.run)
                    await nursery.start(self.room.run)
                    await nursery.start(self.cold.reads.run)
                    task_status.started()
        finally:
            for file in self.known.all():
                self.room.watch.let_go(file)
                self._let_write(file)  # the mount is gone, and no writer is left on it
                file.close_fd()
                if file.dirty and file.base is not None:
                    file.base.close_file()

    def refuse_writes(self) -> int:
        """The volume is another's: who has a file open for writing gets an error from here on; how many files."""
        for file in self.known.all():
            if file.writers and set_immutable(file.path, on=True):  # until its last writer closed, or recovery
                self._stopped.add(file.ino)
        return len(self._stopped)

    def _let_write(self, file: OpenFile) -> None:
        """What `refuse_writes` did to the file is over."""
        if file.ino in self._stopped:
            self._stopped.discard(file.ino)
            set_immutable(file.path, on=False)

    def check_writable(self, ino: int) -> None:
        self.volume.check_writable(stream_of(ino))

    def handle(self, fh: int) -> Handle:
        handle = self._opens.get(fh)
        if not isinstance(handle, Handle):
            raise os_error(errno.EBADF)
        return handle

    def _put(self, handle: Handle) -> None:
        self._opens.put(handle.fh, handle)
        self.open_count += 1

    # -- creating ----------------------------------------------------------------------------------------------

    async def create(
        self, parent: int, name: bytes, flags: int, *, mode: int, uid: int, gid: int
    ) -> tuple[InodeRow, int]:
        """A new, empty file, open."""
        work = partial(namespace.create, name=name, mode=mode, uid=uid, gid=gid)
        return await self._create(parent, work, flags)

    async def create_unnamed(self, parent: int, flags: int, *, mode: int, uid: int, gid: int) -> tuple[InodeRow, int]:
        """A new, empty file without a name, open: gone with its last close unless it is linked."""
        work = partial(namespace.create_unnamed, mode=mode, uid=uid, gid=gid)
        row, fh = await self._create(parent, work, flags)
        self.handle(fh).file.unlinked = True
        return row, fh

    async def create_closed(self, parent: int, name: bytes, *, mode: int, uid: int, gid: int) -> InodeRow:
        """A new, empty file without a handle (mknod)."""
        row = await self._make_row(parent, partial(namespace.create, name=name, mode=mode, uid=uid, gid=gid))
        file, fd = self._make_new(row)
        os.close(fd)
        self._recency.touched(row.ino)
        self.sealer.closed(file)
        return row

    async def _make_row(self, parent: int, work: Callable[..., InodeRow]) -> InodeRow:
        self.check_writable(parent)
        await self.admit_file()
        new = partial(work, parent=parent, chunk_bytes=self.volume.settings.engine.chunk_bytes)
        return await result_of(self.volume.writer.submit(stream_of(parent), new))

    async def _create(self, parent: int, work: Callable[..., InodeRow], flags: int) -> tuple[InodeRow, int]:
        row = await self._make_row(parent, work)
        file, fd = self._make_new(row)
        try:
            mode = self.modes.for_writing(file, row)
            file.channel = AtChannel(mode, write_only=flags & os.O_ACCMODE == os.O_WRONLY)
            self.modes.register(file, row, fd)
        finally:
            os.close(fd)
        return row, self._new_handle(file, flags, new=True)

    def _make_new(self, row: InodeRow) -> tuple[OpenFile, int]:
        """A new file and its backing file, open."""
        file = self._loader.new(row)
        # The row is there: it must not be without its file.
        fd = self.volume.env.essential(partial(self.volume.hot.create, file.path))
        file.mappable = False  # until a handle is given that can be
        self.known.add(file)
        return file, fd

    async def admit_file(self) -> None:
        """ENOSPC where the disk has no inode for a new file, or no room for its name. Clean files make way."""
        disk = self.volume.disk
        disk.admit_name()
        if disk.lacks_inodes():
            await self.volume.evictor.free_inodes(INODES_AT_ONCE)
            if disk.lacks_inodes():
                raise os_error(errno.ENOSPC)

    def born_closed(self, rows: Sequence[InodeRow]) -> None:
        """Files that the channel created, and that are closed again already."""
        files = [self._loader.new(row) for row in rows]
        for file in files:
            self.known.add(file)
            self._recency.touched(file.ino)
        self.charges.charge_all(files)
        self.sealer.closed_all(files)

    def born(self, row: InodeRow, fh: int, flags: int) -> None:
        """A file that the channel created, and passes through."""
        file = self._loader.new(row)
        self.known.add(file)
        self._recency.touched(row.ino)
        write_only = flags & os.O_ACCMODE == os.O_WRONLY
        file.channel = AtChannel(Mode.PASSTHROUGH, write_only=write_only, appends=bool(flags & os.O_APPEND))
        file.channel.registered, file.handles = True, 1
        file.mappable = flags & os.O_ACCMODE == os.O_RDWR
        handle = Handle(self, fh, file, flags)
        self._put(handle)
        if handle.writes:
            file.writers = 1
            self.room.watch.opened(file)  # the channel watches it already, where there is a brake
            self.charges.charge(file)

    async def born_released(self, fh: int, *, dropped: bool) -> None:
        """Its creator closed it; `dropped`: the channel let go of the backing file by itself."""
        handle = self._opens.find(fh)
        if isinstance(handle, Handle):
            if dropped:
                handle.file.channel.registered = False
            await self.release(fh)

    # -- opening -----------------------------------------------------------------------------------------------

    async def open(self, ino: int, flags: int) -> int:
        """A handle. Opening to write, the catalog knows that the file is dirty before this returns."""
        if wants_write(flags) or flags & os.O_TRUNC:
            self.check_writable(ino)
        reads = flags & os.O_ACCMODE != os.O_WRONLY
        with self.known.opening(ino) as going:
            try:
                if going:
                    await self._until_removed(ino)
                if reads:
                    await self._reading.until_readable(ino)
                async with self.known.holding(ino):
                    row, file = await self._loader.load(ino)
                    self._take_opened(file)
                    if wants_write(flags):
                        self.kept.forget(ino)
                        await self._loader.make_writable(file, row, keep=not flags & os.O_TRUNC)
                    if flags & os.O_TRUNC:
                        await self.sizes.truncate(file, 0)
                    write_only = not reads and (
                        file.channel.write_only if file.handles else await self._reading.is_unmapped(file)
                    )
                    if file.channel is NOT_OPEN:
                        file.channel = AtChannel(await self.modes.choose(file, row, writes=wants_write(flags)))
                    file.channel.write_only = write_only
                    self.modes.ensure_registered(file, row)
                    return self._new_handle(file, flags)
            except BaseException:
                self._forget_unused(ino)
                raise

    async def take_opened(self, fh: int) -> None:
        """A handle that the channel gave by itself, and told of, is in the table when this returns, and all others of
        its file."""
        ino = self.kernel.told_open_of(fh)
        if not ino:
            return
        with self.known.opening(ino):
            try:
                async with self.known.holding(ino):
                    self._take_opened((await self._loader.load(ino))[1])
            except BaseException:
                self._forget_unused(ino)
                raise

    def _take_opened(self, file: OpenFile) -> None:
        """What the channel opened by itself, to read a clean file, is as if it was opened here."""
        for fh, flags in self.kernel.told_opens(file.ino):
            if file.channel is NOT_OPEN:
                file.channel = AtChannel(Mode.PASSTHROUGH)
                file.channel.registered = True
                self.kept.forget(file.ino)
            self._put(Handle(self, fh, file, flags))
            file.handles += 1

    def used(self, inos: Iterable[int]) -> None:
        """The channel opened these by itself."""
        for ino in inos:
            self._recency.used(ino)
            self.volume.hydrator.fetcher.windows.used(ino)

    async def truncate(self, ino: int, size: int) -> None:
        """Cuts or extends, open or not."""
        self.check_writable(ino)
        with self.known.opening(ino) as going:
            try:
                if going:
                    await self._until_removed(ino)
                async with self.known.holding(ino):
                    row, file = await self._loader.load(ino)
                    self._take_opened(file)
                    self.kept.forget(ino)
                    await self._loader.make_writable(file, row, keep=size > 0)
                    await self.sizes.truncate(file, size)
            finally:
                self._forget_unused(ino)

    async def _until_removed(self, ino: int) -> None:
        """Returns when the batch that was told that it may remove the inode is committed, or has failed."""
        await result_of(self.volume.writer.submit(stream_of(ino), lambda b: None))
        self.known.went(ino)

    def _forget_unused(self, ino: int) -> None:
        """An open that failed leaves nothing behind; a dirty file stays for the sealer."""
        file = self.known.get(ino)
        if file is None or file.handles or self.known.openers(ino) > 1:
            return
        if not file.channel.registered:
            file.closed()  # the next open chooses its mode anew
        self._seal_or_let_go(file)

    def _new_handle(self, file: OpenFile, flags: int, *, new: bool = False) -> int:
        fh = self._opens.new_number()
        keeps_pages = self.kept.opened(file, fh)
        if not wants_write(flags) and file.channel.mode is Mode.RANGED and self.cold.opened(file, fh):
            keeps_pages = False  # and is no use of it: a cold scan leaves the caches as they are
        elif new:
            self._recency.touched(file.ino)
        else:
            self._recency.used(file.ino)
        handle = Handle(self, fh, file, flags, keeps_pages=keeps_pages)
        self._put(handle)
        file.handles += 1
        if handle.writes:
            file.writers += 1
            file.mappable = file.mappable or flags & os.O_ACCMODE == os.O_RDWR
            file.channel.appends = file.channel.appends or bool(flags & os.O_APPEND)
            self.sealer.wait(file)
            self.room.opened(file, flags)
        self.kernel.handle(file.ino, fh, struct.pack("<QQ", file.ino, flags & 0xFFFFFFFF))
        self._listener.handle_given(file, fh)
        return fh

    async def adopt(self, ino: int) -> None:
        """A dirty file from before a restart: it is sealed, unless a caller opens it first."""
        async with self.known.holding(ino):
            _, file = await self._loader.load(ino)
            if not file.handles:
                self.sealer.closed(file)

    def landed(self, key: tuple[int, int, int], first: int, count: int) -> None:
        """Blocks came in."""
        file = self.known.get(key[1])
        if file is not None and file.base is not None and file.base.key == key:
            self.modes.landed(file, first, count)

    async def lost(self, key: tuple[int, int, int], blocks: list[int]) -> None:
        """Blocks turned out bad, or gone: the channel answers for them no more."""
        self.kept.forget(key[1])
        file = self.known.get(key[1])
        if file is None:
            return
        if file.channel is not NOT_OPEN:
            file.channel.doubted = True
        if file.base is None or file.base.key != key:
            return
        if file.channel.registered and file.channel.masked:
            for first, count in runs_of(sorted(blocks)):
                await self.kernel.clear(file.ino, first, count)
        self.kernel.invalidate_inode(file.ino)

    def refused(self, ino: int) -> None:
        """The kernel would not pass this file through after all: the channel serves it as a ranged one."""
        file = self.known.get(ino)
        if file is not None and file.channel is not NOT_OPEN:
            file.channel.mode, file.channel.masked = Mode.RANGED, False

    # -- closing -----------------------------------------------------------------------------------------------

    async def release(self, fh: int) -> None:
        handle = self._opens.pop(fh)
        if not isinstance(handle, Handle):
            return
        self.open_count -= 1
        file = handle.file
        if not self.cold.is_cold(fh):
            self._recency.touched(file.ino)
        self.cold.released(fh)
        async with self.known.holding(file.ino):
            self.kept.released(file.ino, fh)
            if handle.writes:
                await self.charges.collect(file)
            file.handles -= 1
            file.writers -= handle.writes
            if not file.writers:
                self._let_write(file)
            if handle.writes:
                self.room.closed(file)
                self.charges.charge(file)
                self.kernel.invalidate_attr(file.ino)  # the kernel reports no stores through a mapping
            if file.handles:
                self._listener.handle_closed(file, fh)
                if handle.writes and file.sealable:
                    self.sealer.closed(file)
                return
            self._closed(file)
            self._listener.handle_closed(file, fh)
            if file.unlinked:
                await self.removal.closed_nameless(file)

    def _closed(self, file: OpenFile) -> None:
        channel = file.closed()
        if channel.registered:
            self.kernel.drop(file.ino)
        if channel.closed is not None:
            channel.closed.set()
        if channel.budget:
            self.charges.give_back_budget(file)
        file.close_fd()
        if not file.unlinked and not self.known.openers(file.ino):
            self._seal_or_let_go(file)

    def _seal_or_let_go(self, file: OpenFile) -> None:
        """No handle is open. A clean file is forgotten: the catalog knows all of it."""
        if file.dirty:
            self.sealer.closed(file)
            return
        if file.base is not None:
            self.volume.hydrator.close(file.base)
        self.known.forget(file)

    # -- bytes -------------------------------------------------------------------------------------------------

    async def make_present(self, ino: int, offset: int, length: int) -> None:
        """A passthrough writer goes back into what was uploaded: it is here again when this returns."""
        file = self.known.get(ino)
        if file is not None and file.dirty:
            await self.content.make_present(file, offset, length)

    async def drop_kernel_pages(self, ino: int) -> None:
        """The kernel gives up what it remembers of the file's bytes, by the next open at the latest."""
        self.kept.forget(ino)
        self.kernel.invalidate_inode(ino)

    # -- removal and sealing -----------------------------------------------------------------------------------

    async def sealed(self, file: OpenFile, row: ObjectRow, disk_bytes: int) -> None:
        """The sealer is done with a file: it is clean, and the catalog counts so much of it. Under `Known.holding`."""
        self.volume.pages.drop_object(file.ino, file.key[2])  # of before: blocks that were fetched while it was written
        if file.base is not None:
            file.base.close_file()
            self.parts.sealed.add(file.key)
        self.charges.sealed(file, disk_bytes)
        self._recency.sized(file.ino, units_of(disk_bytes))
        if file.handles:
            await self._loader.clean(file)
        else:
            self.known.forget(file)
