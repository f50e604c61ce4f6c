"""`seal`, `truncate` and `deliver` in the daemon: what is not sealed of a stream is, or goes; so does what is old; what
was staged comes in.

Owner: the trio thread; a task a request. A crash leaves the segments that were sealed, or removed, before it.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from aof2.engine.errors import CorruptError
from aof2.engine.inspect.paths import Place, resolve
from aof2.engine.kinds.kind import Kind, StagedFile, StagedJob
from aof2.fs.control import walk
from aof2.fs.control.durable import Tell
from aof2.fs.control.mounted import Mounted
from aof2.fs.control.protocol import Args, ControlError

WHY_NOT: Final = {
    errno.EMSGSIZE: "a record is longer than the stream takes",
    errno.EINVAL: "a record is empty, or is not one line of a stream of lines",
}


class Seal(Args, kw_only=True):
    path: str


class Deliver(Args, kw_only=True):
    """`files`: pairs of a payload file and its index, on this machine."""

    path: str
    job_id: str
    files: list[tuple[str, str]]
    overwrite: bool = False


class WasDelivered(Args, kw_only=True):
    path: str
    job_id: str


class Truncate(Args, kw_only=True):
    path: str
    before: int | None = None
    tail: bool = False


async def seal(mounted: Mounted, args: Seal, _: Tell) -> dict[str, object]:
    """Every record that was acknowledged is in a file when this returns."""
    place, kind = _stream(mounted, args.path)
    segments = await kind.seal({place.inode.ino}, begin=True)
    return {"path": walk.shown(mounted, place), "segments": segments}


async def truncate(mounted: Mounted, args: Truncate, _: Tell) -> dict[str, object]:
    """Whole sealed segments before an offset, or what is not sealed."""
    if (args.before is None) == (not args.tail):
        raise ControlError("truncate: name an offset to begin at, or the tail", 2)
    place, kind = _stream(mounted, args.path)
    done = await kind.truncate_stream(place.inode.ino, args.before)
    return {"path": walk.shown(mounted, place), **done._asdict()}


async def deliver(mounted: Mounted, args: Deliver, _: Tell) -> dict[str, object]:
    """Staged records are in the stream when this returns, once, however often it is asked for."""
    place, kind = _stream(mounted, args.path)
    files = tuple(StagedFile(Path(payload), Path(index)) for payload, index in args.files)
    try:
        done = await kind.deliver(place.inode.ino, StagedJob(args.job_id.encode(), files, args.overwrite))
    except CorruptError as e:
        raise ControlError(f"{e}; nothing was delivered") from None
    except OSError as e:
        raise ControlError(f"{args.path}: {WHY_NOT.get(e.errno or 0) or e.strerror}; nothing was delivered") from None
    return {"path": walk.shown(mounted, place), **done._asdict()}


async def delivered(mounted: Mounted, args: WasDelivered, _: Tell) -> dict[str, object]:
    """What the job brought, as `deliver` answered; nothing where it was not delivered, or thirty days ago."""
    place, kind = _stream(mounted, args.path)
    done = kind.delivered(place.inode.ino, args.job_id.encode())
    return {} if done is None else {"path": walk.shown(mounted, place), **done._asdict()}


def _stream(mounted: Mounted, path: str) -> tuple[Place, Kind]:
    with mounted.volume.catalog.view() as view:
        place = resolve(view, mounted.mountpoint, path)
    kind = mounted.kinds.of(place.inode.ino) if place is not None else None
    if place is None or kind is None or not kind.is_stream(place.inode.ino):
        raise ControlError(f"{path}: not a stream; streams are the directories in a tenant of kind append")
    return place, kind
