"""Unlinks that are answered before the catalog has them: the daemon's side of `engine/files/unlinklog.py`.

`rm -rf` asks for one thing after the other, so each commit would hold one name, and a thread change each way. Here an
unlink is a record in a log and a look at the rows; the catalog gets them many at a time. Every other operation that
could see the difference waits for that first (`catch_up`), so nobody does.

Invariants
- A record is in the log (the page cache: it survives this process) before its request is answered.
- What is not the only name of a closed regular file goes the usual way.
- A fold under way is finished, whoever stops waiting for it.

Owner: the trio thread. A crash leaves unlink logs, which recovery folds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow, stream_of
from aof2.engine.errors import Aof2Error
from aof2.engine.files import unlinklog
from aof2.engine.files.unlinklog import Unlink
from aof2.engine.local.reserve import is_no_room

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

FOLD_AFTER_S: Final = 0.1  # nobody waits for it; a burst is folded in few commits
WAITING_MAX: Final = 2048
LOG_BYTES_MAX: Final = 64 << 20
HELD_BYTES: Final = 512 << 10  # of a log, what is on the disk ahead of its end
AGAIN_S: Final = 1.0  # where the disk is full


class _Log:
    """One tenant's unlink log, and what of it is not folded."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.number = 0
        self.fd = -1
        self.end = 0
        self.held_to = 0
        self.position = 0  # as the catalog has it
        self.waiting: list[Unlink] = []


class Unlinks:
    """What was unlinked and is still in the catalog."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._logs: dict[int, _Log] = {}
        self._names: dict[tuple[int, bytes], int] = {}
        self._inos: set[int] = set()
        self._touched: dict[int, int] = {}  # directories → when their last name went
        self._lock = trio.Lock()
        self._woken = trio.Event()
        self._failed = False
        self.folded_files = 0

    # -- the log -----------------------------------------------------------------------------------------------

    async def start(self, stream_ids: Iterable[int]) -> None:
        """A log for each of these tenants."""
        volume = self._files.volume
        volume.env.make_dirs(volume.state_dir / "births")
        for stream_id in stream_ids:
            self._logs[stream_id] = _Log(stream_id)
            await self._open_log(self._logs[stream_id])
            self._hold_ahead(self._logs[stream_id])

    async def _open_log(self, one: _Log) -> None:
        """The next number's, from the start; the catalog knows that it is this one's turn."""
        volume = self._files.volume
        with volume.catalog.view() as view:
            position = view.get(one.stream_id, t.COUNTERS, unlinklog.POSITION) or 0
        number = (position >> unlinklog.POSITION_SHIFT) + 1
        work = partial(unlinklog.fold, unlinks=(), position=number << unlinklog.POSITION_SHIFT)
        await result_of(volume.writer.submit(one.stream_id, work))
        path = volume.state_dir / "births" / unlinklog.log_name(one.stream_id, number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = volume.env.essential(lambda: os.open(path, flags, 0o600))
        self._close_log(one)
        one.number, one.fd, one.end, one.held_to = number, fd, 0, 0
        one.position = number << unlinklog.POSITION_SHIFT

    def _hold_ahead(self, one: _Log) -> None:
        """The log has its next bytes on the disk. Without them a record may fail, and the unlink goes the usual way."""
        if one.fd >= 0 and one.held_to - one.end < HELD_BYTES // 2:
            with contextlib.suppress(OSError):
                self._files.volume.env.files.allocate_ahead(one.fd, one.end, HELD_BYTES)
                one.held_to = one.end + HELD_BYTES

    def _close_log(self, one: _Log) -> None:
        if one.fd >= 0:
            os.close(one.fd)
            path = self._files.volume.state_dir / "births" / unlinklog.log_name(one.stream_id, one.number)
            if not self._failed and not one.waiting:
                path.unlink(missing_ok=True)
        one.fd = -1

    def close(self) -> None:
        """After the last fold."""
        for one in self._logs.values():
            self._close_log(one)
        self._logs = {}

    # -- taking ------------------------------------------------------------------------------------------------

    def take(self, parent: int, name: bytes) -> InodeRow | None:
        """The inode without its name, once that is in the log; None: the usual way. ENOENT where it is gone already."""
        volume, one = self._files.volume, self._logs.get(stream_of(parent))
        if one is None or one.fd < 0 or self._failed or len(self._names) >= WAITING_MAX:
            return None
        if volume.read_only_reason:
            return None
        if (parent, name) in self._names:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        with volume.catalog.view() as view:
            entry = view.get(one.stream_id, t.DENTRIES, (parent, name))
            row = view.get(one.stream_id, t.INODES, entry.ino) if entry is not None else None
        if row is None or not stat.S_ISREG(row.mode) or row.nlink != 1:
            return None
        now_ns = volume.env.now_ns()
        if self._files.is_open(row.ino) or self._files.is_held(row.ino):
            return None
        if not self._note(one, parent, name, row.ino, now_ns):
            return None
        return msgspec.structs.replace(row, nlink=0, ctime_ns=now_ns, parent=parent, last_name=name)

    def _note(self, one: _Log, parent: int, name: bytes, ino: int, now_ns: int) -> bool:
        data = unlinklog.pack(parent, name, ino, now_ns)
        try:
            if os.pwrite(one.fd, data, one.end) != len(data):
                return False  # what is there of it is written over, or fails its checksum
        except OSError:
            return False
        one.end += len(data)
        one.waiting.append(Unlink(parent, name, ino, now_ns, one.end))
        self._names[parent, name] = ino
        self._inos.add(ino)
        self._touched[parent] = now_ns
        self._files.volume.foreground.removed()
        self._woken.set()
        return True

    def is_gone(self, parent: int, name: bytes) -> bool:
        return (parent, name) in self._names

    def is_nameless(self, ino: int) -> bool:
        """Whether the row that the catalog has of this inode is of before."""
        return ino in self._inos

    def as_told(self, row: InodeRow) -> InodeRow:
        """The row as it is once everything is folded; not of one that `is_nameless`."""
        last_ns = self._touched.get(row.ino)
        if last_ns is None or last_ns <= row.mtime_ns:
            return row
        return msgspec.structs.replace(row, mtime_ns=last_ns, ctime_ns=max(last_ns, row.ctime_ns))

    # -- folding -----------------------------------------------------------------------------------------------

    def behind(self) -> bool:
        """Whether something was unlinked that the catalog still has."""
        return bool(self._names) and not self._failed

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while not self._failed:
            await self._woken.wait()
            self._woken = trio.Event()
            await trio.sleep(FOLD_AFTER_S)
            try:
                await self.catch_up()
            except (Aof2Error, OSError):  # said where it happened
                await trio.sleep(AGAIN_S)
                self._woken.set()

    async def catch_up(self) -> None:
        """Returns when everything unlinked before this call is out of the catalog."""
        if not self.behind():
            return
        async with self._lock:
            with trio.CancelScope(shield=True):
                try:
                    for one in self._logs.values():
                        await self._fold_log(one)
                except (Aof2Error, OSError) as e:
                    if is_no_room(e):
                        # They stay gone: the records are in their log, and are folded when the disk has room again.
                        log.warning("unlinked files wait for room on the disk", extra={"error": str(e)})
                        raise
                    # The names are back until the next start, when recovery folds the rest.
                    log.critical("unlinked files are still in the catalog", extra={"error": str(e)})
                    self._failed = True
                    raise

    async def _fold_log(self, one: _Log) -> None:
        volume = self._files.volume
        waiting = one.waiting[:]
        futures, after = [], one.position
        for first in range(0, len(waiting), unlinklog.BATCH_FILES):
            group = waiting[first : first + unlinklog.BATCH_FILES]
            position = one.number << unlinklog.POSITION_SHIFT | group[-1].end
            work = partial(unlinklog.fold, unlinks=group, position=position, is_open=self._files.is_open, after=after)
            futures.append((group, position, volume.writer.submit(one.stream_id, work)))
            after = position
        for group, position, future in futures:
            rows = await result_of(future)
            one.position = position
            for gone in group:
                self._names.pop((gone.parent, gone.name), None)
                self._inos.discard(gone.ino)
            del one.waiting[: len(group)]
            if not self._names:
                self._touched.clear()
            for row in rows:
                await trio.lowlevel.checkpoint()
                self._files.removal.removed(row)
            self.folded_files += len(group)
        self._hold_ahead(one)
        if one.end > LOG_BYTES_MAX and not one.waiting:
            await self._open_log(one)
