"""What names and inodes are, to whoever asks: the catalog's rows as everybody was told of them.

Invariants
- An inode number means the same for ever, so lookup counts need no table: only inodes that lost their last name while
  the kernel still knows them are kept (`_ghosts`), until it forgets them.
- Nothing here waits. Where the catalog is behind what was answered (`births`, `unlinks`), who asks waits first; of
  what was unlinked `find` and `get` know.

Owner: the trio thread. A crash leaves nothing of this.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from typing import Any, Final, TypeVar

import pyfuse3

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.catalog.store import View
from aof2.engine.errors import os_error
from aof2.engine.files import Files, stream_of
from aof2.engine.files.state import Stamp
from aof2.engine.volume import Volume
from aof2.fs import attrs
from aof2.fs import special as s
from aof2.fs.births import Births
from aof2.fs.options import Options
from aof2.fs.unlinks import Unlinks

T = TypeVar("T")
NAME_MAX: Final = 255
GHOSTS_MAX: Final = 65536


def check_name(name: bytes) -> None:
    if len(name) > NAME_MAX:
        raise os_error(errno.ENAMETOOLONG)


class Nodes:
    """The inodes of one mount."""

    def __init__(self, volume: Volume, files: Files, special: s.Special, options: Options) -> None:
        self.volume = volume
        self.files = files
        self.special = special
        self.births: Births | None = None
        self.unlinks: Unlinks | None = None
        self._options = options
        self._ghosts: dict[int, InodeRow] = {}

    # -- rows --------------------------------------------------------------------------------------------------

    def row(self, view: View, ino: int) -> InodeRow:
        row = self.special.row(ino) if s.is_special(ino) else view.get(stream_of(ino), t.INODES, ino)
        if row is None:
            row = self._ghosts.get(ino)
        if row is None:
            raise os_error(errno.ENOENT)
        return row

    def get(self, ino: int) -> InodeRow:
        """The row of an inode, as it was told; not of one that `unlinks.is_nameless`."""
        with self.volume.catalog.view() as view:
            row = self.row(view, ino)
        return row if self.unlinks is None else self.unlinks.as_told(row)

    def find(self, parent: int, name: bytes) -> InodeRow | None:
        """What has this name, as it was told; None: nothing."""
        check_name(name)
        if name in (b".", b".."):
            return self._by_handle(parent, name)
        unlinks = self.unlinks
        if unlinks is not None and unlinks.is_gone(parent, name):
            return None
        with self.volume.catalog.view() as view:
            if s.is_special(parent):
                row = self._find_special(view, parent, name)
            else:
                stream_id = stream_of(parent)
                entry = view.get(stream_id, t.DENTRIES, (parent, name))
                row = view.get(stream_id, t.INODES, entry.ino) if entry is not None else None
        return row if row is None or unlinks is None else unlinks.as_told(row)

    def _by_handle(self, ino: int, name: bytes) -> InodeRow | None:
        """An inode that the kernel forgot and knows by its file handle (open_by_handle_at, NFS), or the directory it
        is in; None: it has no name any more, and never comes back (the kernel says ESTALE)."""
        with self.volume.catalog.view() as view:
            try:
                row = self.row(view, ino)
                if name == b".." and ino != s.ROOT:
                    row = self.row(view, self._parent(row))
            except OSError:
                return None
        if self.unlinks is not None:
            if self.unlinks.is_nameless(row.ino):
                return None
            row = self.unlinks.as_told(row)
        return row if row.nlink and not self.is_buried(row.ino) else None

    def _parent(self, row: InodeRow) -> int:
        if s.is_special(row.ino):
            return self.special.parent(row.ino)
        return s.ROOT if row.ino == namespace.root_ino(stream_of(row.ino)) else row.parent

    def _find_special(self, view: View, parent: int, name: bytes) -> InodeRow | None:
        if parent == s.ROOT:
            for tenant_id, tenant in self.volume.tenant_names().items():
                if tenant.encode() == name:
                    ino = namespace.root_ino(tenant_id)
                    return view.get(tenant_id, t.INODES, ino)
        ino = self.special.lookup(parent, name) or 0
        return self.special.row(ino) if ino else None

    async def change(self, ino: int, work: Callable[..., Any]) -> Any:
        """A change to the tree of this inode, and what came of it."""
        return await result_of(self.volume.writer.submit(stream_of(ino), work))

    # -- inodes without a name ---------------------------------------------------------------------------------

    def bury(self, row: InodeRow | None) -> None:
        """An inode lost its last name; the kernel may still ask about it."""
        if row is None or row.nlink > (1 if stat.S_ISDIR(row.mode) else 0):
            return
        while len(self._ghosts) >= GHOSTS_MAX:
            del self._ghosts[next(iter(self._ghosts))]
        self._ghosts[row.ino] = row

    def is_buried(self, ino: int) -> bool:
        return ino in self._ghosts

    def forget(self, ino: int) -> None:
        self._ghosts.pop(ino, None)

    # -- attributes --------------------------------------------------------------------------------------------

    def attributes(self, row: InodeRow) -> pyfuse3.EntryAttributes:
        return self._told(attrs.attributes, row)

    def entry_out(self, row: InodeRow) -> bytes:
        return self._told(attrs.entry_out, row)

    def attr_out(self, row: InodeRow) -> bytes:
        return self._told(attrs.attr_out, row)

    def _told(self, form: Callable[..., T], row: InodeRow) -> T:
        """The attributes, in one form or another; a dirty file's are its backing file's."""
        file = self.files.file(row.ino)
        if file is None or not file.dirty:
            return form(row, self._options)
        try:
            now = file.stat()
        except FileNotFoundError:
            return form(row, self._options)
        file.told_stamp = Stamp.of(now)
        return form(row, self._options, now, changing=file.writers > 0)
