"""From the paths of a request to the files behind them: through the catalog, a page at a time, so that a directory with
a million files neither holds a read transaction nor the loop.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow, ObjectRow, ObjectState, stream_of
from aof2.engine.catalog.store import View
from aof2.engine.catalog.tables import Table
from aof2.engine.inspect.paths import Place, resolve
from aof2.engine.inspect.rows import tenant_names
from aof2.engine.namespace import root_ino
from aof2.fs.control.mounted import Mounted
from aof2.fs.control.protocol import ControlError

PAGE: Final = 256


def shown(mounted: Mounted, place: Place) -> str:
    """The path as a user of the mount would write it."""
    return str(mounted.mountpoint / place.path)


def find(mounted: Mounted, paths: Iterable[str]) -> list[Place]:
    """What the paths name; the mountpoint itself is all its tenants. NoSuchPathError for one that is not there."""
    places: list[Place] = []
    with mounted.volume.catalog.view() as view:
        for path in paths:
            place = resolve(view, mounted.mountpoint, path)
            places += [place] if place is not None else _tenants(view)
    if not places:
        raise ControlError("no path was named", 2)
    return places


def _tenants(view: View) -> Iterator[Place]:
    for tenant_id, name in tenant_names(view).items():
        inode = view.get(tenant_id, t.INODES, root_ino(tenant_id))
        if inode is not None:
            yield Place(tenant_id, name, "", inode)


def files(mounted: Mounted, places: Iterable[Place]) -> Iterator[list[Place]]:
    """Every regular file at or below the places, once each, in pages. What changes meanwhile may be seen or not.

    No read transaction is open between pages: the caller may wait there, and lets others run.
    """
    seen: set[int] = set()
    for place in places:
        for page in _below(mounted, place):
            fresh = [one for one in page if one.is_file and one.inode.ino not in seen]
            seen.update(one.inode.ino for one in fresh)
            if fresh:
                yield fresh


def _below(mounted: Mounted, place: Place) -> Iterator[list[Place]]:
    if not stat.S_ISDIR(place.inode.mode):
        yield [place]
        return
    stack = [place]
    while stack:
        at, after = stack.pop(), None
        while True:
            children, after = _children(mounted, at, after)
            stack += [child for child in children if stat.S_ISDIR(child.inode.mode)]
            yield [child for child in children if not stat.S_ISDIR(child.inode.mode)]
            if after is None:
                break


def _children(mounted: Mounted, at: Place, after: bytes | None) -> tuple[list[Place], bytes | None]:
    """A page of a directory behind a key, and where it ended; None when there is no more."""
    children: list[Place] = []
    prefix = t.DENTRIES.pack_key((at.inode.ino, b""))
    with mounted.volume.catalog.view() as view:
        found = view.scan(at.tenant_id, t.DENTRIES, prefix=prefix, after=after)
        for count, ((parent, name), entry) in enumerate(found, 1):
            inode = view.get(at.tenant_id, t.INODES, entry.ino)
            if inode is not None:
                path = os.path.join(at.name, os.fsdecode(name))  # noqa: PTH118
                children.append(Place(at.tenant_id, at.tenant, path, inode))
            if count == PAGE:
                return children, t.DENTRIES.pack_key((parent, name))
    return children, None


def newest(view: View, place: Place) -> ObjectRow | None:
    """The object behind a file's present content; None for one that was never written to."""
    inode = view.get(place.tenant_id, t.INODES, place.inode.ino)
    if inode is None or not inode.generation:
        return None
    return view.get(place.tenant_id, t.OBJECTS, (inode.ino, inode.generation))


def is_durable(row: ObjectRow | None) -> bool:
    return row is None or row.state not in (ObjectState.DIRTY, ObjectState.SEALED)


async def not_uploaded(mounted: Mounted, places: Iterable[Place]) -> set[int]:
    """The inodes of the files at or below the places whose content is not in the remote. What waits is looked through,
    not what is there: it is less."""
    found: set[int] = set()
    by_tenant: dict[int, set[int]] = {}
    for place in places:
        by_tenant.setdefault(place.tenant_id, set()).add(place.inode.ino)
    for tenant_id, inos in by_tenant.items():
        below = _Below(tenant_id, inos)
        for table in (t.DIRTY, t.UNPUBLISHED):
            after: bytes | None = b""
            while after is not None:
                with mounted.volume.catalog.view() as view:
                    waiting, after = _waiting(view, tenant_id, table, after or None)
                    inodes = view.get_many(tenant_id, t.INODES, waiting)
                    found |= {
                        i.ino for i in inodes if i is not None and i.generation == waiting[i.ino] and below.has(view, i)
                    }
                await trio.lowlevel.checkpoint()
    return found


async def seal_below(mounted: Mounted, places: Iterable[Place], *, begin: bool = False) -> None:
    """What is at or below the places and in no file yet is in one when this returns."""
    waiting = mounted.kinds.unsealed_inos()
    found: set[int] = set()
    with mounted.volume.catalog.view() as view:
        for place in places:
            below = _Below(place.tenant_id, [place.inode.ino])
            rows = view.get_many(place.tenant_id, t.INODES, [i for i in waiting if stream_of(i) == place.tenant_id])
            found |= {row.ino for row in rows if row is not None and below.has(view, row)}
    if found:
        await mounted.kinds.seal(found, begin=begin)


def _waiting(
    view: View, tenant_id: int, table: Table[Any, Any], after: bytes | None
) -> tuple[dict[int, int], bytes | None]:
    """A page of what is dirty, or sealed and not uploaded: inode → generation; and where it ended, None at the end."""
    page: dict[int, int] = {}
    for key, row in view.scan(tenant_id, table, after=after):
        ino, generation = key if table is t.UNPUBLISHED else (key, row.generation)
        page[ino] = max(generation, page.get(ino, 0))
        if len(page) == PAGE:
            return page, table.pack_key(key)
    return page, None


class _Below:
    """Whether inodes are at or below others; directories are looked up once."""

    def __init__(self, tenant_id: int, inos: Collection[int]) -> None:
        self._tenant_id = tenant_id
        self._known = dict.fromkeys(inos, True) | {0: False}

    def has(self, view: View, inode: InodeRow) -> bool:
        """Whether it, or a name of it, is."""
        if self._known.get(inode.ino):
            return True
        if inode.nlink == 1:
            return self._is_below(view, inode.parent)
        prefix = inode.ino.to_bytes(8, "big")
        links = view.scan(self._tenant_id, t.LINKS, prefix=prefix) if inode.nlink else ()
        return any(self._is_below(view, parent) for (_, parent, _), _ in links)

    def _is_below(self, view: View, ino: int) -> bool:
        climbed: list[int] = []
        while ino not in self._known:
            self._known[ino] = False  # also where parents go round in a circle
            climbed.append(ino)
            row = view.get(self._tenant_id, t.INODES, ino)
            ino = row.parent if row is not None else 0
        self._known.update(dict.fromkeys(climbed, self._known[ino]))
        return self._known[ino]
