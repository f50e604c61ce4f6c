"""What the functions of the tree share: errors, rows, link counts, and where an inode is.

Invariant: `parent` and `last_name` of an inode that has a name are one of its names. A file with several has a row in
LINKS for each, so that another one is found when that one goes.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

import errno
import stat
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, ROOT_INO, DentryRow, InodeRow
from aof2.engine.errors import os_error
from aof2.engine.namespace import read

NAME_LEN_MAX: Final = t.NAME_LEN_MAX
LINKS_MAX: Final = 65_000
DIRECTORY_LINKS_MAX: Final = (1 << 31) - 1


def root_ino(tenant_id: int) -> int:
    return tenant_id << INO_STREAM_SHIFT | ROOT_INO


def check_name(name: bytes) -> bytes:
    if len(name) > NAME_LEN_MAX:
        raise os_error(errno.ENAMETOOLONG, name)
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise os_error(errno.EINVAL, name)
    return name


def get_inode(b: Batch, ino: int) -> InodeRow:
    row = b.get(t.INODES, ino)
    if row is None:
        raise os_error(errno.ENOENT, str(ino))
    return row


def get_entry(b: Batch, parent: int, name: bytes) -> DentryRow | None:
    if len(name) > NAME_LEN_MAX:
        raise os_error(errno.ENAMETOOLONG, name)
    return b.get(t.DENTRIES, (parent, name))


def lookup(b: Batch, parent: int, name: bytes) -> DentryRow:
    entry = get_entry(b, parent, name)
    if entry is None:
        raise os_error(errno.ENOENT, name)
    return entry


def directory(b: Batch, ino: int) -> InodeRow:
    """A directory that is still there."""
    row = get_inode(b, ino)
    if not stat.S_ISDIR(row.mode):
        raise os_error(errno.ENOTDIR, str(ino))
    if not row.nlink:
        raise os_error(errno.ENOENT, str(ino))
    return row


def touch(b: Batch, ino: int, *, links: int = 0) -> None:
    """The directory's entries changed."""
    row = directory(b, ino)
    row = msgspec.structs.replace(row, mtime_ns=b.now_ns, ctime_ns=b.now_ns, nlink=row.nlink + links)
    b.put(t.INODES, ino, row)


def check_free(b: Batch, parent: int, name: bytes) -> None:
    """The name may be given to something new."""
    check_name(name)
    directory(b, parent)
    if b.get(t.DENTRIES, (parent, name)) is not None:
        raise os_error(errno.EEXIST, name)


def put_entry(b: Batch, parent: int, name: bytes, row: InodeRow) -> None:
    b.put(t.DENTRIES, (parent, name), DentryRow(row.ino, stat.S_IFMT(row.mode)))


def erase(b: Batch, ino: int) -> None:
    """The inode goes for good, with what hangs on it. Names and objects are the caller's."""
    b.delete(t.INODES, ino)
    if b.get(t.NAMELESS, ino) is not None:
        b.delete(t.NAMELESS, ino)
    prefix = ino.to_bytes(8, "big")
    for name, _ in b.scan(t.XATTRS, prefix=prefix):
        b.delete(t.XATTRS, name)
    for link, _ in b.scan(t.LINKS, prefix=prefix):
        b.delete(t.LINKS, link)


# -- the names of a file; each gives the row to put -----------------------------------------------------------------


def name_added(b: Batch, row: InodeRow, parent: int, name: bytes) -> InodeRow:
    row = msgspec.structs.replace(row, nlink=row.nlink + 1, ctime_ns=b.now_ns)
    if row.nlink == 1:
        return msgspec.structs.replace(row, parent=parent, last_name=name)
    if row.nlink == 2:
        entry = b.get(t.DENTRIES, (row.parent, row.last_name))
        named = entry is not None and entry.ino == row.ino
        first = row.last_name if named else read.name_of(b.view, b.stream_id, row)
        b.put(t.LINKS, (row.ino, row.parent, first), 1)
        row = msgspec.structs.replace(row, last_name=first)
    b.put(t.LINKS, (row.ino, parent, name), 1)
    return row


def name_moved(b: Batch, row: InodeRow, old: tuple[int, bytes], new: tuple[int, bytes]) -> InodeRow:
    if row.nlink > 1 and not stat.S_ISDIR(row.mode):
        b.delete(t.LINKS, (row.ino, *old))
        b.put(t.LINKS, (row.ino, *new), 1)
    return msgspec.structs.replace(row, parent=new[0], last_name=new[1], ctime_ns=b.now_ns)


def name_removed(b: Batch, row: InodeRow, parent: int, name: bytes) -> InodeRow:
    row = msgspec.structs.replace(row, nlink=row.nlink - 1, ctime_ns=b.now_ns)
    if not row.nlink:
        return msgspec.structs.replace(row, parent=parent, last_name=name)
    b.delete(t.LINKS, (row.ino, parent, name))
    if row.nlink > 1 and (row.parent, row.last_name) != (parent, name):
        return row
    links = (link for link, _ in b.scan(t.LINKS, prefix=row.ino.to_bytes(8, "big")))
    other = next((link for link in links if b.get(t.LINKS, link) is not None), None)
    if other is None:
        return row
    if row.nlink == 1:
        b.delete(t.LINKS, other)
    return msgspec.structs.replace(row, parent=other[1], last_name=other[2])
