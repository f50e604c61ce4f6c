"""From the paths of a request to the files behind them: through the catalog, a page at a time, so that a directory with
a million files neither holds a read transaction nor the loop.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import Final

import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectRow, ObjectState
from aof2.engine.catalog.store import View
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
    """The inodes of the files whose content is not in the remote."""
    found: set[int] = set()
    for page in files(mounted, places):
        await trio.lowlevel.checkpoint()
        with mounted.volume.catalog.view() as view:
            found |= {p.inode.ino for p in page if not is_durable(newest(view, p))}
    return found
