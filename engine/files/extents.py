"""Where a sparse backing file has data and where it has holes: what the disk itself knows of which blocks are here.

Invariant: a block counts as data only when all of it is. Where holes cannot be made, or not be found again, nothing
here is to be relied on (`can_punch`).

Owner: worker threads; it keeps nothing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from aof2.engine import objects
from aof2.engine.env import Env
from aof2.engine.fds import opened
from aof2.engine.local.handles import ObjectHandle
from aof2.engine.local.hot import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate
from aof2.engine.local.sparse import data_ranges


def can_punch(folder: Path, block_bytes: int) -> bool:
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


def punch_absent(env: Env, base: ObjectHandle, block_bytes: int) -> None:
    """Before an object that is partly here is written to: what may not be read of it is a hole.

    Leftovers of an eviction that a crash cut short, blocks that failed their checksum: after the next crash they
    must not be taken for written.
    """
    punched = False
    for first, count in base.absent_runs():
        start = first * block_bytes
        with contextlib.suppress(OSError):
            if os.lseek(base.fd, start, os.SEEK_DATA) >= start + count * block_bytes:
                continue
            fallocate(base.fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, start, count * block_bytes)
            punched = True
    if punched:
        env.files.fsync(base.fd)


def whole_blocks(path: Path, per_chunk: int, block_bytes: int) -> dict[int, int]:
    """By chunk, a mask of the blocks that were written, or fetched, since they were a hole: those without one."""
    masks: dict[int, int] = {}
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        for start, stop in data_ranges(fd, size):
            first = -(-start // block_bytes)
            end = -(-size // block_bytes) if stop >= size else stop // block_bytes
            while first < end:
                chunk, bit = divmod(first, per_chunk)
                count = min(end - first, per_chunk - bit)
                masks[chunk] = masks.get(chunk, 0) | ((1 << count) - 1) << bit
                first += count
    return masks


def wait_for_direct_writes(path: Path, offset: int) -> None:
    """Returns when writes past the page cache that were on their way have landed: to give space to what has some
    already changes nothing, and waits for them."""
    with opened(path, os.O_RDWR) as fd, contextlib.suppress(OSError):
        fallocate(fd, FALLOC_KEEP_SIZE, os.lseek(fd, offset, os.SEEK_DATA), 1)


def data_by_chunk(path: Path, chunk_bytes: int) -> dict[int, int]:
    """How many bytes of data each chunk of a file has."""
    sizes: dict[int, int] = {}
    with opened(path) as fd:
        for start, end in data_ranges(fd, os.fstat(fd).st_size):
            while start < end:
                stop = min(end, (start // chunk_bytes + 1) * chunk_bytes)
                sizes[start // chunk_bytes] = sizes.get(start // chunk_bytes, 0) + stop - start
                start = stop
    return sizes


def data_bytes(path: Path) -> int:
    """What a sparse file holds."""
    try:
        return sum(objects.on_disk(size) for size in data_by_chunk(path, 1 << 62).values())
    except FileNotFoundError:
        return 0


def _is_data(fd: int, start: int, stop: int) -> bool:
    with contextlib.suppress(OSError):
        return os.lseek(fd, start, os.SEEK_DATA) == start and os.lseek(fd, start, os.SEEK_HOLE) >= stop
    return False
