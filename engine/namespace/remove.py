"""Removing names, what becomes of an inode with its last one, and the way back.

    last name gone → open: nameless → last close ┐
                   → not open ───────────────────┴→ published: tombstone (undelete) · otherwise: nothing is left

`is_open` is asked on the catalog thread, inside the batch. It must count an open from before its inode was looked up,
and one that comes later must wait for the batch (`files/known.py`), or an inode may go between the look and the open.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable

import msgspec

from aof2.engine import tombstones
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import InodeRow, ObjectRow, ObjectState
from aof2.engine.errors import os_error
from aof2.engine.namespace import nodes

IsOpen = Callable[[int], bool]


def never(_: int) -> bool:
    return False


def unlink(b: Batch, parent: int, name: bytes, *, is_open: IsOpen = never) -> InodeRow:
    """Removes a name; the inode as it is then, its generation the one that it had."""
    nodes.directory(b, parent)
    entry = nodes.lookup(b, parent, name)
    if stat.S_ISDIR(entry.mode):
        raise os_error(errno.EISDIR, name)
    b.delete(t.DENTRIES, (parent, name))
    nodes.touch(b, parent)
    row = nodes.name_removed(b, nodes.get_inode(b, entry.ino), parent, name)
    if row.nlink:
        b.put(t.INODES, row.ino, row)
    else:
        _nameless(b, row, is_open)
    return row


def rmdir(b: Batch, parent: int, name: bytes, *, is_open: IsOpen = never) -> InodeRow:
    nodes.directory(b, parent)
    entry = nodes.lookup(b, parent, name)
    if not stat.S_ISDIR(entry.mode):
        raise os_error(errno.ENOTDIR, name)
    _check_empty(b, entry.ino, name)
    b.delete(t.DENTRIES, (parent, name))
    nodes.touch(b, parent, links=-1)
    row = msgspec.structs.replace(
        nodes.get_inode(b, entry.ino), nlink=0, ctime_ns=b.now_ns, parent=parent, last_name=name
    )
    _nameless(b, row, is_open)
    return row


def _check_empty(b: Batch, ino: int, name: bytes) -> None:
    prefix = t.DENTRIES.pack_key((ino, b""))
    if next(b.scan(t.DENTRIES, prefix=prefix), None) is not None:
        raise os_error(errno.ENOTEMPTY, name)


def _nameless(b: Batch, row: InodeRow, is_open: IsOpen) -> None:
    if is_open(row.ino):
        b.put(t.INODES, row.ino, row)
        b.put(t.NAMELESS, row.ino, 1)
    else:
        _unreachable(b, row)


def drop_nameless(b: Batch, ino: int) -> InodeRow | None:
    """The last close of an inode without a name; what it was. None: it has a name, or is gone."""
    if b.get(t.NAMELESS, ino) is None:
        return None
    b.delete(t.NAMELESS, ino)
    row = b.get(t.INODES, ino)
    if row is not None:
        _unreachable(b, row)
    return row


def _unreachable(b: Batch, row: InodeRow) -> None:
    """Neither named nor open: what never reached the remote goes, the newest that did becomes a tombstone."""
    kept: ObjectRow | None = None
    for obj in _generations(b, row) if stat.S_ISREG(row.mode) else ():
        if obj.state in (ObjectState.DIRTY, ObjectState.SEALED):
            tombstones.discard(b, obj)
        elif obj.state == ObjectState.PUBLISHED and obj.generation <= row.generation:
            kept = obj
    if kept is None:
        nodes.erase(b, row.ino)
    else:
        b.put(
            t.INODES,
            row.ino,
            msgspec.structs.replace(row, generation=kept.generation, size=kept.size, hole_bytes=kept.hole_bytes),
        )
        tombstones.tombstone(b, kept)


def _generations(b: Batch, row: InodeRow) -> list[ObjectRow]:
    keys = [key for key, _ in b.scan(t.OBJECTS, prefix=row.ino.to_bytes(8, "big"))]
    current = (row.ino, row.generation)
    keys += [current] if current not in keys else []  # made in this batch
    return [obj for key in keys if (obj := b.get(t.OBJECTS, key)) is not None]


def undelete(b: Batch, ino: int, parent: int | None = None, name: bytes | None = None) -> InodeRow:
    """Gives a tombstoned object a name again: the given one, or the last it had. ENOENT if its directory is gone."""
    row = nodes.get_inode(b, ino)
    parent = row.parent if parent is None else parent
    name = row.last_name if name is None else name
    obj = b.get(t.OBJECTS, (ino, row.generation))
    if obj is None or obj.state != ObjectState.TOMBSTONED:
        raise os_error(errno.ENOENT, name)
    nodes.check_free(b, parent, name)
    tombstones.lift(b, obj)
    row = msgspec.structs.replace(row, nlink=1, parent=parent, last_name=name, ctime_ns=b.now_ns)
    b.put(t.INODES, ino, row)
    nodes.put_entry(b, parent, name, row)
    nodes.touch(b, parent)
    return row
