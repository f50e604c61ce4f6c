"""New inodes and new names. In a directory with S_ISGID they get its group, and directories the bit itself.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

import errno
import stat
from typing import Final

from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, ROOT_INO, InodeRow
from aof2.engine.errors import os_error
from aof2.engine.namespace import nodes

TARGET_LEN_MAX: Final = 4095
_DEVICES: Final = (stat.S_IFCHR, stat.S_IFBLK)
_NODES: Final = (stat.S_IFIFO, stat.S_IFSOCK, *_DEVICES)


def make_root(b: Batch, *, uid: int = 0, gid: int = 0) -> int:
    """The tenant's top directory, once."""
    ino = nodes.root_ino(b.stream_id)
    if b.get(t.INODES, ino) is None:
        b.put(t.COUNTERS, "ino", ROOT_INO)
        b.put(t.INODES, ino, _inode(b, ino, stat.S_IFDIR | 0o755, parent=ino, nlink=2, uid=uid, gid=gid))
    return ino


def _inode(b: Batch, ino: int, mode: int, *, parent: int, nlink: int, **fields: int | bytes) -> InodeRow:
    now_ns = b.now_ns
    return InodeRow(
        ino,
        mode,
        mtime_ns=now_ns,
        ctime_ns=now_ns,
        atime_ns=now_ns,
        parent=parent,
        nlink=nlink,
        **fields,  # type: ignore[arg-type]
    )


def _new(b: Batch, parent: int, mode: int, *, nlink: int, gid: int, **fields: int | bytes) -> InodeRow:
    """An inode of the directory; its row is written, its name is not."""
    above = nodes.directory(b, parent)
    if above.mode & stat.S_ISGID:
        gid = above.gid
        mode |= stat.S_ISGID if stat.S_ISDIR(mode) else 0
    ino = b.stream_id << INO_STREAM_SHIFT | b.next_id("ino")
    row = _inode(b, ino, mode, parent=parent, nlink=nlink, gid=gid, **fields)
    b.put(t.INODES, ino, row)
    return row


def _enter(b: Batch, parent: int, name: bytes, mode: int, **fields: int | bytes) -> InodeRow:
    nodes.check_free(b, parent, name)
    is_dir = stat.S_ISDIR(mode)
    if is_dir and nodes.directory(b, parent).nlink >= nodes.DIRECTORY_LINKS_MAX:
        raise os_error(errno.EMLINK, name)
    row = _new(b, parent, mode, nlink=2 if is_dir else 1, last_name=name, **fields)  # type: ignore[arg-type]
    nodes.put_entry(b, parent, name, row)
    nodes.touch(b, parent, links=int(is_dir))
    return row


def create(
    b: Batch, parent: int, name: bytes, *, mode: int = 0o644, uid: int = 0, gid: int = 0, chunk_bytes: int
) -> InodeRow:
    """A new, empty file with its first generation, dirty."""
    row = _enter(b, parent, name, stat.S_IFREG | stat.S_IMODE(mode), uid=uid, gid=gid, generation=1)
    objects.create(b, row.ino, 1, chunk_bytes=chunk_bytes)
    return row


def bring(
    b: Batch,
    parent: int,
    name: bytes,
    *,
    like: InodeRow,
    size: int,
    ino: int = 0,
    mtime_ns: int = 0,
    hole_bytes: int = 0,
) -> InodeRow:
    """A file that has its bytes before it has its name: its first generation, whose object the caller makes. It has the
    owner of the directory `like`, and its mode but for execution."""
    nodes.check_free(b, parent, name)
    row = InodeRow(
        ino or b.stream_id << INO_STREAM_SHIFT | b.next_id("ino"),
        stat.S_IFREG | (stat.S_IMODE(like.mode) & 0o666),
        like.uid,
        like.gid,
        size,
        mtime_ns=mtime_ns or b.now_ns,
        ctime_ns=b.now_ns,
        atime_ns=mtime_ns or b.now_ns,
        generation=1,
        parent=parent,
        last_name=name,
        hole_bytes=hole_bytes,
    )
    b.put(t.INODES, row.ino, row)
    nodes.put_entry(b, parent, name, row)
    nodes.touch(b, parent)
    return row


def create_unnamed(
    b: Batch, parent: int, *, mode: int = 0o600, uid: int = 0, gid: int = 0, chunk_bytes: int
) -> InodeRow:
    """A file that has no name yet (O_TMPFILE): nameless until `link` gives it one."""
    row = _new(b, parent, stat.S_IFREG | stat.S_IMODE(mode), nlink=0, uid=uid, gid=gid, generation=1)
    b.put(t.NAMELESS, row.ino, 1)
    objects.create(b, row.ino, 1, chunk_bytes=chunk_bytes)
    return row


def make_node(b: Batch, parent: int, name: bytes, *, mode: int, rdev: int = 0, uid: int = 0, gid: int = 0) -> InodeRow:
    """A fifo, socket or device; the mode says which."""
    kind = stat.S_IFMT(mode)
    if kind not in _NODES:
        raise os_error(errno.EINVAL, name)
    return _enter(b, parent, name, mode, uid=uid, gid=gid, rdev=rdev if kind in _DEVICES else 0)


def mkdir(b: Batch, parent: int, name: bytes, *, mode: int = 0o755, uid: int = 0, gid: int = 0) -> InodeRow:
    return _enter(b, parent, name, stat.S_IFDIR | stat.S_IMODE(mode), uid=uid, gid=gid)


def symlink(b: Batch, parent: int, name: bytes, *, target: bytes, uid: int = 0, gid: int = 0) -> InodeRow:
    if not target:
        raise os_error(errno.ENOENT, name)
    if len(target) > TARGET_LEN_MAX:
        raise os_error(errno.ENAMETOOLONG, name)
    return _enter(b, parent, name, stat.S_IFLNK | 0o777, uid=uid, gid=gid, size=len(target), target=target)


def link(b: Batch, ino: int, parent: int, name: bytes) -> InodeRow:
    """One more name, or the first of a nameless one."""
    row = nodes.get_inode(b, ino)
    is_nameless = b.get(t.NAMELESS, ino) is not None
    if not row.nlink and not is_nameless:
        raise os_error(errno.ENOENT, name)  # deleted: `undelete` is the way back
    if stat.S_ISDIR(row.mode):
        raise os_error(errno.EPERM, name)
    nodes.check_free(b, parent, name)
    if row.nlink >= nodes.LINKS_MAX:
        raise os_error(errno.EMLINK, name)
    if is_nameless:
        b.delete(t.NAMELESS, ino)
    row = nodes.name_added(b, row, parent, name)
    b.put(t.INODES, ino, row)
    nodes.put_entry(b, parent, name, row)
    nodes.touch(b, parent)
    return row
