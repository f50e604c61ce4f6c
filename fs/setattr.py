"""Changing attributes, and what the kernel leaves to us with FUSE_HANDLE_KILLPRIV_V2: taking suid, sgid and
capabilities away.

Owner: the trio thread; the catalog's writer makes the changes. A crash leaves all of one change or nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from functools import partial
from typing import Final

import pyfuse3

from aof2.engine import namespace
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.errors import os_error
from aof2.engine.files import stream_of
from aof2.fs import special as s
from aof2.fs.nodes import Nodes

CAPABILITY: Final = b"security.capability"


def without_privileges(mode: int) -> int:
    """A mode after somebody else changed the file: no suid; no sgid where it means one."""
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


class Setattr:
    """Makes the changes."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._files = nodes.files
        self._catalog = nodes.volume.catalog

    async def change(
        self, ino: int, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields, ctx: pyfuse3.RequestContext
    ) -> None:
        """What chmod, chown, truncate, utimes and writes of others ask for."""
        if s.is_special(ino):
            raise os_error(errno.EPERM)
        with self._catalog.view() as view:
            row = self._nodes.row(view, ino)
        if row.nlink == 0 and self._nodes.is_buried(ino):
            raise os_error(errno.ENOENT)
        if fields.update_size:
            await self._resize(row, attr.st_size)
        changes = _changes(row, attr, fields, ctx)
        if changes and not fields.update_size:
            self._nodes.volume.disk.admit_name()  # but a truncation may be what makes room
        self._set_backing_times(ino, changes)
        if changes:
            row = await self._nodes.change(ino, lambda b: namespace.set_attributes(b, ino, **changes))
        if "mode" in changes or "uid" in changes or "gid" in changes:
            await self._drop_capability(row, changes)

    async def _resize(self, row: InodeRow, size: int) -> None:
        if not stat.S_ISREG(row.mode):
            raise os_error(errno.EISDIR if stat.S_ISDIR(row.mode) else errno.EINVAL)
        await self._files.truncate(row.ino, size)

    def _set_backing_times(self, ino: int, changes: dict[str, int]) -> None:
        """A dirty file's times are its backing file's."""
        file = self._files.file(ino)
        if file is None or not file.dirty or not ({"atime_ns", "mtime_ns"} & changes.keys()):
            return
        now = file.stat()
        os.utime(file.path, ns=(changes.get("atime_ns", now.st_atime_ns), changes.get("mtime_ns", now.st_mtime_ns)))

    async def _drop_capability(self, row: InodeRow, changes: dict[str, int]) -> None:
        """A new owner does not inherit what the file may do."""
        if stat.S_ISDIR(row.mode) or not ({"uid", "gid"} & changes.keys()):
            return
        with self._catalog.view() as view:
            has = namespace.get_xattr(view, stream_of(row.ino), row.ino, CAPABILITY) is not None
        if has:
            await self._remove_capability(row.ino)

    async def _remove_capability(self, ino: int) -> None:
        await self._nodes.change(ino, partial(namespace.remove_xattr, ino=ino, name=CAPABILITY))
        self._files.kernel.caps(ino, False)

    async def kill_privileges(self, ino: int) -> None:
        """Another user wrote to a file with suid, sgid or capabilities."""
        with self._catalog.view() as view:
            row = self._nodes.row(view, ino)
            capable = namespace.get_xattr(view, stream_of(ino), ino, CAPABILITY) is not None
        mode = without_privileges(stat.S_IMODE(row.mode))
        if mode != stat.S_IMODE(row.mode):
            await self._nodes.change(ino, partial(namespace.set_attributes, ino=ino, mode=mode))
            self._files.kernel.invalidate_attr(ino)
        if capable:
            await self._remove_capability(ino)

    async def kill_if_special(self, ino: int) -> None:
        """Another user is about to truncate it."""
        with self._catalog.view() as view:
            row = self._nodes.row(view, ino)
        if without_privileges(stat.S_IMODE(row.mode)) != stat.S_IMODE(row.mode):
            await self.kill_privileges(ino)


def _changes(
    row: InodeRow, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields, ctx: pyfuse3.RequestContext
) -> dict[str, int]:
    changes: dict[str, int] = {}
    mode = stat.S_IMODE(row.mode)
    if fields.update_mode:
        mode = stat.S_IMODE(attr.st_mode)
    if fields.update_uid:
        changes["uid"] = attr.st_uid
    if fields.update_gid:
        changes["gid"] = attr.st_gid
    nothing = not any(
        (fields.update_mode, fields.update_uid, fields.update_gid, fields.update_size, fields.update_atime,
         fields.update_mtime)
    )  # fmt: skip
    owner_changes = (fields.update_uid or fields.update_gid) and not fields.update_mode
    if (owner_changes or nothing or (fields.update_size and ctx.uid != 0)) and not stat.S_ISDIR(row.mode):
        mode = without_privileges(mode)
    if mode != stat.S_IMODE(row.mode) or fields.update_mode:
        changes["mode"] = mode
    if fields.update_atime:
        changes["atime_ns"] = attr.st_atime_ns
    if fields.update_mtime:
        changes["mtime_ns"] = attr.st_mtime_ns
    if nothing and not changes:
        changes["mode"] = mode  # the change time moves all the same
    return changes
