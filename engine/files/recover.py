"""What a crash left of files that were being written: their backing files under the right names, whole and dirty.

Runs before anything else touches the cache. It looks at the rows of DIRTY and NAMELESS only, so it takes as long as
there are such files, however many others there are. Nothing is hashed here: the files go to the sealer, which asks for
a lease first, because a process may still write through a descriptor or a mapping from before.

Owner: called once, on a worker thread, at open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aof2.engine import namespace
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import DirtyRow
from aof2.engine.fds import opened

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

FS_IOC_GETFLAGS: Final = 0x80086601
FS_IOC_SETFLAGS: Final = 0x40086602
FS_IMMUTABLE_FL: Final = 0x10


def recover_dirty(volume: Volume, tenants: Mapping[int, str]) -> list[int]:
    """Brings every dirty file of these tenants to where it can be opened and sealed; their inodes."""
    found: list[int] = []
    gone: list[Path] = []
    for stream_id, tenant in tenants.items():
        with volume.catalog.view() as view:
            dirty = list(view.scan(stream_id, t.DIRTY))
            nameless = set(namespace.nameless(view, stream_id))
        generations = {ino: row.generation for ino, row in dirty}
        for ino, row in dirty:
            path = _backing(volume, tenant, ino, row)
            set_immutable(path, on=False)
            if ino not in nameless:
                found.append(ino)
        for ino in nameless:
            # Its handles ended with the daemon before this one.
            dropped = volume.writer.call(stream_id, partial(namespace.drop_nameless, ino=ino))
            if dropped is not None and dropped.generation and ino in generations:
                gone.append(volume.hot.path(tenant, ino, generations[ino]))
    if gone:
        volume.writer.flush()  # that they have no name is durable before their bytes go
        for path in gone:
            volume.hot.unlink(path)
    return found


def _backing(volume: Volume, tenant: str, ino: int, row: DirtyRow) -> Path:
    """The backing file under its generation's name: a crash may have come before the rename, or before the file."""
    path = volume.hot.path(tenant, ino, row.generation)
    if path.exists():
        return path
    old = volume.hot.path(tenant, ino, row.base_generation)
    if row.base_generation and old.exists():
        volume.env.files.rename(old, path)
    else:
        os.close(volume.hot.create(path))
    return path


def set_immutable(path: Path, *, on: bool) -> bool:
    """Stops, or lets go again, every writer of the file; whether the filesystem can do that."""
    with contextlib.suppress(OSError), opened(path) as fd:
        flags = struct.unpack("l", fcntl.ioctl(fd, FS_IOC_GETFLAGS, struct.pack("l", 0)))[0]
        wanted = flags | FS_IMMUTABLE_FL if on else flags & ~FS_IMMUTABLE_FL
        if wanted != flags:
            fcntl.ioctl(fd, FS_IOC_SETFLAGS, struct.pack("l", wanted))
        return True
    return False
