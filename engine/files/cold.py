"""Files that are read as cold scans: `user.aof2.cold_scan` is "1" on them, or on a directory above.

The nearest attribute counts: "0" on a file or directory below one with "1" turns it off there. It is looked at when a
file is opened to read, and holds for that open. A file with several names is below the one that the catalog calls its
parent. What of it is on this disk is read from there, as ever; the rest comes past hot_cache and PageCache
(`tiering.coldread`), and the kernel is told to drop its pages behind the reader, and all of them when the last cold
open is over.

Invariants
- The marks are the catalog's xattrs; the copy here says only whose, so that an open where there are none costs nothing.
- Opens that write are never cold; nor is a file while it is dirty.

Owner: the trio thread. A crash leaves nothing but the xattrs.
"""

from __future__ import annotations

import errno
from functools import partial
from typing import TYPE_CHECKING, Final

from aof2.engine.catalog import tables as t
from aof2.engine.errors import os_error
from aof2.engine.files.state import Kernel, OpenFile, stream_of
from aof2.engine.local.handles import Key
from aof2.engine.tiering.coldread import ColdReads
from aof2.engine.tiering.patience import Patience

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

COLD_SCAN: Final = b"user.aof2.cold_scan"
VALUES: Final = {b"1": True, b"0": False}
DROP_BEHIND_BYTES: Final = 16 << 20
DEPTH_MAX: Final = 4096  # which only damaged rows have


def check_value(value: bytes) -> None:
    """EINVAL for what is neither on nor off."""
    if value not in VALUES:
        raise os_error(errno.EINVAL)


class ColdFiles:
    """Of one mount."""

    def __init__(self, volume: Volume, kernel: Kernel, patience: Patience) -> None:
        self._volume = volume
        self._kernel = kernel
        self._patience = patience
        self.reads = ColdReads(volume.cold)
        self._marks: dict[int, bool] = {}
        self._opens: dict[int, Key] = {}  # handle → object
        self._passed: dict[int, int] = {}  # inode → up to where the kernel dropped its pages

    # -- whose -------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """The marks as the catalog has them. Before anything is opened."""
        with self._volume.catalog.view() as view:
            for stream_id in self._volume.tenant_names():
                for (ino, name), value in view.scan(stream_id, t.XATTRS):
                    if name == COLD_SCAN:
                        self._marks[ino] = VALUES.get(value, False)

    def marked(self, ino: int, value: bytes | None) -> None:
        """The attribute of an inode is this now; None: it has none."""
        if value is None:
            self._marks.pop(ino, None)
        else:
            self._marks[ino] = VALUES.get(value, False)

    def applies(self, ino: int) -> bool:
        """Whether an open of this file to read is a cold scan."""
        if not self._marks:
            return False
        stream_id = stream_of(ino)
        with self._volume.catalog.view() as view:
            for _ in range(DEPTH_MAX):
                if ino in self._marks:
                    return self._marks[ino]
                row = view.get(stream_id, t.INODES, ino)
                if row is None or row.parent == ino or stream_of(row.parent) != stream_id:
                    return False
                ino = row.parent
        return False

    # -- opens -------------------------------------------------------------------------------------------------

    def opened(self, file: OpenFile, fh: int) -> bool:
        """Whether this open, which does not write, is a cold one."""
        if file.dirty or file.base is None or not self.applies(file.ino):
            return False
        self.reads.opened(file.base)
        self._opens[fh] = file.base.key
        return True

    def is_cold(self, fh: int) -> bool:
        return fh in self._opens

    def released(self, fh: int) -> None:
        key = self._opens.pop(fh, None)
        if key is None:
            return
        if not self.reads.closed(key):
            self._passed.pop(key[1], None)
            self._kernel.invalidate_inode(key[1])

    # -- bytes -------------------------------------------------------------------------------------------------

    async def read(self, file: OpenFile, offset: int, length: int) -> bytes | None:
        """The bytes, kept nowhere; None: it is being written, read as usual."""
        base = file.base
        if file.dirty or base is None:
            return None
        data = await self._patience.insist(partial(self.reads.read, base, offset, length))
        self._drop_behind(file.ino, offset)
        return data

    def _drop_behind(self, ino: int, offset: int) -> None:
        """The kernel's pages of what was read a while ago go: it keeps what it reads ahead, not what a scan passed."""
        passed = self._passed.get(ino, 0)
        if offset < passed:
            self._passed[ino] = passed = 0
        stop = offset - DROP_BEHIND_BYTES
        if stop - passed >= DROP_BEHIND_BYTES:
            self._passed[ino] = stop
            self._kernel.invalidate_inode(ino, passed, stop - passed)
