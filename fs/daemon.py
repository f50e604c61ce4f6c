"""The daemon: volume, channel, pyfuse3 and control socket, opened in order and closed in reverse.

    volume → channel (mounts) → pyfuse3 on its socket → kinds, control → ready        (serve)
    mount gone, or told to end → kinds ended: folded, sealed → volume closed           (the end)
    channel gone → volume closed, within seconds                                       (a crash of it)

Owner: one trio run, one nursery. A crash leaves what the engine's recovery expects; the channel closes /dev/fuse when
its sockets close, so applications get ENOTCONN.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

import pyfuse3
import trio

from aof2.engine.env import Env
from aof2.engine.inspect.left import Left, left_here
from aof2.engine.kinds.kind import Kind
from aof2.engine.kinds.mounted import make_kinds
from aof2.engine.kinds.opens import Opens
from aof2.engine.kinds.registry import MountWish
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume, open_volume
from aof2.fs.channel import Channel, ChannelError, MountOptions, open_channel
from aof2.fs.control import views
from aof2.fs.control.server import ControlServer
from aof2.fs.dot import Contents, DotKind
from aof2.fs.ops import Operations
from aof2.fs.options import Options
from aof2.fs.readonly import end_writing
from aof2.fs.tree import Tree
from aof2.fs.upcalls import Upcalls

log = logging.getLogger(__name__)

# Requests being answered at a time. Each may wait for the remote; the kernel sends no more than this is large.
REQUESTS_MAX: Final = 4096
END_WITHOUT_CHANNEL_MAX_S: Final = 15.0
CONTROL_NAME: Final = "control.sock"


class MountedVolume:
    """A volume and its mount: what control verbs and views look at."""

    def __init__(self, volume: Volume, mountpoint: Path, options: Options, channel: Channel) -> None:
        self.volume = volume
        self.mountpoint = mountpoint
        self.options = options
        self.channel = channel
        self.started_ms = volume.env.now_ms()
        wish = MountWish(
            read_only=options.ro,
            passthrough=options.passthrough,
            as_recorded=(options.uid, options.gid, options.umask) == (None, None, None),
        )
        self.kinds = make_kinds(volume, channel, wish, self._top)
        self.ending = trio.Event()

    def end(self) -> None:
        """As if the mount were gone. What is still open there answers ENOTCONN."""
        self.ending.set()

    def _top(self, opens: Opens, tenants: Mapping[int, Kind]) -> DotKind:
        contents = Contents(
            status=lambda: [views.status_json(self)],
            metrics=lambda: [views.metrics_text(self)],
            manifest=lambda tenant: views.manifest_jsonl(self, tenant),
        )
        uid = os.getuid() if self.options.uid is None else self.options.uid
        gid = os.getgid() if self.options.gid is None else self.options.gid
        return DotKind(self.volume, opens, tenants, contents, uid=uid, gid=gid)


async def serve(
    settings: Settings, mountpoint: Path, options: Options, ready: Callable[[], None], *, env: Env | None = None
) -> None:
    """Mounts, and runs until the mount is gone. Cancelled, it takes the mount away itself."""
    async with open_volume(settings, env=env) as volume, _open_mount(settings, mountpoint, options) as channel:
        mounted = MountedVolume(volume, mountpoint, options, channel)
        if options.ro:
            volume.metrics.read_only.set_callback(lambda: 1)  # through this mount nothing is written
        operations = Operations(volume, channel, Tree(mounted.kinds, options))
        pyfuse3.init(operations, channel.fuse_fd_path, {"default_permissions"})
        try:
            await _run(mounted, operations, ready)
        finally:
            pyfuse3.close(unmount=False)


@contextlib.asynccontextmanager
async def _open_mount(settings: Settings, mountpoint: Path, options: Options) -> AsyncIterator[Channel]:
    wanted = MountOptions(
        fsname=options.fsname,
        allow_other=options.allow_other,
        read_only=options.ro,
        nosuid=not options.suid,
        nodev=not options.dev,
        noexec=not options.exec,
        uid=os.getuid(),
        gid=os.getgid(),
    )
    async with open_channel(mountpoint, wanted, names=True, uring=settings.mount.uring == "auto") as channel:
        yield channel


async def _run(mounted: MountedVolume, operations: Operations, ready: Callable[[], None]) -> None:
    upcalls = Upcalls(operations)
    try:
        await _serve(mounted, upcalls, ready)
    except* ChannelError:
        # A task that asked the channel something while the mount went. What `end` had to do is done by then.
        if not mounted.channel.gone:
            raise


async def _serve(mounted: MountedVolume, upcalls: Upcalls, ready: Callable[[], None]) -> None:
    async with trio.open_nursery() as background:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve_kernel)
            nursery.start_soon(_until_gone, mounted, upcalls, nursery.cancel_scope)
            nursery.start_soon(_until_told, mounted.ending, nursery.cancel_scope)
            for kind in mounted.kinds.all:
                await background.start(kind.run)
            _watch_fence(mounted, background)
            await nursery.start(ControlServer(mounted.volume.state_dir / CONTROL_NAME, mounted).run)
            ready()
        with trio.CancelScope(shield=True):
            if not mounted.channel.gone:
                await mounted.channel.close()  # told to end: from here on no copy of the mount changes anything
            for kind in mounted.kinds.all:
                await kind.end()
            await _say_left(mounted.volume)
        background.cancel_scope.cancel()


def _watch_fence(mounted: MountedVolume, nursery: trio.Nursery) -> None:
    """A volume that another machine took over becomes read-only, now or whenever that is noticed."""
    volume = mounted.volume
    volume.on_fenced = lambda reason: nursery.start_soon(end_writing, volume, mounted.kinds, reason)
    if volume.fenced:
        volume.on_fenced(volume.fenced)


async def _serve_kernel() -> None:
    await pyfuse3.main(max_tasks=REQUESTS_MAX)


async def _until_gone(mounted: MountedVolume, upcalls: Upcalls, scope: trio.CancelScope) -> None:
    try:
        await mounted.channel.run(upcalls.answer, mounted.kinds, at_once=upcalls.at_once, next_names=upcalls.next_names)
    except ChannelError:
        # No request can be answered, whatever still waits for a disk or a remote: it leaves what a crash leaves.
        faulthandler.dump_traceback_later(END_WITHOUT_CHANNEL_MAX_S, exit=True, file=sys.__stderr__ or 2)
        raise
    log.info("the mount is gone")
    scope.cancel()


async def _until_told(ending: trio.Event, scope: trio.CancelScope) -> None:
    await ending.wait()
    log.info("told to end: the mount is gone from here, copies of it in other mount namespaces are not")
    scope.cancel()


async def _say_left(volume: Volume) -> None:
    """Logs what the remote does not have yet: a signal and umount(8) unmount without waiting for it."""
    left = await trio.to_thread.run_sync(_left, volume)
    if left:
        log.warning(
            "unmounted before everything was in the remote: it is uploaded after the next mount",
            extra={
                "files": left.files,
                "unsealed": left.unsealed,
                "bytes": left.bytes,
                "first": left.paths,
                "state_dir": str(volume.state_dir),
            },
        )


def _left(volume: Volume) -> Left:
    with volume.catalog.view() as view:
        return left_here(view, volume.state_dir)
