"""hot_cache: one backing file an object, `hot_cache/<tenant>/<object>.<generation>`.

Chunk k of an object is the range [k · chunk_bytes, (k + 1) · chunk_bytes) of its file. A file that is only partly here
is sparse. Which blocks are here is the catalog's to say, never the file's.

Invariants
- Nothing is punched or unlinked while a reader could see it behind the engine's back: `exclusive` takes a write lease,
  which the kernel refuses while another descriptor or a mapping is open.
- The log says "evicted" durably before a byte is given up. So a crash can leave a file the catalog does not know: an
  orphan, removed when met; never the other way round.

Owner: blocking calls, made on worker threads; safe from several at once for different objects.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, os_error
from aof2.engine.fds import opened
from aof2.engine.local.spares import Spares

# Python has posix_fallocate only.
_libc: Final = ctypes.CDLL(None, use_errno=True)
FALLOC_KEEP_SIZE: Final = 1
FALLOC_PUNCH_HOLE: Final = 2
PROBE_BYTES: Final = 128 << 10
_probe: Final = [bytearray(1)]
FS_IOC_GETFLAGS: Final = 0x80086601
FS_IOC_SETFLAGS: Final = 0x40086602
FS_NOATIME_FL: Final = 0x80


class Identity(NamedTuple):
    """What a backing file looked like when its bytes were last known to be right."""

    inode: int
    size: int
    mtime_ns: int


class HotCache:
    """The folder of backing files."""

    def __init__(self, env: Env, root: Path) -> None:
        self.env = env
        self.root = root
        self._root_text = str(root)
        self.spares = Spares(env, root)

    def leave_access_times(self) -> None:
        """Backing files made from here on keep their access time: a read need not move it (SEMANTICS.md, 19), and each
        one through the kernel would spend time on it."""
        self.env.make_dirs(self.root)
        for folder in (self.root, *(path for path in self.root.iterdir() if path.is_dir())):
            with contextlib.suppress(OSError):  # not every filesystem has flags
                _set_noatime(folder)

    def path(self, tenant: str, ino: int, generation: int) -> Path:
        return Path(self.path_text(tenant, ino, generation))

    def path_text(self, tenant: str, ino: int, generation: int) -> str:
        """The same for what is done with every small file: to make a Path takes longer than to open it."""
        return f"{self._root_text}/{tenant}/{ino}.{generation}"

    def create(self, path: Path, size: int = 0) -> int:
        """A new backing file, sparse, of `size` bytes. A leftover of the same name is an orphan and goes."""
        self.env.make_dirs(path.parent)
        fd = self._create_of_spare(path) if size else -1  # without bytes its time would be an old one
        if fd < 0:
            with contextlib.suppress(FileNotFoundError):
                self.env.files.unlink(path)
            fd = self.env.files.create(path)
        if size:
            self.env.files.truncate(fd, size)
        return fd

    def _create_of_spare(self, path: Path) -> int:
        """-1: there is none."""
        for spare in self.spares.take(1):
            with contextlib.suppress(FileNotFoundError):
                self.env.files.rename(Path(spare), path)  # over what was left under the name
                return self.env.files.open_rw(path)
        return -1

    def open(self, path: Path) -> int:
        return self.env.files.open_rw(path)

    @staticmethod
    def identity(fd: int) -> Identity:
        s = os.fstat(fd)
        return Identity(s.st_ino, s.st_size, s.st_mtime_ns)

    def identity_of(self, path: Path) -> Identity | None:
        """Of the file of this name, if there is one."""
        try:
            s = os.stat(path)
        except FileNotFoundError:
            return None
        return Identity(s.st_ino, s.st_size, s.st_mtime_ns)

    @contextlib.contextmanager
    def exclusive(self, path: Path) -> Iterator[bool]:
        """Whether no other descriptor or mapping of the file is open; holds new opens off until the block ends."""
        with opened(path, os.O_RDWR) as fd:
            try:
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.EACCES, errno.EINVAL):
                    raise
                yield False
                return
            try:
                yield True
            finally:
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def unlink(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.env.files.unlink(path)

    def retire(self, path: Path) -> None:
        """The file goes; its inode is kept for another."""
        with contextlib.suppress(FileNotFoundError):
            if not self.spares.keep(path):
                self.env.files.unlink(path)

    def punch(self, path: Path, offset: int, length: int) -> None:
        """Gives a range back to the disk; it reads as zeros, which no reader may see."""
        with self.env.files.closing(self.open(path)) as fd:
            clear_range(fd, offset, length)


def _set_noatime(folder: Path) -> None:
    """What is made in the folder inherits it."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        flags = array.array("L", [0])
        fcntl.ioctl(fd, FS_IOC_GETFLAGS, flags)
        if not flags[0] & FS_NOATIME_FL:
            flags[0] |= FS_NOATIME_FL
            fcntl.ioctl(fd, FS_IOC_SETFLAGS, flags)


def clear_range(fd: int, offset: int, length: int) -> None:
    fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, offset, length)


def read_exactly(fd: int, offset: int, length: int, *, path: str = "") -> bytes:
    """`length` bytes at `offset`, or CorruptError: a backing file shorter than its object lost something."""
    parts: list[bytes] = []
    left, at = length, offset
    while left:
        part = os.pread(fd, left, at)
        if not part:
            raise CorruptError(f"backing file ends {left} bytes early", path=path, offset=at)
        parts.append(part)
        left, at = left - len(part), at + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(fd: int, view: memoryview, offset: int, *, path: str = "") -> None:
    """As many bytes as fit there, or CorruptError."""
    done = 0
    while done < len(view):
        with view[done:] as rest:
            got = os.preadv(fd, [rest], offset + done)
        if not got:
            raise CorruptError(f"backing file ends {len(view) - done} bytes early", path=path, offset=offset + done)
        done += got


def read_cached(fd: int, offset: int, length: int) -> bytes | None:
    """The bytes if the kernel seems to have them all in memory, so that reading does not wait for the disk; else None.

    A byte every 128 KiB is asked for first, without waiting. That is a sample: the rare gap between two costs the loop
    one disk access; reading into a buffer of our own to be certain would cost every read a copy.
    """
    probe = _probe
    try:
        for at in range(offset, offset + length, PROBE_BYTES):
            if os.preadv(fd, probe, at, os.RWF_NOWAIT) != 1:
                return None
        if os.preadv(fd, probe, offset + length - 1, os.RWF_NOWAIT) != 1:
            return None
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    data = os.pread(fd, length, offset)
    return data if len(data) == length else None


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    if _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        code = ctypes.get_errno()
        raise os_error(code)
