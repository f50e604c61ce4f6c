"""What only this machine has: files that are not sealed, and sealed ones that are not in the remote.

Owner: pure over a view, and a look at backing files. A crash leaves nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog import touched
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.catalog.store import View
from aof2.engine.inspect.rows import tenant_names
from aof2.engine.intents.recover import waiting_births

PATHS_MAX: Final = 5


class Left(msgspec.Struct, kw_only=True):
    """How many files, of which so many unsealed, their bytes on this disk, and the names of the first."""

    files: int = 0
    unsealed: int = 0
    bytes: int = 0
    paths: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.files)

    def add(self, path: str, size: int, *, sealed: bool) -> None:
        self.files += 1
        self.unsealed += not sealed
        self.bytes += size
        if len(self.paths) < PATHS_MAX:
            self.paths.append(path)

    def names(self) -> str:
        more = self.files - len(self.paths)
        return ", ".join(self.paths) + (f" and {more} more" if more else "")


def left_here(view: View, state_dir: Path) -> Left:
    """What would be lost with this machine."""
    left = Left()
    for tenant_id, tenant in tenant_names(view).items():
        for ino, dirty in view.scan(tenant_id, t.DIRTY):
            inode = view.get(tenant_id, t.INODES, ino)
            if inode is not None and inode.nlink:
                size = _taken(state_dir / "hot_cache" / tenant / f"{ino}.{dirty.generation}")
                left.add(path_of(view, tenant_id, tenant, inode), size, sealed=False)
        for birth in waiting_births(view, state_dir, tenant_id):
            size = _taken(state_dir / "hot_cache" / tenant / f"{birth.ino}.1")
            inode = InodeRow(birth.ino, birth.mode, parent=birth.parent, last_name=birth.name)
            left.add(path_of(view, tenant_id, tenant, inode), size, sealed=False)
        for (ino, _), size in view.scan(tenant_id, t.UNPUBLISHED):
            inode = view.get(tenant_id, t.INODES, ino)
            if inode is not None and inode.nlink:
                left.add(path_of(view, tenant_id, tenant, inode), size, sealed=True)
    return left


def path_of(view: View, tenant_id: int, tenant: str, inode: InodeRow) -> str:
    """One of its names, below the tenant's."""
    if not inode.last_name:
        return f"{tenant}/<inode {inode.ino}>"
    return f"{tenant}/{touched.path_of(view, tenant_id, inode.parent, inode.last_name)}"


def _taken(path: Path) -> int:
    try:
        return min((st := os.stat(path)).st_size, st.st_blocks * 512)
    except OSError:
        return 0
