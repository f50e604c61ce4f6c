"""The world outside the process, in one place: clock, randomness, durable file operations, failpoints.

Everything in the engine that touches time or makes bytes durable takes an `Env`, so that tests replay a seed, step the
clock, kill the process at a named instruction and drop whatever had not been synced.

Invariants
- A name is durable only after `fsync_dir` of its folder; bytes only after `fsync` of their file. Callers say both.
- A failed fsync raises FatalIOError, and is never tried again on the same file.
- Space is taken by `preallocate` before a mapping is written: a store into a hole on a full disk is SIGBUS.

Owner: stateless; shared by all threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from aof2 import native
from aof2.engine import synced
from aof2.engine.errors import FatalIOError, LandingError
from aof2.engine.fds import opened
from aof2.engine.local.reserve import Reserve, is_no_room

T = TypeVar("T")

_CLOCK_REALTIME_COARSE: Final = 5  # linux/time.h; Python does not name it

SMALL_BYTES: Final = 64 << 10
# posix_fallocate moves the end of the file.
_libc: Final = ctypes.CDLL(None, use_errno=True)
_FALLOC_FL_KEEP_SIZE: Final = 1


class Files:
    """The file operations that matter for durability. Tests subclass it to remember what was synced."""

    def create(self, path: Path, mode: int = 0o600) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)

    def open_rw(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def open_ro(self, path: Path | str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    @contextlib.contextmanager
    def closing(self, fd: int) -> Iterator[int]:
        try:
            yield fd
        finally:
            self.close(fd)

    def preallocate(self, fd: int, offset: int, length: int) -> None:
        """Reserves the range on disk (ENOSPC now, not SIGBUS later) and grows the file to hold it."""
        os.posix_fallocate(fd, offset, length)

    def allocate_ahead(self, fd: int, offset: int, length: int) -> None:
        """Reserves the range on disk, also behind the file's end, which stays where it is. A filesystem that cannot do
        that has no such promise to give: it is left at that."""
        if _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length)):
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
                raise OSError(code, os.strerror(code))

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        """All of it or an OSError: a short write goes on where it stopped."""
        view = memoryview(data).cast("B")
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        """Several buffers one behind the other, in one call where the kernel takes them."""
        done = os.pwritev(fd, buffers, offset)
        for data in buffers:
            if done < len(data):
                self.pwrite(fd, memoryview(data)[done:], offset + done)
            offset += len(data)
            done = max(0, done - len(data))

    def receive(
        self,
        sock: int,
        fd: int,
        offset: int,
        length: int,
        scratch: bytearray,
        *,
        timeout_s: float,
        piece_bytes: int,
        begun: bytes,
    ) -> list[int]:
        """Bytes off a socket into the file, behind those of the first piece that `begun` are there; the crc64 of each
        piece. OSErrors of the file are LandingErrors."""
        came = native.receive(
            sock, fd, offset, length, scratch, timeout_s=timeout_s, piece_bytes=piece_bytes, begun=begun
        )
        if came.ending is native.Ending.ALL:
            return came.crc64s
        if came.ending is native.Ending.FILE:
            raise LandingError(OSError(came.error, os.strerror(came.error)))
        if came.ending is native.Ending.SILENT:
            raise TimeoutError(f"nothing came for {timeout_s:g} s")
        if came.ending is native.Ending.ENDED:
            raise ConnectionResetError("the answer ended early")
        raise OSError(came.error, os.strerror(came.error))

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Asks the kernel to begin writing the range out; it promises nothing."""
        synced.start_writeback(fd, offset, length)

    def fsync(self, fd: int) -> None:
        with _fatal_sync():
            os.fsync(fd)

    def fsync_all(self, fds: Sequence[int]) -> None:
        """Files of one filesystem, many at the price of one where that can be (`synced.py`)."""
        with _fatal_sync():
            synced.fsync_all(fds, self.fsync)

    def fdatasync(self, fd: int) -> None:
        """For bytes that replace others of the file: the filesystem's journal, which holds up syncs of all of its
        files, is not asked."""
        with _fatal_sync():
            os.fdatasync(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)  # noqa: PTH104

    def cut(self, path: Path) -> None:
        os.truncate(path, 0)

    def unlink(self, path: Path) -> None:
        os.unlink(path)  # noqa: PTH108

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        os.mkdir(path, mode)  # noqa: PTH102

    def fsync_dir(self, path: Path) -> None:
        with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            self.fsync(fd)


@contextlib.contextmanager
def _fatal_sync() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise FatalIOError(f"fsync failed: {e.strerror}; the disk no longer keeps what it is given") from e


def _coarse_ns() -> int:
    """The clock of the kernel's file timestamps: ours and those of backing files can be compared."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


class Env:
    """Clock, randomness, files and failpoints for one engine."""

    def __init__(
        self,
        *,
        files: Files | None = None,
        seed: int | None = None,
        now_ms: Callable[[], int] | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = files or Files()
        self.rng = random.Random(seed)  # noqa: S311 (jitter and tests, no secrets)
        self.now_ms = now_ms or (lambda: time.time_ns() // 1_000_000)
        self.now_ns = _coarse_ns if now_ms is None else lambda: now_ms() * 1_000_000
        self.monotonic_s = monotonic_s
        self.reserve: Reserve | None = None  # the open volume's

    def essential(self, call: Callable[[], T], *, keep: int = 0) -> T:
        """What must work on a full disk: tried again with room from the reserve, down to `keep` units of it."""
        while True:
            try:
                return call()
            except OSError as e:
                if not is_no_room(e) or self.reserve is None or not self.reserve.give(keep=keep):
                    raise

    def failpoint(self, name: str) -> None:
        """A named instruction at which tests end the process. Names are listed in each module's CRASH_POINTS."""

    def make_dirs(self, path: Path) -> None:
        """The folder and its missing parents, durable: what is synced into it later cannot vanish with its name."""
        if path.is_dir():
            return
        self.make_dirs(path.parent)
        with contextlib.suppress(FileExistsError):
            self.essential(partial(self.files.mkdir, path))
        self.files.fsync_dir(path.parent)

    def replace_file(
        self, path: Path, data: bytes | Sequence[bytes | bytearray], *, mode: int = 0o600, point: str = ""
    ) -> None:
        """Puts `data`, or its pieces one behind the other, at `path` so that a crash leaves the old bytes or the new,
        whole: temp, fsync, rename, fsync dir.

        `point` prefixes the failpoints (`<point>.temp`, `.synced`, `.renamed`). A crash may leave `<path>.tmp`, which
        the next call replaces.
        """
        temp = path.with_name(path.name + ".tmp")
        if temp.exists():
            self.files.unlink(temp)
        pieces = [data] if isinstance(data, bytes) else data
        # Small files are what stops and starts take. A large one (a snapshot) may use up half of the reserve, no more.
        keep = 0 if sum(map(len, pieces)) <= SMALL_BYTES or self.reserve is None else self.reserve.units_wanted // 2
        with self.files.closing(self.essential(partial(self.files.create, temp, mode), keep=keep)) as fd:
            at = 0
            for piece in pieces:
                self.essential(partial(self.files.pwrite, fd, piece, at), keep=keep)
                at += len(piece)
            self._point(point, "temp")
            self.files.fsync(fd)
        self._point(point, "synced")
        self.essential(partial(self.files.rename, temp, path))
        self._point(point, "renamed")
        self.files.fsync_dir(path.parent)

    def _point(self, prefix: str, step: str) -> None:
        if prefix:
            self.failpoint(f"{prefix}.{step}")
