"""Files that the channel creates by itself: the daemon's side (`native/channel/births.h` says how it works).

Directories in which many files are made become nests: the channel is told their names, and from then on answers for
names that are not among them. New directories are nests from the start. What it created it has written to the birth
log; `catch_up` folds that into the catalog, and every operation does so first where something is waiting, so nobody
sees a tree that lacks a file.

Owner: the trio thread. A crash leaves birth logs, which recovery folds (`engine/files/birthlog.py`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow, stream_of
from aof2.engine.errors import Aof2Error
from aof2.engine.files import birthlog
from aof2.engine.files.birthlog import Birth, Release
from aof2.engine.kinds.kernel import Kernel, KernelGoneError, NestAction
from aof2.engine.local.reserve import is_no_room
from aof2.native.sharedpage import SharedPage

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

INOS_GRANTED: Final = 1 << 16
NEST_AFTER: Final = 4  # creates in one directory that came here
NEST_AGAIN: Final = 256
NAMES_MAX: Final = 50_000
NAMES_PAGE: Final = 1024
MESSAGE_BYTES: Final = 60_000
# Folding takes the processor from those who create: it begins when nothing was born for a moment, or much waits.
FOLD_AFTER_S: Final = 0.05
FOLD_LATEST_S: Final = 1.0
FOLD_BYTES: Final = 2 << 20
STREAMS_MAX: Final = 16
AGAIN_S: Final = 1.0  # where the disk is full
# Of a log, what is on the disk ahead of its end; below HELD_MIN nothing is born: closes must still be recorded.
HELD_BYTES: Final = 1 << 20
HELD_MIN: Final = 256 << 10
INODES_MIN: Final = 256  # with fewer left on the disk, files are made one by one
S_ISGID: Final = 0o2000


class _Log:
    """One tenant's birth log."""

    def __init__(self, stream_id: int, slot: int, number: int, fd: int) -> None:
        self.stream_id = stream_id
        self.slot = slot
        self.number = number
        self.fd = fd
        self.taken = 0
        self.held_to = 0
        self.inos_end = 0
        self.granted = 0
        self.position = 0  # as the catalog has it
        self.unfolded = 0  # bytes of records that were read
        self.births: list[Birth] = []  # read, and not folded
        self.releases: dict[int, Release] = {}


class Births:
    """What was born and is not in the catalog yet."""

    def __init__(self, files: Files, kernel: Kernel) -> None:
        self._files = files
        self._channel = kernel
        self._logs: list[_Log] = []
        self._page: SharedPage | None = None
        self._folded = 0
        self._lock = trio.Lock()
        self._woken = trio.Event()
        self._made: Counter[int] = Counter()
        self._nursery: trio.Nursery | None = None
        self._stopped = False
        self._failed = False
        self._ended = False
        self.folded_files = 0

    # -- starting ----------------------------------------------------------------------------------------------

    async def start(self, stream_ids: Iterable[int]) -> None:
        """Gives the channel what it needs to create files of these tenants."""
        fd = os.memfd_create("aof2-births", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._page = SharedPage(fd)
        self._channel.birth_page(fd)
        os.close(fd)
        for slot, stream_id in enumerate(islice(stream_ids, STREAMS_MAX)):
            await self._open_log(stream_id, slot)

    async def _open_log(self, stream_id: int, slot: int) -> None:
        volume = self._files.volume
        folder, hot = volume.state_dir / "births", volume.hot.root / volume.tenant_names()[stream_id]
        volume.env.make_dirs(folder)
        volume.env.make_dirs(hot)
        with volume.catalog.view() as view:
            position = view.get(stream_id, t.COUNTERS, birthlog.POSITION) or 0
        number = (position >> birthlog.POSITION_SHIFT) + 1
        work = partial(birthlog.fold, births=(), position=number << birthlog.POSITION_SHIFT, chunk_bytes=0)
        await result_of(volume.writer.submit(stream_id, work))
        path = folder / birthlog.log_name(stream_id, number)
        fd = volume.env.essential(lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.ftruncate(fd, 0)
        one = _Log(stream_id, slot, number, fd)
        one.position = number << birthlog.POSITION_SHIFT
        self._logs.append(one)
        self._hold_ahead(one)
        hot_fd = os.open(hot, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._channel.birth_dir(stream_id, slot, hot_fd)
        finally:
            os.close(hot_fd)
        self._channel.birth_log(stream_id, 0, fd)
        await self._grant(one)

    async def _grant(self, one: _Log) -> None:
        volume = self._files.volume
        inodes = volume.disk.inodes()
        # Never more than the disk has: the channel does not ask before it makes a file.
        one.granted = INOS_GRANTED if inodes is None else min(INOS_GRANTED, inodes.room // (2 * len(self._logs)))
        work = partial(birthlog.reserve_inos, count=one.granted)
        first = await result_of(volume.writer.submit(one.stream_id, work))
        volume.unborn_from.setdefault(one.stream_id, first)
        one.inos_end = first + one.granted
        self._channel.birth_inos(one.stream_id, first, one.granted)

    def close(self) -> None:
        """After the last fold: the logs are empty of news and go."""
        for one in self._logs:
            path = self._files.volume.state_dir / "births" / birthlog.log_name(one.stream_id, one.number)
            os.close(one.fd)
            if not self._failed and not self.behind():
                path.unlink(missing_ok=True)
        self._logs = []

    # -- nests -------------------------------------------------------------------------------------------------

    def created(self, parent: int) -> None:
        """A create came here. Where many do, the channel takes over."""
        if self._nursery is None or not self._logs or self._failed:
            return
        if self._stopped and self._may_pass():
            self._stopped = False
            for one in self._logs:
                self._nursery.start_soon(self._grant, one)
        self._made[parent] += 1
        made = self._made[parent]
        if made == NEST_AFTER or made % NEST_AGAIN == 0:
            self._nursery.start_soon(self._open_nest, parent)
        if len(self._made) > NAMES_PAGE:
            self._made.clear()

    async def _open_nest(self, ino: int) -> None:
        volume = self._files.volume
        if not self._may_pass():
            return
        with volume.catalog.view() as view:
            row = namespace.inode(view, stream_of(ino), ino)
        if row is None:
            return
        gid = row.gid if row.mode & S_ISGID else None
        try:
            if not await self._channel.nest(ino, NestAction.OPEN, gid):
                return
            if not await trio.to_thread.run_sync(self._send_names, ino):
                await self._channel.nest(ino, NestAction.END)
                return
            await self._channel.nest(ino, NestAction.SERVE)
        except KernelGoneError:
            return  # the mount is going

    def _send_names(self, ino: int) -> bool:
        """All names of the directory to the channel; False when they are too many."""
        packed, sent, after = bytearray(), 0, None
        while True:
            with self._files.volume.catalog.view() as view:
                page = namespace.list_dir(view, stream_of(ino), ino, after, NAMES_PAGE)
            for name, _ in page:
                if len(packed) + len(name) + 1 > MESSAGE_BYTES:
                    trio.from_thread.run_sync(self._channel.names, ino, bytes(packed))
                    packed.clear()
                packed.append(len(name))
                packed += name
            sent += len(page)
            if sent > NAMES_MAX:
                return False
            if len(page) < NAMES_PAGE:
                break
            after = page[-1][0]
        trio.from_thread.run_sync(self._channel.names, ino, bytes(packed))
        return True

    # -- folding -----------------------------------------------------------------------------------------------

    def behind(self) -> bool:
        """Whether something was born that the catalog does not know."""
        if self._page is None or self._failed:
            return False
        return self._total() != self._folded

    def _total(self) -> int:
        return self._page.total() if self._page is not None else 0

    def wake(self) -> None:
        """The channel has recorded something."""
        self._woken.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                self._arm()
                if not self.behind():
                    await self._woken.wait()
                self._woken = trio.Event()
                await self._pause()
                try:
                    await self.catch_up()
                except (Aof2Error, OSError, KernelGoneError):
                    if self._failed:
                        return  # said where it happened
                    await trio.sleep(AGAIN_S)

    async def _pause(self) -> None:
        """Until a burst of births pauses, or becomes too long to wait for."""
        latest_s = trio.current_time() + FOLD_LATEST_S
        before = -1
        while before != (total := self._total()) and trio.current_time() < latest_s:
            if total - self._folded > FOLD_BYTES:
                return
            before = total
            await trio.sleep(FOLD_AFTER_S)

    def _stop(self) -> None:
        """The channel creates nothing by itself any more, until it gets inode numbers again."""
        self._stopped = True
        for one in self._logs:
            self._channel.birth_inos(one.stream_id, namespace.root_ino(one.stream_id), 0)

    def pause(self) -> None:
        """The channel creates nothing by itself until a create that came here went well again."""
        self._stop()

    def stop_for_good(self) -> None:
        """The volume takes nothing more: neither does the channel."""
        self._ended = True
        self._stop()

    def _may_pass(self) -> bool:
        if self._ended:
            return False
        names = self._files.volume.tenant_names()
        if self._files.room.is_behind or self._is_short():
            return False
        return all(self._files.room.lets_pass(names[one.stream_id]) for one in self._logs)

    def _is_short(self) -> bool:
        """Whether the disk has little left: then files come one by one, and what was made ahead is given back."""
        disk = self._files.volume.disk
        inodes = disk.inodes()
        short = inodes is not None and inodes.room < INODES_MIN
        return short or not disk.has_room_for_names() or any(one.held_to - one.taken < HELD_MIN for one in self._logs)

    def _hold_ahead(self, one: _Log) -> None:
        """The log has its next bytes on the disk: what the channel creates and closes by itself is recorded, also when
        the disk is full by then."""
        files = self._files.volume.env.files
        if one.held_to - one.taken < HELD_BYTES // 2:
            with contextlib.suppress(OSError):  # the channel is stopped, once this is used up
                files.allocate_ahead(one.fd, one.taken, HELD_BYTES)
                one.held_to = one.taken + HELD_BYTES

    def _arm(self) -> None:
        if self._page is not None:
            self._page.arm()

    async def catch_up(self) -> None:
        """Returns when everything born before this call is in the catalog."""
        async with self._lock:
            # Who asked may be gone before it is done: a fold is done all the same, nobody can begin it again.
            with trio.CancelScope(shield=True):
                try:
                    while self.behind() and await self._fold_all():
                        pass
                except (Aof2Error, OSError, KernelGoneError) as e:
                    if is_no_room(e):
                        self._wait_for_room(e)
                    else:
                        self._give_up(e)
                    raise

    def _wait_for_room(self, e: BaseException) -> None:
        """The records stay in their log, and are folded when the disk has room again."""
        log.warning("new files wait for room on the disk", extra={"error": str(e)})
        with contextlib.suppress(KernelGoneError):
            self._stop()

    def _give_up(self, e: Exception) -> None:
        """What is here is served; recovery folds the rest."""
        log.critical("new files are not in the catalog yet", extra={"error": str(e)})
        self._failed = True
        with contextlib.suppress(KernelGoneError):
            self._stop()

    async def _fold_all(self) -> bool:
        """Whether there was anything. A channel that was killed may have counted more or less than it has written."""
        return any([await self._fold_log(one) for one in self._logs])

    async def _fold_log(self, one: _Log) -> bool:
        if self._page is None:
            return False
        if self._page.end(one.slot) == one.taken and not one.births and not one.releases:
            return False
        start = one.taken
        end = self._page.take(one.slot)
        data = os.pread(one.fd, end - start, start)
        one.taken = end
        for record in birthlog.parse(data, start):
            if isinstance(record, Birth):
                one.births.append(record)
            else:
                one.releases[record.fh] = record
        one.unfolded += end - start
        await self._fold(one)
        self._folded += one.unfolded
        one.unfolded = 0
        return True

    async def _fold(self, one: _Log) -> None:
        """What was read. What fails stays, and is tried again."""
        volume = self._files.volume
        waiting, after = [], one.position
        last_ino = one.births[-1].ino if one.births else 0
        for first in range(0, len(one.births), birthlog.BATCH_FILES):
            group = one.births[first : first + birthlog.BATCH_FILES]
            position = one.number << birthlog.POSITION_SHIFT | group[-1].end
            chunk_bytes = volume.settings.engine.chunk_bytes
            work = partial(birthlog.fold, births=group, position=position, chunk_bytes=chunk_bytes, after=after)
            waiting.append((group, position, volume.writer.submit(one.stream_id, work)))
            after = position
        for group, position, future in waiting:
            rows = await result_of(future)
            one.position = position
            del one.births[: len(group)]
            for birth, row in zip(group, rows, strict=True):
                self._adopt(birth, row, one.releases.pop(birth.fh, None))
            self.folded_files += len(group)
        while one.releases:
            fh, release = next(iter(one.releases.items()))
            await self._files.born_released(release.fh, dropped=release.dropped)
            del one.releases[fh]
        self._hold_ahead(one)
        with contextlib.suppress(KernelGoneError):  # the mount is gone: what was born is folded all the same
            if not self._may_pass():
                self._stop()
            elif last_ino + one.granted // 4 > one.inos_end:
                await self._grant(one)

    def _adopt(self, birth: Birth, row: InodeRow | None, release: Release | None) -> None:
        if row is None:
            return  # said in the log; its backing file is an orphan
        self._files.born(row, birth.fh, birth.flags, closed=release is not None)
        if release is not None and not release.dropped:
            self._channel.drop(birth.ino)
