"""Looking at the tree: over a view, on any thread, without the writer.

Owner: pure over a view. A crash leaves nothing.
"""

from __future__ import annotations

import errno
import stat
from itertools import islice

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, ROOT_INO, DentryRow, InodeRow
from aof2.engine.catalog.store import View
from aof2.engine.errors import os_error


def inode(view: View, stream_id: int, ino: int) -> InodeRow | None:
    return view.get(stream_id, t.INODES, ino)


def entry(view: View, stream_id: int, parent: int, name: bytes) -> DentryRow | None:
    if len(name) > t.NAME_LEN_MAX:
        raise os_error(errno.ENAMETOOLONG, name)
    return view.get(stream_id, t.DENTRIES, (parent, name))


def list_dir(view: View, stream_id: int, parent: int, after: bytes | None, limit: int) -> list[tuple[bytes, DentryRow]]:
    """At most `limit` names behind `after`, in order; that one need not exist any more."""
    start = None if after is None else t.DENTRIES.pack_key((parent, after))
    found = view.scan(stream_id, t.DENTRIES, prefix=t.DENTRIES.pack_key((parent, b"")), after=start)
    return [(name, row) for (_, name), row in islice(found, limit)]


def resolve(view: View, stream_id: int, path: bytes) -> InodeRow:
    """What a path below the tenant names. Symlinks are not followed."""
    row = _existing(view, stream_id, stream_id << INO_STREAM_SHIFT | ROOT_INO, path)
    for part in path.split(b"/"):
        if part in (b"", b"."):
            continue
        if not stat.S_ISDIR(row.mode):
            raise os_error(errno.ENOTDIR, path)
        if part == b"..":
            ino = row.parent
        else:
            found = entry(view, stream_id, row.ino, part)
            if found is None:
                raise os_error(errno.ENOENT, path)
            ino = found.ino
        row = _existing(view, stream_id, ino, path)
    return row


def path_of(view: View, stream_id: int, ino: int) -> bytes:
    """The path below the tenant, b"" for its top; of a file with several names, one of them. ENOENT if it has none."""
    parts: list[bytes] = []
    seen: set[int] = set()
    root = stream_id << INO_STREAM_SHIFT | ROOT_INO
    while ino != root:
        row = _existing(view, stream_id, ino, str(ino).encode())
        if not row.nlink:
            raise os_error(errno.ENOENT, str(ino))
        if ino in seen:
            raise os_error(errno.ELOOP, str(ino))  # which only damaged rows have
        seen.add(ino)
        parts.append(name_of(view, stream_id, row))
        ino = row.parent
    return b"/".join(reversed(parts))


def name_of(view: View, stream_id: int, row: InodeRow) -> bytes:
    """A name that the inode has in its `parent`."""
    found = view.get(stream_id, t.DENTRIES, (row.parent, row.last_name))
    if found is not None and found.ino == row.ino:
        return row.last_name
    # Rows from before names were remembered.
    for (_, name), other in view.scan(stream_id, t.DENTRIES, prefix=row.parent.to_bytes(8, "big")):
        if other.ino == row.ino:
            return name
    raise os_error(errno.ENOENT, str(row.ino))


def nameless(view: View, stream_id: int) -> list[int]:
    """Inodes without a name that were open: after a crash they have no handle left, and recovery drops them."""
    return [ino for ino, _ in view.scan(stream_id, t.NAMELESS)]


def deleted(view: View, stream_id: int, parent: int, name: bytes) -> list[InodeRow]:
    """What had this name when it was unlinked and can be undeleted, newest first."""
    found: list[InodeRow] = []
    for (_, ino), generation in view.scan(stream_id, t.TOMBSTONES):
        row = view.get(stream_id, t.INODES, ino)
        if row is not None and (row.parent, row.last_name, row.generation) == (parent, name, generation):
            found.append(row)
    return found[::-1]


def get_xattr(view: View, stream_id: int, ino: int, name: bytes) -> bytes | None:
    return view.get(stream_id, t.XATTRS, (ino, name)) if len(name) <= t.NAME_LEN_MAX else None


def list_xattrs(view: View, stream_id: int, ino: int) -> list[bytes]:
    return [name for (_, name), _ in view.scan(stream_id, t.XATTRS, prefix=ino.to_bytes(8, "big"))]


def _existing(view: View, stream_id: int, ino: int, path: bytes) -> InodeRow:
    row = view.get(stream_id, t.INODES, ino)
    if row is None:
        raise os_error(errno.ENOENT, path)
    return row
