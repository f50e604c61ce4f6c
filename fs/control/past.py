"""`generations` and `revert` in the daemon: what a file was, and having that again.

Owner: the trio thread; a task a request. A crash leaves the file before or after the one commit that reverts it.
"""

from __future__ import annotations

import errno
import os
import stat
from functools import partial

from aof2.engine import generations as past
from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog.rows import InodeRow, ObjectRow
from aof2.engine.inspect.paths import Place, resolve
from aof2.fs.control import durable, walk
from aof2.fs.control.closing import Closing
from aof2.fs.control.durable import Tell
from aof2.fs.control.mounted import Mounted, by_the_daemon_alone
from aof2.fs.control.protocol import Args, ControlError


class Generations(Args, kw_only=True):
    path: str


class Revert(Args, kw_only=True):
    path: str
    generation: int
    to: str = ""


async def generations(mounted: Mounted, args: Generations, _: Tell) -> list[past.Generation]:
    return _all(mounted, _file(mounted, args.path))


def _all(mounted: Mounted, place: Place) -> list[past.Generation]:
    block_bytes = mounted.volume.settings.engine.block_bytes
    with mounted.volume.catalog.view() as view:
        return past.generations(view, place.tenant_id, place.inode, block_bytes)


def _file(mounted: Mounted, path: str) -> Place:
    with mounted.volume.catalog.view() as view:
        place = resolve(view, mounted.mountpoint, path)
    if place is None or not place.is_file:
        raise ControlError(f"{path}: not a file; only files have generations")
    return place


# -- bringing one back -----------------------------------------------------------------------------------------------


async def revert(mounted: Mounted, args: Revert, tell: Tell) -> dict[str, object]:
    """The file's `path` and `size`, and the `generation` that it has now."""
    place = _file(mounted, args.path)
    _check(mounted, place, args)
    row: ObjectRow | InodeRow
    if args.to:
        path, row = await _beside(mounted, place, args)
    else:
        await _uploaded_as_is(mounted, place, tell)
        path, row = walk.shown(mounted, place), await _in_place(mounted, place, args.generation)
    return {"path": path, "generation": row.generation, "source_generation": args.generation, "size": row.size}


def _check(mounted: Mounted, place: Place, args: Revert) -> None:
    found = {one.generation: one for one in _all(mounted, place)}
    one = found.get(args.generation)
    shown = walk.shown(mounted, place)
    if one is None or not one.restorable:
        there = ", ".join(str(g) for g, o in sorted(found.items()) if o.restorable) or "none"
        raise ControlError(f"{shown}: there is no published generation {args.generation}; there are {there}")
    if one.current and not args.to:
        raise ControlError(f"{shown}: generation {args.generation} is what it is now")


async def _uploaded_as_is(mounted: Mounted, place: Place, tell: Tell) -> None:
    """What the file is now reaches the remote first, so that it is a generation to go back to as well."""
    ino = place.inode.ino
    await Closing(mounted).closed({ino})
    await mounted.kinds.seal({ino})
    await durable.upload(mounted.volume, {place.tenant_id}, tell, inos={ino}, log=False)


async def _in_place(mounted: Mounted, place: Place, generation: int) -> ObjectRow:
    volume, ino = mounted.volume, place.inode.ino
    purge_after_ms = int(volume.settings.retention.purge_after_s * 1000)
    kind = mounted.kinds.of(ino)
    async with kind.holding(ino):  # who opens it meanwhile waits, and finds it reverted
        if kind.is_unsealed(ino):
            raise ControlError(f"{walk.shown(mounted, place)}: it is open; close it, or use --to")
        work = partial(past.revert, ino=ino, generation=generation, purge_after_ms=purge_after_ms)
        row = await result_of(volume.writer.submit(place.tenant_id, work, sync=True))
    await kind.drop_kernel_pages(ino)
    return row


async def _beside(mounted: Mounted, place: Place, args: Revert) -> tuple[str, InodeRow]:
    if not mounted.kinds.of(place.inode.ino).takes_files:
        raise ControlError(f"{args.to}: no files are made in a stream; copy {args.path} to another tenant")
    await by_the_daemon_alone(mounted)
    parent, name, shown = _target(mounted, place, args.to)
    ino, generation = place.inode.ino, args.generation
    work = partial(past.revert_beside, ino=ino, generation=generation, parent=parent, name=name)
    try:
        made = await result_of(mounted.volume.writer.submit(place.tenant_id, work, sync=True))
    except FileExistsError:
        raise ControlError(f"{shown}: there is something of that name; choose another") from None
    mounted.channel.invalidate_entry(parent, name)
    return shown, made


def _target(mounted: Mounted, place: Place, to: str) -> tuple[int, bytes, str]:
    """The directory, the name in it, and the path as a user would write it."""
    folder, name = os.path.split(to.rstrip("/"))
    with mounted.volume.catalog.view() as view:
        above = resolve(view, mounted.mountpoint, folder) if folder and name else None
    if above is None:
        raise ControlError(f"{to}: name a file in the tenant {place.tenant}")
    shown = walk.shown(mounted, above._replace(name=f"{above.name}/{name}".lstrip("/")))
    if above.tenant_id != place.tenant_id:
        raise ControlError(f"{shown}: another tenant; name one in {place.tenant}, and copy it from there")
    if not stat.S_ISDIR(above.inode.mode):
        raise ControlError(f"{shown}: {os.strerror(errno.ENOTDIR).lower()}")
    try:
        return above.inode.ino, namespace.check_name(os.fsencode(name)), shown
    except OSError as e:
        raise ControlError(f"{shown}: {(e.strerror or '').lower()}") from None
