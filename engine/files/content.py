"""Bytes of open files: reading, writing, and fetching what is not here.

Invariants
- A block that is not here is fetched before a byte of it is read or partly written; a fetch never lands on a block that
  was written meanwhile (`OpenFile.io`).
- Nothing is written that no room was made for (`room.py`).

Owner: the trio thread; large requests on worker threads. A crash leaves what is in the backing file.
"""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.errors import os_error
from aof2.engine.files.state import OpenFile, State
from aof2.engine.local.hot import read_exactly
from aof2.engine.pagecache import PageKey
from aof2.engine.tiering.patience import Patience

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

# Larger requests may wait for the disk: not on the loop.
INLINE_BYTES: Final = 128 << 10


class Content:
    """What is in files."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._volume = files.volume
        self._block_bytes = files.block_bytes
        self.patience = Patience(files.volume.env.rng, files.volume.settings.remote.timeout_s)

    # -- reading -----------------------------------------------------------------------------------------------

    async def read(self, file: OpenFile, offset: int, length: int) -> bytes:
        if not file.dirty and file.base is not None:
            data = await self.patience.insist(partial(self._volume.hydrator.read, file.base, offset, length))
            self._files.modes.passed(file, offset, length)
            return data
        if file.partial:
            return await self._read_partly(file, offset, length)
        return await self._pread(file, offset, length)

    async def glance(self, file: OpenFile, offset: int, length: int) -> bytes | None:
        """A few bytes of a clean file that is not here, without what is around them; None: read as usual."""
        if file.dirty or file.base is None:
            return None
        return await self._volume.hydrator.glance(file.base, offset, length)

    async def make_ready(self, file: OpenFile, offset: int, length: int) -> bool | bytes:
        """Whether the channel can answer this read of a clean file by itself now: its blocks are here, and told. Where
        there is no room for them here: the bytes."""
        base = file.base
        if file.dirty or base is None or not (file.channel.ranged and file.channel.masked):
            return False
        if not length or offset >= base.size:
            return False
        data = await self.patience.insist(partial(self._volume.hydrator.make_ready, base, offset, length))
        if data is not None:
            return data
        last = (min(offset + length, base.size) - 1) // self._block_bytes
        self._files.parts.tell(file, offset // self._block_bytes, last + 1 - offset // self._block_bytes)
        self._files.modes.say_coming(file, base, last + 1)
        return file.channel.registered and file.base is base

    async def _pread(self, file: OpenFile, offset: int, length: int) -> bytes:
        fd = file.open_fd()
        if length <= INLINE_BYTES:
            return os.pread(fd, length, offset)
        return await trio.to_thread.run_sync(os.pread, fd, length, offset)

    async def _read_partly(self, file: OpenFile, offset: int, length: int) -> bytes:
        async with file.io:
            length = max(0, min(length, file.stat().st_size - offset))
            pages = await self.fetch(file, self._absent(file, offset, length))
            if not pages:
                return await self._pread(file, offset, length)
            return await trio.to_thread.run_sync(self._overlay, file, offset, length, pages)

    def _overlay(self, file: OpenFile, offset: int, length: int, pages: dict[int, bytes]) -> bytes:
        data = bytearray(read_exactly(file.open_fd(), offset, length))
        for block, page in pages.items():
            start = block * self._block_bytes
            page = page[: max(0, file.base_len - start)]
            low, high = max(offset, start), min(offset + length, start + len(page))
            if low < high:
                data[low - offset : high - offset] = page[low - start : high - start]
        return bytes(data)

    def _absent(self, file: OpenFile, offset: int, length: int) -> list[int]:
        if not length:
            return []
        first, last = offset // self._block_bytes, (offset + length - 1) // self._block_bytes
        return [block for block in range(first, last + 1) if file.is_absent(block, self._block_bytes)]

    # -- fetching ----------------------------------------------------------------------------------------------

    async def fetch(self, file: OpenFile, blocks: list[int]) -> dict[int, bytes]:
        """Blocks of the base into the backing file; those that found no room are returned. `file.io` is held."""
        if not blocks or file.base is None:
            return {}
        file.open_base()
        with file.keeping_times():
            pages, _ = await self.patience.insist(partial(self._volume.hydrator.obtain, file.base, blocks))
        return pages

    async def bring(self, file: OpenFile, blocks: list[int]) -> None:
        """The blocks are here; room was made for them before. `file.io` is held."""
        for block, page in (await self.fetch(file, blocks)).items():
            start = block * self._block_bytes
            await self._pwrite(file, start, page[: max(0, file.base_len - start)])
            file.source.take_over(block)
            # The writer changes it from here on: later readers would get an old block from PageCache.
            self._volume.pages.drop([PageKey(file.ino, file.key[2], block)])
            self._files.parts.tell(file, block, 1)

    async def fill(self, file: OpenFile) -> None:
        """Fetches what a partly fetched dirty file still lacks; ENOSPC where there is no room for it."""
        async with file.io:
            if file.base is not None:
                count = -(-min(file.base_len, file.base.size) // self._block_bytes)
                absent = list(file.absent_blocks(0, count, self._block_bytes))
                if await self.fetch(file, absent):
                    raise os_error(errno.ENOSPC)
            self.become_whole_if_so(file)

    def become_whole_if_so(self, file: OpenFile) -> None:
        """A file that lacks nothing any more has no base. `file.io` is held."""
        base = file.base
        if base is None or file.clearing:  # parts of it are being taken
            return
        count = -(-min(file.base_len, base.size) // self._block_bytes)
        if next(file.absent_blocks(0, count, self._block_bytes), None) is None:
            base.close_file()
            file.become(State.DIRTY_WHOLE)
            self._files.parts.tell(file, 0, max(1, -(-file.stat().st_size // self._block_bytes)))

    async def make_present(self, file: OpenFile, offset: int, length: int) -> None:
        """Blocks that a passthrough writer is about to write to are here, and its own again. Who writes into a chunk
        that is being taken waits until it is: an upload that is given up brings no room."""
        done = False
        while not done:
            await self._files.parts.until_taken(file, offset, length)
            absent = self._absent(file, offset, length)
            async with self._files.room.admit(file, offset, 0, more=len(absent) * self._block_bytes), file.io:
                if self._files.parts.is_taking(file, offset, length):
                    continue
                self._files.parts.touch(file, offset, length)
                await self.bring(file, self._absent(file, offset, length))
                first, last = offset // self._block_bytes, (offset + max(1, length) - 1) // self._block_bytes
                self._files.parts.unclaim(file, first, last + 1 - first)
                done = not self._files.parts.is_taking(file, offset, length)  # since the blocks were asked for

    async def fill_for_readers(self, file: OpenFile) -> None:
        """All of a file that is passed through to a writer is here again, for readers; ENOSPC where it cannot be."""
        size = file.stat().st_size
        absent = self._absent(file, 0, min(size, file.base_len))
        async with self._files.room.admit(file, 0, 0, more=len(absent) * self._block_bytes), file.io:
            if file.clearing:
                raise os_error(errno.ENOSPC)  # a part of it is on its way out
            await self.bring(file, self._absent(file, 0, min(size, file.base_len)))
            if file.clearing:
                raise os_error(errno.ENOSPC)
            self._files.parts.unclaim(file, 0, -(-size // self._block_bytes))
            self.become_whole_if_so(file)

    # -- writing -----------------------------------------------------------------------------------------------

    async def write(self, file: OpenFile, offset: int, data: bytes) -> int:
        more = len(self._half_covered(file, offset, len(data))) * self._block_bytes
        async with self._files.room.admit(file, offset, len(data), more=more), file.io:
            self._files.parts.touch(file, offset, len(data))
            await self.bring(file, self._half_covered(file, offset, len(data)))
            done = await self._pwrite(file, offset, data)
            self._note_written(file, offset, done)
            return done

    def _half_covered(self, file: OpenFile, offset: int, length: int) -> list[int]:
        """The absent blocks of which a write leaves something standing."""
        end = offset + length
        out = []
        for block in self._absent(file, offset, length):
            start = block * self._block_bytes
            stop = min(start + self._block_bytes, file.base_len)
            if offset > start or end < stop:
                out.append(block)
        return out

    async def _pwrite(self, file: OpenFile, offset: int, data: bytes) -> int:
        fd = file.open_fd()
        if len(data) <= INLINE_BYTES:
            self._volume.env.files.pwrite(fd, data, offset)
        else:
            await trio.to_thread.run_sync(self._volume.env.files.pwrite, fd, data, offset)
        return len(data)

    def _note_written(self, file: OpenFile, offset: int, length: int) -> None:
        base = file.base
        if base is None or not length:
            return
        first, last = offset // self._block_bytes, (offset + length - 1) // self._block_bytes
        for block in range(first, min(last + 1, base.block_count)):
            if not base.is_ready(block):
                base.take_over(block)
                self._files.parts.tell(file, block, 1)
        if last >= base.block_count:
            self._files.parts.tell(file, max(first, base.block_count), last + 1 - max(first, base.block_count))
