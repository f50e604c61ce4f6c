"""The daemon: volume, channel, pyfuse3 and control socket, opened in order and closed in reverse.

    volume → channel (mounts) → pyfuse3 on its socket → files, control → ready        (serve)
    mount gone → files sealed → volume closed                                          (the end)
    channel gone → volume closed, within seconds                                       (a crash of it)

Owner: one trio run, one nursery. A crash leaves what the engine's recovery expects; the channel closes /dev/fuse when
its sockets close, so applications get ENOTCONN.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import pyfuse3
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.files import Files
from aof2.engine.inspect.left import Left, left_here
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume, open_volume
from aof2.fs.births import Births
from aof2.fs.channel import Channel, ChannelError, MountOptions, open_channel
from aof2.fs.control import views
from aof2.fs.control.server import ControlServer
from aof2.fs.nodes import Nodes
from aof2.fs.ops import Operations
from aof2.fs.options import Options
from aof2.fs.readonly import end_writing
from aof2.fs.setattr import CAPABILITY
from aof2.fs.special import Special
from aof2.fs.unlinks import Unlinks
from aof2.fs.upcalls import Upcalls

log = logging.getLogger(__name__)

# Requests being answered at a time. Each may wait for the remote; the kernel sends no more than this is large.
REQUESTS_MAX: Final = 4096
ANSWER_MAX_S: Final = 30.0
SEAL_AT_END_MAX_S: Final = 30.0  # `aof2 umount` has sealed before; what a signal or umount(8) left may take longer
END_WITHOUT_CHANNEL_MAX_S: Final = 15.0
CONTROL_NAME: Final = "control.sock"


class MountedVolume:
    """A volume and its mount: what control verbs and views look at."""

    def __init__(self, volume: Volume, mountpoint: Path, options: Options, channel: Channel, files: Files) -> None:
        self.volume = volume
        self.mountpoint = mountpoint
        self.options = options
        self.channel = channel
        self.files = files
        self.started_ms = volume.env.now_ms()
        self.births: Births | None = None
        self.unlinks: Unlinks | None = None

    def stop_births(self) -> None:
        """The channel creates nothing by itself, until a create that came here went well."""
        if self.births is not None:
            self.births.pause()

    async def caught_up(self) -> None:
        """What the channel created by itself is in the catalog when this returns, what was unlinked is not."""
        if self.births is not None:
            await self.births.catch_up()
        if self.unlinks is not None:
            await self.unlinks.catch_up()


# What fanotify answers where pre-content events cannot be had.
BRAKE_WHY: Final = {
    errno.EPERM: "pre-content events take CAP_SYS_ADMIN",
    errno.EINVAL: "this kernel has no pre-content events (6.14 has)",
    errno.EOPNOTSUPP: "the filesystem of hot_cache has no pre-content events (ext4, xfs and btrfs have)",
    errno.ENOSYS: "this kernel has no fanotify",
}


async def serve(
    settings: Settings, mountpoint: Path, options: Options, ready: Callable[[], None], *, env: Env | None = None
) -> None:
    """Mounts, and runs until the mount is gone. Cancelled, it takes the mount away itself."""
    async with open_volume(settings, env=env) as volume, _open_mount(mountpoint, options) as channel:
        files = Files(volume, channel)
        mounted = MountedVolume(volume, mountpoint, options, channel, files)
        if options.ro:
            volume.metrics.read_only.set_callback(lambda: 1)  # through this mount nothing is written
        special = Special(
            uid=os.getuid() if options.uid is None else options.uid,
            gid=os.getgid() if options.gid is None else options.gid,
            now_ns=volume.env.now_ns(),
            tenants=volume.tenant_names,
        )
        special.provide(
            status=lambda: [views.status_json(mounted)],
            metrics=lambda: [views.metrics_text(mounted)],
            manifest=lambda tenant: views.manifest_jsonl(mounted, tenant),
        )
        operations = Operations(Nodes(volume, files, special, options))
        pyfuse3.init(operations, channel.fuse_fd_path, {"default_permissions"})
        try:
            await _run(mounted, operations, ready)
        finally:
            pyfuse3.close(unmount=False)


@contextlib.asynccontextmanager
async def _open_mount(mountpoint: Path, options: Options) -> AsyncIterator[Channel]:
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
    async with open_channel(mountpoint, wanted, names=True) as channel:
        yield channel


async def _run(mounted: MountedVolume, operations: Operations, ready: Callable[[], None]) -> None:
    files, channel = mounted.files, mounted.channel
    births: Births | None = None
    unlinks: Unlinks | None = None
    upcalls = Upcalls(operations)
    async with trio.open_nursery() as background:
        async with trio.open_nursery() as nursery:
            await background.start(files.run)
            nursery.start_soon(_serve_kernel)
            nursery.start_soon(_until_gone, channel, upcalls, files, nursery.cancel_scope)
            await _decide_passthrough(mounted)
            await _start_brake(mounted)
            await _announce_capabilities(mounted)
            files.cold.load()
            births = await _start_births(mounted, background)
            operations.nodes.births = mounted.births = births
            unlinks = await _start_unlinks(mounted, background)
            operations.nodes.unlinks = mounted.unlinks = unlinks
            _watch_fence(mounted, background)
            for ino in mounted.volume.dirty_inos:
                nursery.start_soon(_adopt, files, ino)
            await nursery.start(ControlServer(mounted.volume.state_dir / CONTROL_NAME, mounted).run)
            ready()
        with trio.CancelScope(shield=True):
            if births is not None:
                with contextlib.suppress(Aof2Error, OSError, ChannelError):  # said, and left to recovery
                    await births.catch_up()
                births.close()
            if unlinks is not None:
                with contextlib.suppress(Aof2Error, OSError):  # said, and left to recovery
                    await unlinks.catch_up()
                unlinks.close()
            await operations.drop_all_lingering()
            await _seal_the_rest(files)
            await _say_left(mounted.volume)
        background.cancel_scope.cancel()


async def _start_births(mounted: MountedVolume, nursery: trio.Nursery) -> Births | None:
    """Lets the channel create files by itself, where they can be passed through and look as they are."""
    options = mounted.options
    if not mounted.files.passthrough or options.ro or not mounted.volume.settings.manifest.enabled:
        return None
    if (options.uid, options.gid, options.umask) != (None, None, None):
        return None
    births = Births(mounted.files, mounted.channel)
    await births.start()
    await nursery.start(births.run)
    return births


async def _start_unlinks(mounted: MountedVolume, nursery: trio.Nursery) -> Unlinks | None:
    """Lets unlinks be answered from a log of their own."""
    if mounted.options.ro or not mounted.volume.settings.manifest.enabled:
        return None
    unlinks = Unlinks(mounted.files)
    await unlinks.start()
    await nursery.start(unlinks.run)
    return unlinks


def _watch_fence(mounted: MountedVolume, nursery: trio.Nursery) -> None:
    """A volume that another machine took over becomes read-only, now or whenever that is noticed."""
    volume = mounted.volume
    volume.on_fenced = lambda reason: nursery.start_soon(
        end_writing, mounted.files, mounted.births, mounted.caught_up, reason
    )
    if volume.fenced:
        volume.on_fenced(volume.fenced)


async def _serve_kernel() -> None:
    await pyfuse3.main(max_tasks=REQUESTS_MAX)


async def _until_gone(channel: Channel, upcalls: Upcalls, files: Files, scope: trio.CancelScope) -> None:
    try:
        await channel.run(
            upcalls.answer,
            lambda ino, _: files.refused(ino),
            at_once=upcalls.at_once,
            next_names=upcalls.next_names,
        )
    except ChannelError:
        # Nobody can be served, whatever still waits for a disk or a remote: what it leaves is what a crash leaves.
        faulthandler.dump_traceback_later(END_WITHOUT_CHANNEL_MAX_S, exit=True, file=sys.__stderr__ or 2)
        raise
    log.info("the mount is gone")
    scope.cancel()


async def _adopt(files: Files, ino: int) -> None:
    try:
        await files.adopt(ino)
    except (Aof2Error, OSError) as e:
        log.warning("a file that was being written is not sealed yet", extra={"ino": ino, "error": str(e)})


async def _decide_passthrough(mounted: MountedVolume) -> None:
    """Passthrough or not, once for the mount, said once."""
    files = mounted.files
    if not mounted.options.passthrough:
        why = "turned off by -o nopassthrough"
    else:
        why = await _probe(mounted)
    files.passthrough, files.passthrough_why = not why, why
    if why:
        log.warning("passthrough is off; reads and writes go through the channel", extra={"reason": why})


async def _start_brake(mounted: MountedVolume) -> None:
    """Whether passthrough writers can be held at the end of their room, once for the mount."""
    brake, channel = mounted.files.room.brake, mounted.channel
    if not mounted.files.passthrough:
        brake.why = "nothing is passed through"
        return
    channel.room_short, channel.touched = brake.short, brake.touched
    with tempfile.TemporaryFile(dir=mounted.volume.hot.root) as probe:
        code = await channel.brake(probe.fileno(), mounted.files.block_bytes)
    brake.on, brake.why = not code, BRAKE_WHY.get(code, os.strerror(code)) if code else ""
    if code:
        log.info("passthrough writers cannot be held; room is kept in other ways", extra={"reason": brake.why})


async def _probe(mounted: MountedVolume) -> str:
    """Why the kernel will not pass files of this cache through; "" when it will."""
    await mounted.channel.initialised()
    if not mounted.channel.passthrough_offered:
        return "this kernel has no FUSE passthrough (6.9 has), or the mount lacks CAP_SYS_ADMIN"
    root = mounted.volume.hot.root
    mounted.volume.env.make_dirs(root)
    with tempfile.TemporaryFile(dir=root) as probe:
        code = await mounted.channel.probe(probe.fileno())
    return f"the filesystem of {root} refuses it ({os.strerror(code)})" if code else ""


async def _announce_capabilities(mounted: MountedVolume) -> None:
    """The few inodes with file capabilities: for all others the channel answers by itself."""
    with mounted.volume.catalog.view() as view:
        for stream_id in mounted.volume.tenant_names():
            for (ino, name), _ in view.scan(stream_id, t.XATTRS):
                if name == CAPABILITY:
                    mounted.channel.caps(ino, True)


async def _seal_the_rest(files: Files) -> None:
    """The mount is gone, so everything is closed: what was written is sealed, and uploaded now or after a restart."""
    with trio.move_on_after(SEAL_AT_END_MAX_S), contextlib.suppress(Aof2Error, OSError):
        await files.seal_closed()
    files.sealer.stop()


async def _say_left(volume: Volume) -> None:
    """What the remote does not have yet, for whoever unmounted without waiting for it: a signal, umount(8)."""
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
