"""A kind as another engineer would add it: its tenants show one file, whose bytes are not those that are stored.

Run as a program it is the `aof2` command with this kind registered: `python -m tests.kinds.shouting mount …`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping

from aof2.engine.catalog.rows import INO_STREAM_SHIFT, InodeRow, stream_of
from aof2.engine.errors import os_error
from aof2.engine.kinds.catalogued import Catalogued
from aof2.engine.kinds.kind import Caller, FileHandle
from aof2.engine.kinds.opens import Opens
from aof2.engine.kinds.registry import REGISTERED, KindEntry, Surroundings
from aof2.engine.settings.keys import TENANT_KEYS, Key
from aof2.engine.settings.model import TenantSettings
from aof2.engine.volume import Volume

NAME = b"hello.txt"


class ShoutingTenant(TenantSettings, frozen=True, kw_only=True):
    words: str = "hello"


class ShoutingHandle:
    """What is stored is in small letters; what is read is not."""

    keeps_pages = False
    direct_io = False

    def __init__(self, opens: Opens, fh: int, ino: int, stored: bytes) -> None:
        self._opens, self._fh, self._stored = opens, fh, stored
        self.ino = ino

    async def read(self, offset: int, size: int) -> bytes:
        return self._stored.upper()[offset : offset + size]

    async def write(self, offset: int, data: bytes) -> int:
        raise os_error(errno.EBADF)

    async def sync(self) -> None: ...

    async def close(self) -> None:
        self._opens.pop(self._fh)

    async def allocate(self, mode: int, offset: int, length: int) -> None:
        raise os_error(errno.EBADF)

    async def seek(self, offset: int, whence: int) -> int:
        raise os_error(errno.EINVAL)

    async def copy_from(self, source: FileHandle, offset_in: int, offset_out: int, length: int) -> int:
        raise os_error(errno.EBADF)


class Shouting(Catalogued):
    """Its directories are the catalog's; the one file in each is made up."""

    def __init__(self, at: Surroundings) -> None:
        super().__init__(at.volume, at.tenants)
        self._opens = at.opens

    def _file(self, stream_id: int) -> InodeRow:
        stored = self._stored(stream_id)
        ino = stream_id << INO_STREAM_SHIFT | 2
        return InodeRow(ino, stat.S_IFREG | 0o444, size=len(stored), parent=stream_id << INO_STREAM_SHIFT | 1)

    def _stored(self, stream_id: int) -> bytes:
        settings = self.volume.settings.tenants[self.tenants[stream_id]]
        assert isinstance(settings, ShoutingTenant)
        return settings.words.encode()

    def row(self, ino: int) -> InodeRow:
        made_up = self._file(stream_of(ino))
        return made_up if ino == made_up.ino else super().row(ino)

    def find(self, parent: int, name: bytes) -> InodeRow | None:
        return self._file(stream_of(parent)) if name == NAME else None

    def entries(self, ino: int, after: bytes | None, count: int) -> list[tuple[bytes, InodeRow]]:
        return [(NAME, self._file(stream_of(ino)))] if after is None else []

    async def open(self, ino: int, flags: int, caller: Caller) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise os_error(errno.EROFS)
        fh = self._opens.new_number()
        self._opens.put(fh, ShoutingHandle(self._opens, fh, ino, self._stored(stream_of(ino))))
        return fh


def make(at: Surroundings) -> Shouting:
    return Shouting(at)


def recover(volume: Volume, tenants: Mapping[int, str]) -> None:
    """Nothing is stored."""


KEYS = {**TENANT_KEYS, "words": Key("words", str)}
ENTRY = KindEntry(99, "shouting", ShoutingTenant, KEYS, "tests.kinds.shouting")

if __name__ == "__main__":
    from aof2.fs.cli import main
    from tests.kinds import shouting

    REGISTERED.append(shouting.ENTRY)
    main()
