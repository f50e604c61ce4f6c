"""One open of a file: what reading and writing through it does, whichever way its bytes come.

Owner: the trio thread. A crash leaves nothing of this.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from aof2.engine.errors import os_error
from aof2.engine.files.copying import copy_range
from aof2.engine.files.state import OpenFile, wants_write
from aof2.engine.kinds.kind import FileHandle

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

SERVED_BYTES_MIN: Final = 32 << 10  # of what is on the disk: worth asking the channel to read it there


class Handle:
    """A `FileHandle` of the file table."""

    __slots__ = ("_files", "fh", "file", "flags", "keeps_pages")
    direct_io = False

    def __init__(self, files: Files, fh: int, file: OpenFile, flags: int, *, keeps_pages: bool = False) -> None:
        self._files = files
        self.fh = fh
        self.file = file
        self.flags = flags
        self.keeps_pages = keeps_pages  # the kernel need not drop what it has of the file (`kept.py`)

    @property
    def ino(self) -> int:
        return self.file.ino

    @property
    def writes(self) -> bool:
        return wants_write(self.flags)

    async def read(self, offset: int, size: int) -> bytes | None:
        """None: its blocks are here and told, the channel answers by itself."""
        content = self._files.content
        if not self._files.cold.is_cold(self.fh):
            data = await content.glance(self.file, offset, size)
            if data is not None:
                return data
            if size >= SERVED_BYTES_MIN:
                ready = await content.make_ready(self.file, offset, size)
                if isinstance(ready, bytes):
                    return ready
                if ready:
                    return None
        return await self.read_bytes(offset, size)

    async def read_bytes(self, offset: int, size: int) -> bytes:
        """The bytes themselves, from wherever they are."""
        cold = self._files.cold
        if cold.is_cold(self.fh) and (data := await cold.read(self.file, offset, size)) is not None:
            return data
        return await self._files.content.read(self.file, offset, size)

    async def write(self, offset: int, data: bytes) -> int:
        if self.file.channel.special and self._files.kernel.killed(self.ino):
            await self._files.kill_privileges(self.ino)
        self._files.check_writable(self.ino)
        return await self._files.content.write(self.file, offset, data)

    async def sync(self) -> None:
        await self._files.durability.fsync(self.ino)

    async def close(self) -> None:
        await self._files.release(self.fh)

    async def allocate(self, mode: int, offset: int, length: int) -> None:
        """Space for a range, or holes and zeros in it, on a ranged file. Reserves before a byte is taken."""
        self._files.check_writable(self.ino)
        await self._files.sizes.fallocate(self.file, mode, offset, length)

    async def seek(self, offset: int, whence: int) -> int:
        """Of a file that is not all here nothing is known to be a hole but its end."""
        return self._files.sizes.seek(self.file, offset, whence)

    async def copy_from(self, source: FileHandle, offset_in: int, offset_out: int, length: int) -> int:
        """At most a few MiB of the range."""
        if not isinstance(source, Handle):
            raise os_error(errno.EXDEV)
        self._files.check_writable(self.ino)
        return await copy_range(self._files, source, offset_in, self, offset_out, length)
