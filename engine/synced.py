"""Many files of one filesystem made durable at once: each fsync waits for the disk's cache to be flushed.

    few of them                            one by one
    little else is to be written out       syncfs: all of the filesystem
    ext4 with a journal                    their bytes are written out; then one commit of the journal, which flushes
                                           the disk, takes along every change of a file before it
    elsewhere                              one by one

Invariant: when `fsync_all` returns, each file is as durable as after an fsync of its own; an error of any is raised.

Owner: stateless; any thread. A crash leaves some of them synced.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

SYNC_ALL_FILES: Final = 32
SYNC_ALL_DIRTY_BYTES: Final = 64 << 20
JOURNAL_FILES: Final = 8

# Python has neither syncfs nor sync_file_range.
_libc: Final = ctypes.CDLL(None, use_errno=True)
_WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE: only begins
_WRITTEN: Final = 7  # WAIT_BEFORE | WRITE | WAIT_AFTER: what is dirty now is on the disk, or its error is known


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Asks the kernel to begin writing the range out, so that a later fsync finds less to do.

    It promises nothing, and an error that matters is met by that fsync.
    """
    _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _WRITE)


def fsync_all(fds: Sequence[int], fsync: Callable[[int], None]) -> None:
    """`fsync` is how one of them is synced. OSError."""
    if len(fds) >= SYNC_ALL_FILES and dirty_bytes() <= SYNC_ALL_DIRTY_BYTES:
        _checked(_libc.syncfs(fds[0]))
    elif len(fds) >= JOURNAL_FILES and has_journal(os.fstat(fds[0]).st_dev):
        _commit_journal(fds, fsync)
    else:
        for fd in fds:
            fsync(fd)


def _commit_journal(fds: Sequence[int], fsync: Callable[[int], None]) -> None:
    for fd in fds:
        start_writeback(fd, 0, 0)
    for fd in fds:
        _checked(_libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WRITTEN))
    # A file that is made now belongs to the newest transaction: its fsync commits that, and so all before it.
    folder = Path(f"/proc/self/fd/{fds[0]}").readlink().parent
    try:
        newest = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # no inode is left, or the folder is gone
        for fd in fds:
            fsync(fd)
        return
    try:
        fsync(newest)
    finally:
        os.close(newest)


@functools.cache
def has_journal(device: int) -> bool:
    """Whether the device holds an ext4 with a journal, as far as can be seen."""
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    return Path(f"/sys/fs/ext4/{name}/journal_task").exists()


def dirty_bytes() -> int:
    """What the kernel has to write out, of all filesystems."""
    try:
        with open("/proc/meminfo", "rb") as f:
            line = next(line for line in f if line.startswith(b"Dirty:"))
        return int(line.split()[1]) << 10
    except (OSError, StopIteration):
        return SYNC_ALL_DIRTY_BYTES + 1


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
