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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pyfuse3
import trio

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.inbox.intake import Intake
from aof2.engine.inspect.left import Left, left_here
from aof2.engine.kinds.kernel import KernelGoneError
from aof2.engine.kinds.mounted import make_kinds
from aof2.engine.kinds.registry import MountWish
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume, open_volume
from aof2.fs.channel import Channel, open_channel
from aof2.fs.channel_process import MountOptions
from aof2.fs.channel_wire import ChannelError
from aof2.fs.control.protocol import socket_path
from aof2.fs.control.server import ControlServer
from aof2.fs.dot import DotKind
from aof2.fs.ops import Operations
from aof2.fs.options import Options
from aof2.fs.tree import Tree
from aof2.fs.upcalls import Upcalls

log = logging.getLogger(__name__)

# Requests being answered at a time. Each may wait for the remote; the kernel sends no more than this is large.
REQUESTS_MAX: Final = 4096
END_WITHOUT_CHANNEL_MAX_S: Final = 15.0


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
        self.kinds = make_kinds(volume, channel, wish, partial(DotKind, self))
        self.inbox = Intake(volume, self.kinds)
        self.ending = trio.Event()

    def end(self) -> None:
        """As if the mount were gone. What is still open there answers ENOTCONN."""
        self.ending.set()


async def serve(
    settings: Settings, mountpoint: Path, options: Options, ready: Callable[[], None], *, env: Env | None = None
) -> None:
    """Mounts, and runs until the mount is gone. Cancelled, it takes the mount away itself."""
    mounting = open_channel(mountpoint, _mount_options(options), names=True, uring=settings.mount.uring == "auto")
    opening = open_volume(settings, env=env, follow=options.follow, take=options.take)
    async with opening as volume, mounting as channel:
        mounted = MountedVolume(volume, mountpoint, options, channel)
        if options.ro:
            volume.metrics.read_only.set_callback(lambda: 1)  # through this mount nothing is written
        operations = Operations(volume, channel, Tree(mounted.kinds, options))
        pyfuse3.init(operations, channel.fuse_fd_path, {"default_permissions"})
        try:
            await _serve(mounted, Upcalls(operations), ready)
        except* ChannelError:
            # A task that asked the channel something while the mount went, or after it was told to end. What `end` had
            # to do is done by then.
            if not channel.gone and not channel.closed:
                raise
        finally:
            pyfuse3.close(unmount=False)


def _mount_options(options: Options) -> MountOptions:
    return MountOptions(
        fsname=options.fsname,
        allow_other=options.allow_other,
        read_only=options.ro,
        nosuid=not options.suid,
        nodev=not options.dev,
        noexec=not options.exec,
        uid=os.getuid(),
        gid=os.getgid(),
    )


async def _serve(mounted: MountedVolume, upcalls: Upcalls, ready: Callable[[], None]) -> None:
    async with trio.open_nursery() as background:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(pyfuse3.main, max_tasks=REQUESTS_MAX))
            nursery.start_soon(_until_gone, mounted, upcalls, nursery.cancel_scope)
            nursery.start_soon(_until_told, mounted.ending, nursery.cancel_scope)
            await mounted.kinds.begin(background)
            await _give_names(mounted)
            _watch_fence(mounted, background)
            if not mounted.options.ro and mounted.volume.settings.manifest.enabled:
                await nursery.start(mounted.inbox.run)
            await nursery.start(ControlServer(socket_path(mounted.volume.settings), mounted).run)
            ready()
        with trio.CancelScope(shield=True):
            if not mounted.channel.gone:
                await mounted.channel.close()  # told to end: from here on no copy of the mount changes anything
            for kind in mounted.kinds.all:
                await kind.end()
            await _say_left(mounted.volume)
        background.cancel_scope.cancel()


async def _give_names(mounted: MountedVolume) -> None:
    """The channel answers for names by itself, from the catalog, as far as the kinds let it."""
    look = mounted.options
    catalog = mounted.volume.catalog.directory
    answers = mounted.kinds.answers()
    await mounted.channel.read_names(
        catalog, answers, uid=look.uid, gid=look.gid, umask=look.umask, follows=look.follow
    )


def _watch_fence(mounted: MountedVolume, nursery: trio.Nursery) -> None:
    """A volume that another machine took over becomes read-only, now or whenever that is noticed."""
    volume = mounted.volume
    volume.on_fenced = lambda reason: nursery.start_soon(_end_writing, mounted, reason)
    if volume.fenced:
        volume.on_fenced(volume.fenced)


async def _end_writing(mounted: MountedVolume, reason: str) -> None:
    """The mount is read-only when this returns: it takes nothing more, keeps what it has, and goes on serving reads.

    From the start no change is answered with success: the channel creates nothing by itself, the operations answer
    EROFS, and the backing files of writers that are open are immutable (they get EPERM; where the filesystem cannot,
    their bytes stay here, dirty). What was answered before is in the local log before that is closed: nothing that an
    application was told is forgotten.
    """
    kinds = mounted.kinds
    with trio.CancelScope(shield=True):
        stopped = kinds.refuse_writes()
        with contextlib.suppress(Aof2Error, OSError, KernelGoneError):  # said already; recovery folds the rest
            await kinds.fold()
        mounted.volume.target.turn_read_only(reason)
    log.error(
        "this mount is fenced: another machine writes the volume; what is here is kept and served, nothing is taken",
        extra={"reason": reason, "writers_stopped": stopped, "unsealed_files": kinds.unsealed().files},
    )


async def _until_gone(mounted: MountedVolume, upcalls: Upcalls, scope: trio.CancelScope) -> None:
    try:
        await mounted.channel.run(upcalls.answer, mounted.kinds, at_once=upcalls.at_once)
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
