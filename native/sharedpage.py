"""The page that daemon and channel share, from the daemon's side: each word is read and written by one atomic step.

`struct.pack_into` will not do: it clears the bytes before it sets them, and reads them one by one. `sharedpage.h` says
what the words mean.

Owner: none, any thread may call. A crash leaves nothing: it is memory.
"""

from __future__ import annotations

import mmap
import os

from aof2.native._native import ffi, lib


def length() -> int:
    """Of the file behind it."""
    return -(-int(lib.aof2_page_len()) // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedPage:
    """A mapping of a file that both have."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, length())
        self._at = ffi.from_buffer("uint8_t[]", self._map, require_writable=True)

    def total(self) -> int:
        """Bytes of all logs."""
        return int(lib.aof2_page_total(self._at))

    def end(self, slot: int) -> int:
        """How far a stream's log is."""
        return int(lib.aof2_page_end(self._at, slot))

    def take(self, slot: int) -> int:
        """The same, and from here on the channel leaves dropping nodes of what is before it to the daemon."""
        return int(lib.aof2_page_take(self._at, slot))

    def arm(self) -> None:
        """The channel sends an event for the next record."""
        lib.aof2_page_arm(self._at)

    def append(self, slot: int, fd: int, record: bytes) -> int:
        """A record behind the last one of a stream's log; where it ends. OSError: nothing was appended."""
        end = int(lib.aof2_page_append(self._at, slot, fd, record, len(record)))
        if end < 0:
            raise OSError(-end, os.strerror(-end))
        return end

    # -- files that the channel opens by itself ------------------------------------------------------------------

    def set_block_bytes(self, block_bytes: int) -> None:
        """How long the blocks are that residency is told in."""
        lib.aof2_page_blocks(self._at, block_bytes)

    def has_open(self, ino: int) -> bool:
        """Whether the channel has this inode open by itself, or one that shares its place."""
        return bool(lib.aof2_page_opens(self._at, ino))

    def hold(self, ino: int) -> None:
        """The inode, or its bytes, are about to go: from here on the channel does not open it by itself. Before
        `has_open` is asked, or a lease."""
        lib.aof2_page_going(self._at, ino, 1)

    def let(self, ino: int) -> None:
        """They are gone, and the rows say so, or stay."""
        lib.aof2_page_going(self._at, ino, 0)
