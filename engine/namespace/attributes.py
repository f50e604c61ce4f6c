"""Attributes and extended attributes of an inode.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

import errno
import stat
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.errors import os_error
from aof2.engine.namespace import nodes

XATTR_NAME_LEN_MAX: Final = t.NAME_LEN_MAX
XATTR_LEN_MAX: Final = 64 << 10
XATTRS_LEN_MAX: Final = 4 * XATTR_LEN_MAX  # names and values of one inode


def set_attributes(
    b: Batch,
    ino: int,
    *,
    mode: int | None = None,
    uid: int | None = None,
    gid: int | None = None,
    size: int | None = None,
    atime_ns: int | None = None,
    mtime_ns: int | None = None,
    ctime_ns: int | None = None,
) -> InodeRow:
    """What is given, and ctime. The type bits of `mode` are not looked at."""
    row = nodes.get_inode(b, ino)
    row = msgspec.structs.replace(
        row,
        mode=row.mode if mode is None else stat.S_IFMT(row.mode) | stat.S_IMODE(mode),
        uid=row.uid if uid is None else uid,
        gid=row.gid if gid is None else gid,
        size=row.size if size is None else size,
        atime_ns=row.atime_ns if atime_ns is None else atime_ns,
        mtime_ns=row.mtime_ns if mtime_ns is None else mtime_ns,
        ctime_ns=b.now_ns if ctime_ns is None else ctime_ns,
    )
    b.put(t.INODES, ino, row)
    return row


def set_xattr(
    b: Batch, ino: int, name: bytes, value: bytes, *, create: bool = False, replace: bool = False
) -> InodeRow:
    row = nodes.get_inode(b, ino)
    if not 0 < len(name) <= XATTR_NAME_LEN_MAX:
        raise os_error(errno.ERANGE, name)
    if len(value) > XATTR_LEN_MAX:
        raise os_error(errno.E2BIG, name)
    old = b.get(t.XATTRS, (ino, name))
    if create and old is not None:
        raise os_error(errno.EEXIST, name)
    if replace and old is None:
        raise os_error(errno.ENODATA, name)
    others = sum(
        len(other) + len(data) for (_, other), data in b.scan(t.XATTRS, prefix=ino.to_bytes(8, "big")) if other != name
    )
    if others + len(name) + len(value) > XATTRS_LEN_MAX:
        raise os_error(errno.ENOSPC, name)
    return put_xattr(b, row, name, value)


def put_xattr(b: Batch, row: InodeRow, name: bytes, value: bytes) -> InodeRow:
    """One that is known to fit."""
    b.put(t.XATTRS, (row.ino, name), value)
    return _changed(b, row)


def remove_xattr(b: Batch, ino: int, name: bytes) -> InodeRow:
    row = nodes.get_inode(b, ino)
    if len(name) > XATTR_NAME_LEN_MAX or b.get(t.XATTRS, (ino, name)) is None:
        raise os_error(errno.ENODATA, name)
    b.delete(t.XATTRS, (ino, name))
    return _changed(b, row)


def _changed(b: Batch, row: InodeRow) -> InodeRow:
    row = msgspec.structs.replace(row, ctime_ns=b.now_ns)
    b.put(t.INODES, row.ino, row)
    return row
