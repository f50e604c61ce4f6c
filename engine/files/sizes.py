"""Cutting and extending files, and the holes in them.

Invariant: what was cut off a partly fetched file does not come back after a crash: that its base ends there is durable
before anything is written behind the cut.

Owner: the trio thread. A crash leaves the file as it was, or cut.
"""

from __future__ import annotations

import errno
import os

import trio

from aof2.engine.errors import os_error
from aof2.engine.files.charges import Charges
from aof2.engine.files.content import Content
from aof2.engine.files.durability import Durability
from aof2.engine.files.parts import NO_ROOM, Parts
from aof2.engine.files.room import WriteRoom
from aof2.engine.files.state import OpenFile
from aof2.engine.local.hot import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate


class Sizes:
    """How large files are."""

    def __init__(
        self,
        content: Content,
        parts: Parts,
        room: WriteRoom,
        charges: Charges,
        durability: Durability,
        *,
        block_bytes: int,
    ) -> None:
        self._content = content
        self._parts = parts
        self._room = room
        self._charges = charges
        self._durability = durability
        self._block_bytes = block_bytes

    async def truncate(self, file: OpenFile, size: int) -> None:
        """Cuts or extends a dirty file."""
        self._room.let_go(file)
        await self._cut(file, size)
        await self._charges.recharge(file)

    async def _cut(self, file: OpenFile, size: int) -> None:
        block = size // self._block_bytes
        cuts = size % self._block_bytes and file.is_absent(block, self._block_bytes)
        async with self._room.admit(file, size, 0, more=self._block_bytes if cuts else 0), file.io:
            self._parts.touch_all_from(file, min(size, file.stat().st_size))
            if file.whole:
                os.truncate(file.path, size)
                return
            shorter = size < file.base_len
            if shorter and size % self._block_bytes and file.is_absent(block, self._block_bytes):
                await self._content.bring(file, [block])
            file.base_len = min(file.base_len, size)
            os.truncate(file.path, size)
            if shorter:
                self._parts.forget_behind(file)
            self._content.become_whole_if_so(file)
            if shorter:  # a crash must not bring back what was cut, behind what is written there from now on
                await trio.to_thread.run_sync(self._durability.sync_backing, file)
                await self._durability.note_present(file)

    async def fallocate(self, file: OpenFile, mode: int, offset: int, length: int) -> None:
        """Space for a range, or holes and zeros in it, on a ranged file. Reserves before a byte is taken."""
        if not file.dirty:
            raise os_error(errno.EBADF)
        takes_only = not mode & ~FALLOC_KEEP_SIZE
        if not file.whole and not takes_only:
            await self._fill_or_refuse(file)
        taken = 0 if mode & FALLOC_PUNCH_HOLE else length
        async with self._room.admit(file, offset, taken), file.io:
            if not takes_only:
                if not file.whole:
                    raise os_error(errno.EOPNOTSUPP)
                self._parts.touch_all_from(file, offset)  # some modes move what is behind the range
            await trio.to_thread.run_sync(fallocate, file.open_fd(), mode, offset, length)
        await self._charges.recharge(file)

    async def _fill_or_refuse(self, file: OpenFile) -> None:
        """Holes and zeros are made in files that are here whole; one that cannot be has none."""
        try:
            await self._content.fill(file)
        except OSError as e:
            if e.errno in NO_ROOM:
                raise os_error(errno.EOPNOTSUPP) from None
            raise

    def seek(self, file: OpenFile, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE. Of a file that is not all here nothing is known to be a hole but its end."""
        size = file.stat().st_size if file.dirty or file.base is None else file.base.size
        if offset >= size:
            raise os_error(errno.ENXIO)
        if file.dirty and file.whole:
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.lseek(fd, offset, whence)
            finally:
                os.close(fd)
        return offset if whence == os.SEEK_DATA else size
