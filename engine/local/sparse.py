"""Where a backing file has bytes and where it has none: the holes that `truncate`, `lseek` and `fallocate` leave.

A block counts as data when any byte of it is on the disk; the others are holes, which read as zeros and are neither
read, hashed byte by byte, stored nor uploaded. Space that was reserved and never written (fallocate) reads as zeros
too, and counts as a hole.

Invariant: what is called a hole reads as zeros. Where the filesystem knows of no holes, everything is data.

Owner: any thread; blocking, and it keeps nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from aof2.engine.fds import opened

DISK_PAGE_BYTES: Final = 4096
_NO_DATA_BEHIND: Final = errno.ENXIO


def on_disk(size: int) -> int:
    """A file's size in whole pages of the disk."""
    return -(-size // DISK_PAGE_BYTES) * DISK_PAGE_BYTES


def data_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of what is there, in order, up to `size`."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
            stop = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as e:
            if e.errno == _NO_DATA_BEHIND:
                return
            if e.errno == errno.EINVAL:  # no such calls here
                yield at, size
                return
            raise
        if start >= size:
            return
        yield start, min(stop, size)
        at = stop


class DataMap:
    """Which blocks of a file hold data: a mask for each chunk that has any."""

    def __init__(self, size: int, *, chunk_bytes: int, block_bytes: int) -> None:
        self.size = size
        self.data_bytes = 0
        self.masks: dict[int, int] = {}
        self._block_bytes = block_bytes
        self._per_chunk = chunk_bytes // block_bytes

    def add(self, start: int, stop: int) -> None:
        self.data_bytes += stop - start
        first, last = start // self._block_bytes, (stop - 1) // self._block_bytes
        while first <= last:
            chunk, bit = divmod(first, self._per_chunk)
            count = min(last - first + 1, self._per_chunk - bit)
            self.masks[chunk] = self.masks.get(chunk, 0) | ((1 << count) - 1) << bit
            first += count

    @property
    def disk_bytes(self) -> int:
        """What those blocks take on the disk, each counted whole."""
        total = sum(mask.bit_count() for mask in self.masks.values()) * self._block_bytes
        last_chunk, last_bit = divmod(max(0, self.size - 1) // self._block_bytes, self._per_chunk)
        if self.masks.get(last_chunk, 0) >> last_bit & 1:
            total -= -(-self.size // self._block_bytes) * self._block_bytes - on_disk(self.size)
        return total

    def hole_ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of the blocks without data, neighbours together."""
        start = 0
        for chunk in sorted(self.masks):
            for bit in range(self._per_chunk):
                if self.masks[chunk] >> bit & 1:
                    at = (chunk * self._per_chunk + bit) * self._block_bytes
                    if at > start:
                        yield start, at - start
                    start = at + self._block_bytes
        if start < self.size:
            yield start, self.size - start


def map_data(fd: int, size: int, *, chunk_bytes: int, block_bytes: int) -> DataMap:
    found = DataMap(size, chunk_bytes=chunk_bytes, block_bytes=block_bytes)
    for start, stop in data_ranges(fd, size):
        found.add(start, stop)
    return found


def counted_bytes(path: Path, block_bytes: int) -> int:
    """What a sealed file that is all here is counted as: its blocks with data."""
    with contextlib.suppress(FileNotFoundError), opened(path) as fd:
        size = os.fstat(fd).st_size
        return map_data(fd, size, chunk_bytes=64 * block_bytes, block_bytes=block_bytes).disk_bytes
    return 0
