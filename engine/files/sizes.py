"""Cutting and extending files, and the holes in them.

Invariant: what was cut off a partly fetched file does not come back after a crash: that its base ends there is durable
before anything is written behind the cut.

Owner: the trio thread. A crash leaves the file as it was, or cut.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.errors import os_error
from aof2.engine.fds import opened
from aof2.engine.files.state import OpenFile
from aof2.engine.local.handles import ObjectHandle
from aof2.engine.local.hot import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate
from aof2.engine.local.reserve import is_no_room
from aof2.engine.objects import full_mask

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

# As on ext4. An object's row has a word for each of its chunks, holes included: a quarter of a million of them.
FILE_BYTES_MAX: Final = 16 << 40


class Sizes:
    """How large files are."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._block_bytes = files.block_bytes

    async def truncate(self, file: OpenFile, size: int) -> None:
        """Cuts or extends a dirty file."""
        if size > FILE_BYTES_MAX:
            raise os_error(errno.EFBIG)
        self._files.room.watch.let_go(file)
        await self._cut(file, size)
        await self._files.charges.recharge(file)

    async def _cut(self, file: OpenFile, size: int) -> None:
        block = size // self._block_bytes
        cuts = size % self._block_bytes and file.is_absent(block, self._block_bytes)
        async with self._files.room.admit(file, size, 0, more=self._block_bytes if cuts else 0), file.io:
            self._files.parts.touch_all_from(file, min(size, file.stat().st_size))
            if not file.partial:
                os.truncate(file.path, size)
                return
            shorter = size < file.base_len
            if shorter and size % self._block_bytes and file.is_absent(block, self._block_bytes):
                await self._files.content.bring(file, [block])
            file.base_len = min(file.base_len, size)
            os.truncate(file.path, size)
            if shorter:
                self._files.parts.forget_behind(file)
                self._files.parts.unclaim_behind(file, -(-size // self._block_bytes))
            self._files.content.become_whole_if_so(file)
            if shorter:  # a crash must not bring back what was cut, behind what is written there from now on
                await trio.to_thread.run_sync(self._files.durability.sync_backing, file)
                await self._files.durability.note_present(file)

    async def fallocate(self, file: OpenFile, mode: int, offset: int, length: int) -> None:
        """Space for a range, or holes and zeros in it, on a ranged file. Reserves before a byte is taken."""
        if not file.dirty:
            raise os_error(errno.EBADF)
        if offset + length > FILE_BYTES_MAX:
            raise os_error(errno.EFBIG)
        takes_only = not mode & ~FALLOC_KEEP_SIZE
        if file.partial and not takes_only:
            await self._fill_or_refuse(file)
        taken = 0 if mode & FALLOC_PUNCH_HOLE else length
        async with self._files.room.admit(file, offset, taken), file.io:
            if not takes_only:
                if file.partial:
                    raise os_error(errno.EOPNOTSUPP)
                self._files.parts.touch_all_from(file, offset)  # some modes move what is behind the range
            await trio.to_thread.run_sync(fallocate, file.open_fd(), mode, offset, length)
        await self._files.charges.recharge(file)

    async def _fill_or_refuse(self, file: OpenFile) -> None:
        """Holes and zeros are made in files that are here whole; one that cannot be has none."""
        try:
            await self._files.content.fill(file)
        except OSError as e:
            if is_no_room(e):
                raise os_error(errno.EOPNOTSUPP) from None
            raise

    def seek(self, file: OpenFile, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE. What is not here is data, unless its rows say that it is a hole."""
        size = file.stat().st_size if file.dirty or file.base is None else file.base.size
        if offset >= size:
            raise os_error(errno.ENXIO)
        if not file.dirty and file.base is not None:
            return self._seek_rows(file.base, offset, whence)
        with opened(file.path) as fd:
            return self._seek_partly(file, fd, offset, size, whence) if file.partial else os.lseek(fd, offset, whence)

    def _seek_rows(self, base: ObjectHandle, offset: int, whence: int) -> int:
        """In a clean file, by blocks."""
        for index in range(offset // base.row.chunk_bytes, len(base.chunks)):
            holes = base.holes[index]
            bits = holes if whence == os.SEEK_HOLE else full_mask(base.chunks[index].length, self._block_bytes) & ~holes
            first = index * base.blocks_per_chunk
            bits &= ~((1 << max(0, offset // self._block_bytes - first)) - 1)
            if bits:
                return max(offset, (first + (bits & -bits).bit_length() - 1) * self._block_bytes)
        if whence == os.SEEK_HOLE:
            return base.size
        raise os_error(errno.ENXIO)

    def _seek_partly(self, file: OpenFile, fd: int, offset: int, size: int, whence: int) -> int:
        """In a dirty file that lacks blocks, which are holes in its backing file and none of its own."""
        at = offset
        while at < size:
            if file.is_absent(at // self._block_bytes, self._block_bytes):
                if whence == os.SEEK_DATA:
                    return at
            else:
                found = _seek_or_end(fd, at, size, whence)
                stop = (at // self._block_bytes + 1) * self._block_bytes
                if found < stop:
                    return found
            at = (at // self._block_bytes + 1) * self._block_bytes
        if whence == os.SEEK_HOLE:
            return size
        raise os_error(errno.ENXIO)


def _seek_or_end(fd: int, at: int, size: int, whence: int) -> int:
    try:
        return os.lseek(fd, at, whence)
    except OSError as e:
        if e.errno == errno.ENXIO:  # no data behind it
            return size
        raise
