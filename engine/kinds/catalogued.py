"""A kind whose names are rows of the catalog: reading them, and changing attributes. Makes and removes no names.

What POSIX asks of attributes is here and in `engine.namespace`: with FUSE_HANDLE_KILLPRIV_V2 the kernel leaves it to us
to take suid, sgid and capabilities away when another user changes a file.

Invariants
- An inode that lost its last name is answered for until the kernel forgets it (`nameless`).
- A change is a commit of its tenant's stream; it is answered after that.

Owner: the trio thread; the catalog thread makes the changes. A crash leaves all of one change or nothing.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow, stream_of
from aof2.engine.catalog.store import View
from aof2.engine.errors import os_error
from aof2.engine.kinds import facts
from aof2.engine.kinds.kind import AttributeChange, Caller, Kind

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

CAPABILITY: Final = b"security.capability"
XATTR_PREFIXES: Final = (b"user.", b"trusted.", CAPABILITY)
ROOT: Final = 1  # of the mount
NAMELESS_MAX: Final = 65536


def without_privileges(mode: int) -> int:
    """A mode after another user changed the file: no suid; no sgid where it means one."""
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


class Catalogued(Kind):
    """Tenants whose tree is in the catalog. As it is: directories without anything in them, whose attributes change."""

    def __init__(self, volume: Volume, tenants: Mapping[int, str]) -> None:
        self.volume = volume
        self.tenants = tenants
        self._nameless: dict[int, InodeRow] = {}

    # -- reading -----------------------------------------------------------------------------------------------

    def row(self, ino: int) -> InodeRow:
        with self.volume.catalog.view() as view:
            return self.row_in(view, ino)

    def row_in(self, view: View, ino: int) -> InodeRow:
        row = view.get(stream_of(ino), t.INODES, ino) or self._nameless.get(ino)
        if row is None:
            raise os_error(errno.ENOENT)
        return row

    def find(self, parent: int, name: bytes) -> InodeRow | None:
        stream_id = stream_of(parent)
        with self.volume.catalog.view() as view:
            entry = view.get(stream_id, t.DENTRIES, (parent, name))
            return view.get(stream_id, t.INODES, entry.ino) if entry is not None else None

    def entries(self, ino: int, after: bytes | None, count: int) -> list[tuple[bytes, InodeRow]]:
        stream_id, found = stream_of(ino), []
        with self.volume.catalog.view() as view:
            for name, entry in namespace.list_dir(view, stream_id, ino, after, count):
                row = view.get(stream_id, t.INODES, entry.ino)
                if row is not None:
                    found.append((name, row))
        return found

    def parent(self, row: InodeRow) -> int:
        return ROOT if row.ino == namespace.root_ino(stream_of(row.ino)) else row.parent

    def named(self, ino: int) -> InodeRow | None:
        row = super().named(ino)
        return row if row is not None and row.nlink and ino not in self._nameless else None

    def get_xattr(self, ino: int, name: bytes, caller: Caller | None = None) -> bytes | None:
        with self.volume.catalog.view() as view:
            row = self.row_in(view, ino)
            if name in facts.FACTS:
                return facts.fact(self.volume, view, row, name, dirty_whole=self._is_whole(ino))
            if name.startswith(XATTR_PREFIXES):
                return namespace.get_xattr(view, stream_of(ino), ino, name)
        return None

    def list_xattrs(self, ino: int) -> Sequence[bytes]:
        with self.volume.catalog.view() as view:
            return namespace.list_xattrs(view, stream_of(ino), ino)

    def _is_whole(self, ino: int) -> bool:
        """Whether a file that is being written is here whole."""
        return True

    # -- followed ----------------------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        return self.volume.following is not None

    async def at_end(self, ino: int) -> bool:
        following = self.volume.following
        return following is not None and await following.at_end(stream_of(ino))

    # -- inodes without a name ---------------------------------------------------------------------------------

    def lost_its_name(self, row: InodeRow | None) -> None:
        """An inode may have lost its last name; the kernel may still ask about it."""
        if row is None or row.nlink > (1 if stat.S_ISDIR(row.mode) else 0):
            return
        while len(self._nameless) >= NAMELESS_MAX:
            del self._nameless[next(iter(self._nameless))]
        self._nameless[row.ino] = row

    async def forget(self, ino: int) -> None:
        self._nameless.pop(ino, None)

    # -- changing ----------------------------------------------------------------------------------------------

    async def change(self, ino: int, work: Callable[..., Any]) -> Any:
        """A change to the tree of this inode's tenant, and what came of it."""
        return await result_of(self.volume.writer.submit(stream_of(ino), work))

    async def sync_names(self, ino: int) -> None:
        await result_of(self.volume.writer.submit(stream_of(ino), lambda _: None, sync=True))

    async def sync_all(self) -> None:
        for stream_id in self.tenants:
            await self.sync_names(namespace.root_ino(stream_id))

    async def set_attributes(self, ino: int, change: AttributeChange, caller: Caller) -> InodeRow:
        row = self.row(ino)
        if row.nlink == 0 and ino in self._nameless:
            raise os_error(errno.ENOENT)
        if change.size is not None:
            await self.resize(row, change.size)
        changes = _changes(row, change, caller)
        if changes and change.size is None:
            self.volume.disk.admit_name()  # but a truncation may be what makes room
        self._before_change(ino, changes)
        if changes:
            row = await self.change(ino, lambda b: namespace.set_attributes(b, ino, **changes))
        if {"uid", "gid"} & changes.keys() and not stat.S_ISDIR(row.mode) and self._is_capable(ino):
            await self._remove_capability(ino)  # a new owner does not inherit what the file may do
        return self.row(ino)

    async def resize(self, row: InodeRow, size: int) -> None:
        raise os_error(errno.EISDIR if stat.S_ISDIR(row.mode) else errno.EINVAL)

    def _before_change(self, ino: int, changes: Mapping[str, int]) -> None:
        """Attributes are about to be recorded."""

    async def set_xattr(self, ino: int, name: bytes, value: bytes, caller: Caller | None = None) -> None:
        self._check_xattr(name, value)
        self.volume.disk.admit_name()
        await self.change(ino, partial(namespace.set_xattr, ino=ino, name=name, value=value))
        self._xattr_is(ino, name, value)

    async def remove_xattr(self, ino: int, name: bytes) -> None:
        self._check_xattr(name, None)
        await self.change(ino, partial(namespace.remove_xattr, ino=ino, name=name))
        self._xattr_is(ino, name, None)

    def _check_xattr(self, name: bytes, value: bytes | None) -> None:
        if name.startswith(facts.PREFIX):
            raise os_error(errno.EPERM)
        if not name.startswith(XATTR_PREFIXES):
            raise os_error(errno.EOPNOTSUPP)

    def _xattr_is(self, ino: int, name: bytes, value: bytes | None) -> None:
        """An attribute of an inode is this now; None: it has none."""

    # -- suid, sgid, capabilities ------------------------------------------------------------------------------

    async def kill_privileges(self, ino: int) -> bool:
        """Another user changes a file with suid, sgid or capabilities; whether its mode is another now."""
        row = self.row(ino)
        mode = without_privileges(stat.S_IMODE(row.mode))
        changes = mode != stat.S_IMODE(row.mode)
        if changes:
            await self.change(ino, partial(namespace.set_attributes, ino=ino, mode=mode))
        if self._is_capable(ino):
            await self._remove_capability(ino)
        return changes

    def _is_capable(self, ino: int) -> bool:
        with self.volume.catalog.view() as view:
            return namespace.get_xattr(view, stream_of(ino), ino, CAPABILITY) is not None

    async def _remove_capability(self, ino: int) -> None:
        await self.change(ino, partial(namespace.remove_xattr, ino=ino, name=CAPABILITY))
        self._xattr_is(ino, CAPABILITY, None)


def _changes(row: InodeRow, change: AttributeChange, caller: Caller) -> dict[str, int]:
    """The fields of the row that become others."""
    changes: dict[str, int] = {}
    mode = stat.S_IMODE(row.mode if change.mode is None else change.mode)
    nothing = all(value is None for value in change)
    owner_changes = (change.uid is not None or change.gid is not None) and change.mode is None
    cut_by_another = change.size is not None and caller.uid != 0
    if (owner_changes or nothing or cut_by_another) and not stat.S_ISDIR(row.mode):
        mode = without_privileges(mode)
    for name in ("uid", "gid", "atime_ns", "mtime_ns"):
        value = getattr(change, name)
        if value is not None:
            changes[name] = value
    if mode != stat.S_IMODE(row.mode) or change.mode is not None or nothing:
        changes["mode"] = mode  # of nothing: the change time moves all the same
    return changes
