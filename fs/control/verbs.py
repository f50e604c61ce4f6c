"""What a daemon can be asked for over the control socket. Each verb has a struct for its arguments; anything else in a
request is refused.

Owner: the trio thread; a task a request. A crash leaves what the engine leaves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import msgspec
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.inspect.paths import Place, resolve
from aof2.engine.replicate.company import Caller
from aof2.engine.units import format_time
from aof2.fs.control import durable, ending, feed, inbox, move, past, snapshot, stream, toggle, views, walk, work
from aof2.fs.control.closing import Closing
from aof2.fs.control.durable import Tell, Uploaded
from aof2.fs.control.mounted import Mounted, by_the_daemon_alone
from aof2.fs.control.protocol import Args, ControlError, Paths

SEAL_NO_WAIT_MAX_S: Final = 10.0


class Status(Args, kw_only=True):
    path: str | None = None
    light: bool = False


class Checkpoint(Args, kw_only=True):
    tenant: str | None = None
    wait: bool = False


class Flush(Args, kw_only=True):
    wait: bool = True


class Undelete(Args, kw_only=True):
    path: str


async def dispatch(mounted: Mounted, request: dict[str, Any], tell: Tell) -> object:
    """Does what the request asks for. ControlError, exit 2, for what no verb takes."""
    verb = request.get("verb")
    if not isinstance(verb, str) or verb not in VERBS:
        raise ControlError(f"{verb!r}: the daemon has no such verb; it may be older than this command, remount", 2)
    args, handler = VERBS[verb]
    try:
        asked = msgspec.convert(request, args)
    except msgspec.ValidationError as e:
        raise ControlError(f"{verb}: {e}", 2) from None
    if mounted.volume.following is not None and verb not in FOLLOWED:
        raise ControlError(f"{verb}: this mount follows the volume; do that where its writer is mounted")
    if handler not in (ping, ending.end):
        await mounted.kinds.fold()
    return await handler(mounted, asked, tell)


async def ping(mounted: Mounted, _: Args, __: Tell) -> dict[str, object]:
    return {"mountpoint": str(mounted.mountpoint), "pid": os.getpid(), "started_ms": mounted.started_ms}


async def status(mounted: Mounted, args: Status, _: Tell) -> object:
    return await trio.to_thread.run_sync(views.facts, mounted, args.path, args.light)


# -- durability ----------------------------------------------------------------------------------------------------


async def flush(mounted: Mounted, args: Flush, tell: Tell) -> Uploaded:
    """Before an unmount: everything closed is sealed and, if the caller waits for that, uploaded. A volume that takes
    nothing any more is unmounted as it is: the command says what is left."""
    target = mounted.volume.target
    if target.read_only_reason or not target.enabled or mounted.volume.following is not None:
        return Uploaded(0, 0)
    tenants = set(mounted.volume.tenant_names())
    with mounted.volume.replication.waited_for(tenants if args.wait else ()) as caller:
        with trio.move_on_after(math.inf if args.wait else SEAL_NO_WAIT_MAX_S):  # it goes on until the mount is gone
            await durable.sealed(mounted, tell)
        return await _upload(mounted, tenants, tell, caller if args.wait else None, hint=", or use --no-wait")


async def checkpoint(mounted: Mounted, args: Checkpoint, tell: Tell) -> Uploaded:
    """Everything sealed is sent on its way; with `wait`, until it has arrived."""
    tenants = set(work.tenants_named(mounted.volume, args.tenant))
    with mounted.volume.replication.waited_for(tenants if args.wait else ()) as caller:
        await durable.sealed(mounted, tell)
        return await _upload(mounted, tenants, tell, caller if args.wait else None)


async def _upload(
    mounted: Mounted, tenants: set[int], tell: Tell, caller: Caller | None, *, hint: str = ""
) -> Uploaded:
    """Without a `caller` that waits for it, it is sent on its way."""
    if caller is not None:
        return await durable.upload(mounted.volume, tenants, tell, hint=hint, caller=caller)
    wanted = durable.pending(mounted.volume, tenants)
    if wanted:
        await durable.plan(mounted.volume, tenants)
    return Uploaded(len(wanted), sum(wanted.values()))


async def wait(mounted: Mounted, args: Paths, tell: Tell) -> Uploaded:
    """Until the remote alone restores all of it: bytes, and the log with every commit so far. What is open for writing
    is not sealed, so it never would be: that is said."""
    places = walk.find(mounted, args.paths)
    tenants = {place.tenant_id for place in places}
    with mounted.volume.replication.waited_for(tenants) as caller:
        return await _until_durable(mounted, places, tenants, tell, caller)


async def _until_durable(
    mounted: Mounted, places: list[Place], tenants: set[int], tell: Tell, caller: Caller
) -> Uploaded:
    volume = mounted.volume
    done = Uploaded(0, 0)
    await walk.seal_below(mounted, places, begin=True)
    inos = await walk.not_uploaded(mounted, places)
    if 0 < len(inos) <= durable.SOON_FILES:
        for tenant_id in tenants:
            volume.replication.expect(tenant_id)
    closing = Closing(mounted)
    while inos:
        await closing.sealable(inos)
        await mounted.kinds.seal(inos, begin=True)
        await trio.lowlevel.checkpoint()  # the uploads that began with it are sent off first
        some = await durable.upload(mounted.volume, tenants, durable.later(tell), inos=inos, log=False, caller=caller)
        done = Uploaded(done.files + some.files, done.bytes + some.bytes)
        left = await walk.not_uploaded(mounted, places) & inos
        # Thousands of files that were just closed take longer than a moment: as long as there are fewer, that goes on.
        # One that is opened in the very moment of its seal is sealed a little later.
        if len(left) < len(inos):
            closing = Closing(mounted)
        elif not await closing.again():
            await _raise_open(mounted, places)
        inos = left
    await durable.replicated(volume, volume.needed_log_ends(tenants), tell, caller=caller)
    return done


async def _raise_open(mounted: Mounted, places: list[Place]) -> None:
    for page in walk.files(mounted, places):
        await trio.lowlevel.checkpoint()
        with mounted.volume.catalog.view() as view:
            for place in page:
                if not walk.is_durable(walk.newest(view, place)):
                    path = walk.shown(mounted, place)
                    if place.inode.ino in mounted.kinds.writing():
                        raise ControlError(f"{path}: still open for writing; it is uploaded once it is closed")
                    if mounted.kinds.is_kept_unsealed(place.inode.ino):
                        why = "it was open for reading and writing, may be mapped, and a process has it open"
                        raise ControlError(f"{path}: not sealed yet ({why}); it is uploaded once it is closed")
                    why = mounted.volume.target.read_only_reason or "it is mapped, or was written to meanwhile"
                    raise ControlError(f"{path}: not sealed yet ({why}); it is tried again, see daemon.log")


# -- undelete ------------------------------------------------------------------------------------------------------


async def undelete(mounted: Mounted, args: Undelete, _: Tell) -> dict[str, object]:
    """The newest that had this name and was deleted has it again."""
    parent_path, name = os.path.split(args.path.rstrip("/"))
    if not parent_path or not name:
        raise ControlError(f"{args.path}: name a file in a tenant")
    raw = os.fsencode(name)
    await by_the_daemon_alone(mounted)
    with mounted.volume.catalog.view() as view:
        place = resolve(view, mounted.mountpoint, parent_path)
        if place is None:
            raise ControlError(f"{args.path}: name a file in a tenant")
        shown = walk.shown(mounted, place._replace(name=f"{place.name}/{name}".lstrip("/")))
        if namespace.entry(view, place.tenant_id, place.inode.ino, raw) is not None:
            raise ControlError(f"{shown}: there is a file of that name; move it away first")
        found = namespace.deleted(view, place.tenant_id, place.inode.ino, raw)
    if not found:
        window = format_time(int(mounted.volume.settings.retention.undelete_window_s * 1000))
        raise ControlError(f"{shown}: nothing of that name that was in the remote was deleted in the last {window}")
    kind = mounted.kinds.of(place.inode.ino)
    change = partial(kind.undelete, ino=found[0].ino, parent=place.inode.ino, name=raw)
    row = await result_of(mounted.volume.writer.submit(place.tenant_id, change, sync=True))
    mounted.channel.invalidate_entry(place.inode.ino, raw)
    kind.undeleted(row)
    return {"path": shown, "size": row.size, "generation": row.generation}


Handler = Callable[[Mounted, Any, Tell], Awaitable[object]]
VERBS: Final[dict[str, tuple[type[Args], Handler]]] = {
    "ping": (Args, ping),
    "status": (Status, status),
    "warm": (Paths, move.warm),
    "resident": (Paths, move.resident),
    "evict": (Paths, move.evict),
    "pin": (Paths, move.pin),
    "unpin": (Paths, move.unpin),
    "flush": (Flush, flush),
    "end": (Args, ending.end),
    "checkpoint": (Checkpoint, checkpoint),
    "wait": (Paths, wait),
    "seal": (stream.Seal, stream.seal),
    "truncate": (stream.Truncate, stream.truncate),
    "deliver": (stream.Deliver, stream.deliver),
    "inbox": (inbox.Inbox, inbox.inbox),
    "delivered": (stream.WasDelivered, stream.delivered),
    "undelete": (Undelete, undelete),
    "generations": (past.Generations, past.generations),
    "revert": (past.Revert, past.revert),
    "jobs": (work.Jobs, work.jobs),
    "gc": (work.Gc, work.gc),
    "changes": (feed.Changes, feed.changes),
    "acknowledge": (feed.Acknowledge, feed.acknowledge),
    "cursors": (feed.Cursors, feed.cursors),
    "snapshot": (snapshot.Snapshot, snapshot.snapshot),
    "manifest": (toggle.Toggle, toggle.toggle),
}
# What a follower does, too: it looks, and moves its own copies.
FOLLOWED: Final = frozenset(
    ("ping", "status", "warm", "resident", "evict", "pin", "unpin", "flush", "end", "generations", "cursors")
)
