"""The channel as a process, and its mount: how it is to appear, whether it came up, and how both end.

Owner: the trio thread; `detach` may wait for the kernel and runs on a worker thread. A crash leaves a mount that
answers ENOTCONN.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from aof2.fs import channel_wire as wire
from aof2.fs import mountpoint as mp
from aof2.fs.channel_wire import ChannelError, Kind

log = logging.getLogger(__name__)

_MOUNT_MAX_S: Final = 30.0
_END_MAX_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class MountOptions:
    """How the mount appears. `uid`, `gid` and `root_mode` are what the kernel believes until it asks."""

    fsname: str = "aof2"
    allow_other: bool = False
    read_only: bool = False
    nosuid: bool = True
    nodev: bool = True
    noexec: bool = False
    default_permissions: bool = True
    uid: int = field(default_factory=os.geteuid)
    gid: int = field(default_factory=os.getegid)
    root_mode: int = 0o040755

    def arguments(self) -> list[str]:
        flags = ("allow_other", "read_only", "nosuid", "nodev", "noexec", "default_permissions")
        return [
            f"--fsname={self.fsname}",
            f"--uid={self.uid}",
            f"--gid={self.gid}",
            f"--root-mode={self.root_mode:o}",
            *(f"--{name.replace('_', '-')}" for name in flags if getattr(self, name)),
        ]


async def end_process(process: trio.Process) -> None:
    """It was hung up on, so it ends; killed where it does not."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(_END_MAX_S):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        if process.stderr is not None:
            await process.stderr.aclose()


def detach(mountpoint: Path, device: tuple[int, int]) -> None:
    """Takes the mount away, if the topmost mount there is ours."""
    entry = mp.mounted_at(mountpoint)
    if entry is not None and entry.device == "{}:{}".format(*device):
        try:
            mp.detach(mountpoint)
        except mp.MountError as e:
            log.warning("%s", e)


async def mounted(control: socket.socket, process: trio.Process, mountpoint: Path) -> tuple[int, int]:
    """The mount's device, or ChannelError with the channel's words, and fusermount3's where it took part."""
    with trio.move_on_after(_MOUNT_MAX_S):
        await trio.lowlevel.wait_readable(control)
        data = control.recv(wire.MESSAGE_MAX)
        if not data:
            raise ChannelError(f"{mountpoint}: not mounted: the channel ended before it answered")
        kind, _, _ = wire.HEADER.unpack_from(data)
        body = data[wire.HEADER.size :]
        if kind == Kind.EV_MOUNTED:
            major, minor = struct.unpack("<II", body)
            return major, minor
        why = f"{body[4:].decode(errors='replace')}: {os.strerror(int.from_bytes(body[:4], 'little'))}"
        if process.stderr is not None and (said := (await process.stderr.receive_some()).decode(errors="replace")):
            why = said.strip().replace("\n", "; ")
        raise ChannelError(f"{mountpoint}: not mounted: {why}")
    raise ChannelError(f"{mountpoint}: not mounted: no answer in {_MOUNT_MAX_S:.0f} s")
