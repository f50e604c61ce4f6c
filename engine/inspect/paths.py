"""From a path, as people write it, to the rows behind it: `/mountpoint/tenant/a/b`, or `tenant/a/b`.

Owner: pure over a view. A crash leaves nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error
from aof2.engine.inspect.rows import tenant_names
from aof2.engine.namespace import root_ino


class NoSuchPathError(Aof2Error):
    """Nothing has that name in the volume. Check it."""


class Place(NamedTuple):
    """Something in the tree. `name` is the path below the tenant, "" for the tenant itself."""

    tenant_id: int
    tenant: str
    name: str
    inode: InodeRow

    @property
    def path(self) -> str:
        return f"{self.tenant}/{self.name}" if self.name else self.tenant

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.inode.mode)


def resolve(view: View, mountpoint: Path, text: str) -> Place | None:
    """What the path names; None for the mountpoint itself. NoSuchPathError when there is nothing of that name."""
    parts = _parts(mountpoint, text)
    if not parts:
        return None
    by_name = {name: tenant_id for tenant_id, name in tenant_names(view).items()}
    tenant = parts[0]
    tenant_id = by_name.get(tenant)
    if tenant_id is None:
        known = ", ".join(sorted(by_name)) or "none yet"
        raise NoSuchPathError(f"{text}: there is no tenant {tenant!r}; there are {known}")
    ino = root_ino(tenant_id)
    for part in parts[1:]:
        entry = view.get(tenant_id, t.DENTRIES, (ino, os.fsencode(part)))
        if entry is None:
            raise NoSuchPathError(f"{text}: no such file in the volume")
        ino = entry.ino
    inode = view.get(tenant_id, t.INODES, ino)
    if inode is None:
        raise NoSuchPathError(f"{text}: its inode {ino} is missing; run aof2 verify")
    return Place(tenant_id, tenant, "/".join(parts[1:]), inode)


def _parts(mountpoint: Path, text: str) -> list[str]:
    path = os.path.normpath(text)
    if os.path.isabs(path):  # noqa: PTH117 (of a string, which need not exist)
        try:
            path = str(Path(path).relative_to(mountpoint))
        except ValueError:
            raise NoSuchPathError(f"{text}: not below the mountpoint {mountpoint}") from None
    return [] if path == "." else path.split("/")


def files_below(view: View, place: Place) -> Iterator[Place]:
    """The file itself, or every file below the directory."""
    if not stat.S_ISDIR(place.inode.mode):
        yield place
        return
    stack = [place]
    while stack:
        at = stack.pop()
        for (_, name), entry in view.scan(at.tenant_id, t.DENTRIES, prefix=t.DENTRIES.pack_key((at.inode.ino, b""))):
            inode = view.get(at.tenant_id, t.INODES, entry.ino)
            if inode is None:
                continue
            child = Place(at.tenant_id, at.tenant, os.path.join(at.name, os.fsdecode(name)), inode)  # noqa: PTH118
            if stat.S_ISDIR(inode.mode):
                stack.append(child)
            else:
                yield child
