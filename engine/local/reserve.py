"""The reserve: files that hold room on the disk of state_dir for what must work when there is none left.

Removing, evicting and unmounting write, too: records in the log, rows, a snapshot. `reserve/` keeps bytes and inodes
for them, which other users of the disk cannot take: files of one log chunk's size, allocated, never written. A log that
gets no new file takes one of these by rename; what else meets a full disk and must not fail (`Env.essential`) has one
deleted and tries again. When there is room again, what was given is taken back.

Invariants
- A unit is allocated zeros: as a log chunk it is as good as a new one.
- The reserve is filled only from room that is there beyond what `Disk` keeps free for everything else.
- Nothing that can be refused draws on it: new names and new bytes get ENOSPC before (`local/disk.py`).

Owner: any thread, under its lock; filled by a task of the volume. A crash leaves the units there are; one that is cut
short is deleted when the reserve is opened.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aof2.engine.locks import thread_lock

if TYPE_CHECKING:
    from aof2.engine.env import Files

log = logging.getLogger(__name__)

FOLDER: Final = "reserve"
UNITS_MIN: Final = 16
UNITS_MAX: Final = 32
# Of the disk's bytes, and of its inodes, at most one in so many.
SHARE: Final = 50
NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))


def is_no_room(e: BaseException) -> bool:
    """Whether the disk, or a quota on it, is full."""
    return isinstance(e, OSError) and e.errno in NO_ROOM


class Reserve:
    """Room that is held back. `open` first."""

    def __init__(self, files: Files, folder: Path, unit_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._unit_bytes = unit_bytes
        self._lock = thread_lock()
        self._units: list[Path] = []
        self._next = 0
        self.units_wanted = UNITS_MIN
        self.given = 0  # units, since it was opened

    @property
    def units(self) -> int:
        return len(self._units)

    @property
    def is_whole(self) -> bool:
        return len(self._units) >= self.units_wanted

    def open(self) -> None:
        """Finds what an earlier process kept. Makes nothing: the disk may be full."""
        with contextlib.suppress(FileNotFoundError, OSError):
            self._folder.mkdir(mode=0o700, parents=True)
        space = space_of(self._folder.parent)
        if space is not None:
            by_bytes = space.f_blocks * space.f_frsize // SHARE // self._unit_bytes
            by_inodes = space.f_files // SHARE if space.f_files else UNITS_MAX
            self.units_wanted = max(UNITS_MIN, min(UNITS_MAX, by_bytes, by_inodes))
        with self._lock, contextlib.suppress(OSError):
            for path in sorted(self._folder.iterdir()):
                if path.name.isdecimal() and self._is_allocated(path):
                    self._units.append(path)
                    self._next = max(self._next, int(path.name) + 1)
                else:
                    self._files.unlink(path)

    def _is_allocated(self, path: Path) -> bool:
        info = path.stat()
        return info.st_size == self._unit_bytes and info.st_blocks * 512 >= self._unit_bytes

    def fill(self, *, keep_bytes: int, keep_inodes: int) -> bool:
        """Takes what is missing while that much stays free; whether it is whole. Blocks."""
        while not self.is_whole:
            space = space_of(self._folder.parent)
            if space is None or space.f_bavail * space.f_frsize < keep_bytes + self._unit_bytes:
                return False
            if space.f_files and space.f_favail <= keep_inodes:
                return False
            if not self._add():
                return False
        return True

    def _add(self) -> bool:
        with self._lock:
            path = self._folder / str(self._next)
            self._next += 1
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = self._files.create(path)
        except OSError:
            return False
        try:
            self._files.preallocate(fd, 0, self._unit_bytes)
        except OSError:
            self._files.unlink(path)
            return False
        finally:
            self._files.close(fd)
        with self._lock:
            self._units.append(path)
        return True

    def take(self, path: Path) -> bool:
        """A unit gets this name; False when there is none."""
        return self._draw(lambda unit: self._files.rename(unit, path))

    def give(self, *, keep: int = 0) -> bool:
        """Deletes a unit, so that its bytes and its inode are free; False when no more than `keep` are left."""
        return self._draw(self._files.unlink, keep)

    def _draw(self, use: Callable[[Path], None], keep: int = 0) -> bool:
        with self._lock:
            while len(self._units) > keep:
                with contextlib.suppress(FileNotFoundError):
                    use(self._units.pop())
                    self._note_given()
                    return True
        return False

    def loosen(self, *, inodes: int, size_bytes: int) -> None:
        """Gives until so much is free, half of it at most: a start makes small files that cannot ask one by one."""
        while (space := space_of(self._folder.parent)) is not None:
            enough = not space.f_files or space.f_favail >= inodes
            if enough and space.f_bavail * space.f_frsize >= size_bytes:
                return
            if not self.give(keep=self.units_wanted // 2):
                return

    def _note_given(self) -> None:
        self.given += 1
        if len(self._units) == self.units_wanted - 1 or not self._units:
            left = len(self._units)
            log.info("the disk is full: its reserve is drawn on", extra={"folder": str(self._folder), "left": left})


def space_of(path: Path) -> os.statvfs_result | None:
    """None: the filesystem does not answer."""
    try:
        return os.statvfs(path)
    except OSError:
        return None
