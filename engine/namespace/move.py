"""Renames: one commit, whatever is below.

Owner: the catalog's writer thread, for the length of a batch.
"""

from __future__ import annotations

import errno
import stat
from typing import NamedTuple

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import DentryRow, InodeRow
from aof2.engine.errors import os_error
from aof2.engine.namespace import nodes
from aof2.engine.namespace.remove import IsOpen, never, rmdir, unlink


class Renamed(NamedTuple):
    """What moved; what it replaced, as `unlink` or `rmdir` gives it; what took its old place."""

    moved: InodeRow
    replaced: InodeRow | None = None
    exchanged: InodeRow | None = None


def rename(
    b: Batch,
    parent: int,
    name: bytes,
    new_parent: int,
    new_name: bytes,
    *,
    replace: bool = True,
    exchange: bool = False,
    is_open: IsOpen = never,
) -> Renamed:
    """Moves a name, over an existing one if allowed; `exchange`: the existing one takes the old place."""
    if exchange and not replace:
        raise os_error(errno.EINVAL, new_name)
    nodes.check_name(new_name)
    nodes.directory(b, parent)
    target = nodes.directory(b, new_parent)
    entry = nodes.lookup(b, parent, name)
    old = b.get(t.DENTRIES, (new_parent, new_name))
    if old is None and exchange:
        raise os_error(errno.ENOENT, new_name)
    if old is not None and not replace:
        raise os_error(errno.EEXIST, new_name)
    if old is not None and old.ino == entry.ino:
        return Renamed(nodes.get_inode(b, entry.ino))  # two names of one inode: POSIX leaves both
    is_dir = stat.S_ISDIR(entry.mode)
    if is_dir:
        _check_not_below(b, entry.ino, new_parent)
    if old is not None and exchange:
        return _exchange(b, (parent, name), entry, (new_parent, new_name), old)
    crosses = int(is_dir and parent != new_parent)
    if crosses and old is None and target.nlink >= nodes.DIRECTORY_LINKS_MAX:
        raise os_error(errno.EMLINK, new_name)
    replaced = None if old is None else _replace(b, new_parent, new_name, old, is_dir=is_dir, is_open=is_open)
    b.delete(t.DENTRIES, (parent, name))
    moved = _rename_row(b, entry.ino, (parent, name), (new_parent, new_name))
    nodes.touch(b, parent, links=-crosses)
    nodes.touch(b, new_parent, links=crosses)
    return Renamed(moved, replaced)


def _rename_row(b: Batch, ino: int, old: tuple[int, bytes], new: tuple[int, bytes]) -> InodeRow:
    row = nodes.name_moved(b, nodes.get_inode(b, ino), old, new)
    b.put(t.INODES, ino, row)
    nodes.put_entry(b, *new, row)
    return row


def _replace(b: Batch, parent: int, name: bytes, old: DentryRow, *, is_dir: bool, is_open: IsOpen) -> InodeRow:
    if is_dir and not stat.S_ISDIR(old.mode):
        raise os_error(errno.ENOTDIR, name)
    if not is_dir and stat.S_ISDIR(old.mode):
        raise os_error(errno.EISDIR, name)
    return rmdir(b, parent, name, is_open=is_open) if is_dir else unlink(b, parent, name, is_open=is_open)


def _exchange(b: Batch, here: tuple[int, bytes], a: DentryRow, there: tuple[int, bytes], z: DentryRow) -> Renamed:
    if stat.S_ISDIR(z.mode):
        _check_not_below(b, z.ino, here[0])
    moved = _rename_row(b, a.ino, here, there)
    other = _rename_row(b, z.ino, there, here)
    came = int(stat.S_ISDIR(z.mode)) - int(stat.S_ISDIR(a.mode)) if here[0] != there[0] else 0
    nodes.touch(b, here[0], links=came)
    nodes.touch(b, there[0], links=-came)
    return Renamed(moved, exchanged=other)


def _check_not_below(b: Batch, ino: int, directory: int) -> None:
    """A directory cannot move into itself."""
    at = directory
    while True:
        if at == ino:
            raise os_error(errno.EINVAL, str(ino))
        above = nodes.directory(b, at).parent
        if above == at:
            return
        at = above
