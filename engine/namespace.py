"""The tree: names, inodes and what removing a name does to an object. Each function is one atomic batch of its tenant.

A directory's inode number is the parent half of its entries' keys, so a listing is one range and renaming a directory
touches two rows however much is below it. Errors are OSErrors with the errno POSIX asks for.

Unlinking the last name of a published object leaves a tombstone: its rows stay for the undelete window, and `undelete`
gives it a name again. An object that was never published goes at once, rows and bytes.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

import msgspec

from aof2.engine import objects, tombstones
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, ROOT_INO, DentryRow, InodeRow, ObjectRow, ObjectState

NAME_LEN_MAX: Final = 255


def root_ino(tenant_id: int) -> int:
    return tenant_id << INO_STREAM_SHIFT | ROOT_INO


def _fail(code: int, name: bytes | str = "") -> OSError:
    return OSError(code, os.strerror(code), os.fsdecode(name))


def check_name(name: bytes) -> bytes:
    if len(name) > NAME_LEN_MAX:
        raise _fail(errno.ENAMETOOLONG, name)
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise _fail(errno.EINVAL, name)
    return name


def make_root(b: Batch) -> int:
    """The tenant's top directory, once."""
    ino = root_ino(b.stream_id)
    if b.get(t.INODES, ino) is None:
        b.put(t.COUNTERS, "ino", ROOT_INO)
        b.put(t.INODES, ino, _inode(b, ino, stat.S_IFDIR | 0o755, parent=ino, nlink=2))
    return ino


def _inode(b: Batch, ino: int, mode: int, *, parent: int, nlink: int = 1, generation: int = 0) -> InodeRow:
    now_ns = b.now_ms * 1_000_000
    return InodeRow(
        ino,
        mode,
        mtime_ns=now_ns,
        ctime_ns=now_ns,
        atime_ns=now_ns,
        nlink=nlink,
        generation=generation,
        parent=parent,
    )


def get_inode(b: Batch, ino: int) -> InodeRow:
    row = b.get(t.INODES, ino)
    if row is None:
        raise _fail(errno.ENOENT, str(ino))
    return row


def lookup(b: Batch, parent: int, name: bytes) -> DentryRow:
    entry = b.get(t.DENTRIES, (parent, name))
    if entry is None:
        raise _fail(errno.ENOENT, name)
    return entry


def _directory(b: Batch, ino: int) -> InodeRow:
    row = get_inode(b, ino)
    if not stat.S_ISDIR(row.mode):
        raise _fail(errno.ENOTDIR, str(ino))
    return row


def _touch(b: Batch, row: InodeRow, *, links: int = 0) -> None:
    now_ns = b.now_ms * 1_000_000
    b.put(t.INODES, row.ino, msgspec.structs.replace(row, mtime_ns=now_ns, ctime_ns=now_ns, nlink=row.nlink + links))


def _enter(b: Batch, parent: int, name: bytes, mode: int, *, generation: int = 0) -> InodeRow:
    check_name(name)
    directory = _directory(b, parent)
    if b.get(t.DENTRIES, (parent, name)) is not None:
        raise _fail(errno.EEXIST, name)
    is_dir = stat.S_ISDIR(mode)
    ino = b.stream_id << INO_STREAM_SHIFT | b.next_id("ino")
    row = _inode(b, ino, mode, parent=parent, nlink=2 if is_dir else 1, generation=generation)
    b.put(t.INODES, ino, row)
    b.put(t.DENTRIES, (parent, name), DentryRow(ino, mode))
    _touch(b, directory, links=int(is_dir))
    return row


def create(b: Batch, parent: int, name: bytes, *, mode: int = 0o644, chunk_bytes: int) -> InodeRow:
    """A new, empty file with its first generation, dirty."""
    row = _enter(b, parent, name, stat.S_IFREG | mode, generation=1)
    objects.create(b, row.ino, 1, chunk_bytes=chunk_bytes)
    return row


def mkdir(b: Batch, parent: int, name: bytes, *, mode: int = 0o755) -> InodeRow:
    return _enter(b, parent, name, stat.S_IFDIR | mode)


def rmdir(b: Batch, parent: int, name: bytes) -> None:
    entry = lookup(b, parent, name)
    if not stat.S_ISDIR(entry.mode):
        raise _fail(errno.ENOTDIR, name)
    _check_empty(b, entry.ino, name)
    b.delete(t.DENTRIES, (parent, name))
    b.delete(t.INODES, entry.ino)
    _touch(b, _directory(b, parent), links=-1)


def _check_empty(b: Batch, ino: int, name: bytes) -> None:
    prefix = t.DENTRIES.pack_key((ino, b""))
    if next(b.scan(t.DENTRIES, prefix=prefix), None) is not None:
        raise _fail(errno.ENOTEMPTY, name)


def unlink(b: Batch, parent: int, name: bytes) -> InodeRow:
    """Removes a name; with the last one the object becomes a tombstone, or goes if it was never published."""
    entry = lookup(b, parent, name)
    if stat.S_ISDIR(entry.mode):
        raise _fail(errno.EISDIR, name)
    b.delete(t.DENTRIES, (parent, name))
    _touch(b, _directory(b, parent))
    return _drop_link(b, entry.ino)


def _drop_link(b: Batch, ino: int) -> InodeRow:
    row = get_inode(b, ino)
    row = msgspec.structs.replace(row, nlink=row.nlink - 1, ctime_ns=b.now_ms * 1_000_000)
    if row.nlink:
        b.put(t.INODES, ino, row)
        return row
    obj = b.get(t.OBJECTS, (ino, row.generation)) if row.generation else None
    if obj is not None and obj.state in (ObjectState.DIRTY, ObjectState.SEALED):
        tombstones.discard(b, obj)
        obj = _newest_published(b, ino, row.generation)
    if obj is None:
        b.delete(t.INODES, ino)
    else:
        # What is undeleted is the newest content that reached the remote.
        b.put(t.INODES, ino, msgspec.structs.replace(row, generation=obj.generation, size=obj.size))
        tombstones.tombstone(b, obj)
    return row


def _newest_published(b: Batch, ino: int, before: int) -> ObjectRow | None:
    older = [
        obj
        for (_, generation), obj in b.scan(t.OBJECTS, prefix=ino.to_bytes(8, "big"))
        if generation < before and obj.state == ObjectState.PUBLISHED
    ]
    return older[-1] if older else None


def rename(b: Batch, parent: int, name: bytes, new_parent: int, new_name: bytes, *, replace: bool = True) -> None:
    """Moves a name, over an existing one if allowed; one commit, whatever is below it."""
    check_name(new_name)
    entry = lookup(b, parent, name)
    old = b.get(t.DENTRIES, (new_parent, new_name))
    if old is not None and (not replace or old.ino == entry.ino):
        if not replace:
            raise _fail(errno.EEXIST, new_name)
        return  # two names of one inode: POSIX leaves both
    is_dir = stat.S_ISDIR(entry.mode)
    if is_dir:
        _check_not_below(b, entry.ino, new_parent)
    if old is not None:
        _replace(b, new_parent, new_name, old, is_dir=is_dir)
    b.delete(t.DENTRIES, (parent, name))
    b.put(t.DENTRIES, (new_parent, new_name), entry)
    moved = get_inode(b, entry.ino)
    b.put(t.INODES, entry.ino, msgspec.structs.replace(moved, parent=new_parent, ctime_ns=b.now_ms * 1_000_000))
    crosses = int(is_dir and parent != new_parent)
    _touch(b, _directory(b, parent), links=-crosses)
    _touch(b, _directory(b, new_parent), links=crosses)


def _replace(b: Batch, parent: int, name: bytes, old: DentryRow, *, is_dir: bool) -> None:
    if is_dir and not stat.S_ISDIR(old.mode):
        raise _fail(errno.ENOTDIR, name)
    if not is_dir and stat.S_ISDIR(old.mode):
        raise _fail(errno.EISDIR, name)
    if is_dir:
        rmdir(b, parent, name)
    else:
        unlink(b, parent, name)


def _check_not_below(b: Batch, ino: int, directory: int) -> None:
    """A directory cannot move into itself."""
    at = directory
    while True:
        if at == ino:
            raise _fail(errno.EINVAL, str(ino))
        above = _directory(b, at).parent
        if above == at:
            return
        at = above


def undelete(b: Batch, ino: int, parent: int, name: bytes) -> InodeRow:
    """Gives a tombstoned object a name again."""
    row = get_inode(b, ino)
    obj = b.get(t.OBJECTS, (ino, row.generation))
    if obj is None or obj.state != ObjectState.TOMBSTONED:
        raise _fail(errno.ENOENT, name)
    check_name(name)
    if b.get(t.DENTRIES, (parent, name)) is not None:
        raise _fail(errno.EEXIST, name)
    tombstones.lift(b, obj)
    row = msgspec.structs.replace(row, nlink=1, parent=parent, ctime_ns=b.now_ms * 1_000_000)
    b.put(t.INODES, ino, row)
    b.put(t.DENTRIES, (parent, name), DentryRow(ino, row.mode))
    _touch(b, _directory(b, parent))
    return row


__all__ = [
    "check_name",
    "create",
    "lookup",
    "make_root",
    "mkdir",
    "rename",
    "rmdir",
    "root_ino",
    "undelete",
    "unlink",
]
