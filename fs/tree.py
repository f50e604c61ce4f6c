"""The one tree that the mount shows: what an inode or a name is, in the form the kernel wants it.

The kinds know names and rows (`engine/kinds`); here they are found by inode, and told with the mount's `-o
uid/gid/umask`. Every answer about names or attributes is made here: pyfuse3's and the packed ones.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import pyfuse3

from aof2.engine.catalog.rows import InodeRow
from aof2.engine.errors import os_error
from aof2.engine.kinds.kind import NAME_MAX
from aof2.engine.kinds.mounted import Kinds
from aof2.fs import attrs
from aof2.fs.options import Options

T = TypeVar("T")


def check_name(name: bytes) -> None:
    if len(name) > NAME_MAX:
        raise os_error(errno.ENAMETOOLONG)


class Tree:
    """The inodes of one mount."""

    def __init__(self, kinds: Kinds, options: Options) -> None:
        self.kinds = kinds
        self._options = options

    def find(self, parent: int, name: bytes) -> InodeRow | None:
        """What has this name; None: nothing."""
        check_name(name)
        kind = self.kinds.of(parent)
        if name == b".":
            return kind.named(parent)
        if name == b"..":
            return self.above(parent)
        return kind.find(parent, name)

    async def find_now(self, parent: int, name: bytes) -> InodeRow | None:
        """The same, as of now: on a follower, a name that is not there is looked for at the log's end."""
        row = self.find(parent, name)
        if row is None and self.kinds.of(parent).follows:
            await self.kinds.of(parent).at_end(parent)
            row = self.find(parent, name)
        return row

    def above(self, ino: int) -> InodeRow | None:
        """The directory that an inode is in: how the kernel finds it from a file handle (open_by_handle_at, NFS)."""
        row = self.kinds.of(ino).named(ino)
        if row is None:
            return None
        above = self.kinds.of(ino).parent(row)
        return self.kinds.of(above).named(above)

    def get(self, ino: int) -> InodeRow:
        return self.kinds.of(ino).row(ino)

    # -- in the kernel's form ----------------------------------------------------------------------------------

    def absent(self) -> pyfuse3.EntryAttributes:
        return attrs.absent(self._options)

    def absent_out(self) -> bytes:
        return attrs.absent_out(self._options)

    def attributes(self, row: InodeRow) -> pyfuse3.EntryAttributes:
        return self._told(attrs.attributes, row)

    def entry_out(self, row: InodeRow) -> bytes:
        return self._told(attrs.entry_out, row)

    def attr_out(self, row: InodeRow) -> bytes:
        return self._told(attrs.attr_out, row)

    def _told(self, form: Callable[..., T], row: InodeRow) -> T:
        backing, changing = self.kinds.of(row.ino).told(row)
        return form(row, self._options, backing, changing=changing)
