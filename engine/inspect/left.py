"""What only this machine has: files that are not sealed, and sealed ones that are not in the remote.

Owner: pure over a view, and a look at backing files. A crash leaves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog import touched
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.catalog.store import View
from aof2.engine.inspect.rows import tenant_names
from aof2.engine.intents.recover import Waiting, waiting

PATHS_MAX: Final = 5
NO_NAMES: Final[Mapping[int, tuple[int, bytes]]] = {}


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
        unfolded = waiting(view, state_dir, tenant_id)
        path = partial(path_of, view, tenant_id, tenant, newer=unfolded.names)
        for ino, dirty in view.scan(tenant_id, t.DIRTY):
            inode = _named(view, tenant_id, ino, unfolded)
            if inode is not None:
                size = _taken(state_dir / "hot_cache" / tenant / f"{ino}.{dirty.generation}")
                left.add(path(inode), size, sealed=False)
        for inode, size in _segments(view, state_dir, tenant_id, tenant):
            left.add(path(inode), size, sealed=False)
        for birth in unfolded.births:
            if birth.ino not in unfolded.gone:
                size = _taken(state_dir / "hot_cache" / tenant / f"{birth.ino}.1")
                left.add(path(InodeRow(birth.ino, birth.mode)), size, sealed=False)
        for (ino, _), size in view.scan(tenant_id, t.UNPUBLISHED):
            inode = _named(view, tenant_id, ino, unfolded)
            if inode is not None:
                left.add(path(inode), size, sealed=True)
    return left


def path_of(
    view: View, tenant_id: int, tenant: str, inode: InodeRow, newer: Mapping[int, tuple[int, bytes]] = NO_NAMES
) -> str:
    """One of its names, below the tenant's; `newer`: names that the rows do not show."""
    parent, name = newer.get(inode.ino, (inode.parent, inode.last_name))
    if not name:
        return f"{tenant}/<inode {inode.ino}>"
    return f"{tenant}/{touched.path_of(view, tenant_id, parent, name, newer)}"


def _named(view: View, tenant_id: int, ino: int, unfolded: Waiting) -> InodeRow | None:
    inode = view.get(tenant_id, t.INODES, ino)
    return inode if inode is not None and inode.nlink and ino not in unfolded.gone else None


def _segments(view: View, state_dir: Path, tenant_id: int, tenant: str) -> Iterator[tuple[InodeRow, int]]:
    """Streams with segments that are not sealed, and what each of these takes."""
    for file in sorted((state_dir / "segments" / tenant).glob("*/*.seg")):
        inode = view.get(tenant_id, t.INODES, int(file.parent.name)) if file.parent.name.isdigit() else None
        if inode is not None and (size := _taken(file)):
            yield inode, size


def _taken(path: Path) -> int:
    try:
        return min((st := os.stat(path)).st_size, st.st_blocks * 512)
    except OSError:
        return 0
