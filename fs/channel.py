"""The daemon's side of `aof2-channel`, the process that owns /dev/fuse (`native/channel/`, `PROTOCOL.md` there).

Invariants
- What is said about a node or handle before a reply goes out through pyfuse3 has effect before that reply: `node` and
  `handle` are on the socket when they return, and the channel looks there first.
- Only `async` methods wait for the channel: it may be waiting for us to read events.
- The channel ends with the mount, and within a second after this process: it needs no looking after.
- The daemon opens nothing on the mount.

Owner: the trio thread; `run` is the one task that waits for events (`channel_talk.py`). A crash leaves a mount that
answers ENOTCONN.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

import trio

from aof2.engine.kinds.kernel import (
    PARTIAL_BYTES_MAX,
    AppendState,
    Framing,
    Grown,
    NestAction,
    Written,
)
from aof2.fs import channel_wire as wire
from aof2.fs.channel_outbox import sealed_memory, socket_pair
from aof2.fs.channel_process import MountOptions, detach, end_process, mounted
from aof2.fs.channel_talk import Talk
from aof2.fs.channel_wire import ChannelError, Kind, KnownHandle
from aof2.native.channel_path import channel_path

log = logging.getLogger(__name__)

_END_MAX_S: Final = 5.0


class Channel(Talk):
    """The channel of one mount. Made by `open_channel`. What it is told is written down in `kinds.kernel.Kernel`."""

    def __init__(
        self, process: trio.Process, mountpoint: Path, fuse_fd: int, control: socket.socket, notify: socket.socket
    ) -> None:
        super().__init__(process, control, notify)
        self.fuse_fd_path = f"/dev/fd/{fuse_fd}"
        """For `pyfuse3.init`; its session closes the descriptor."""
        self.pid = process.pid
        self.device = (0, 0)
        self.handed_over = 0
        """Long answers that went around the FUSE socket."""
        self._mountpoint = mountpoint
        self._slot = 0

    # -- what the channel is told ------------------------------------------------------------------------------

    def node(
        self, nodeid: int, fd: int, *, mode: int, flags: int = 0, block_bytes: int = 0, block_count: int = 0
    ) -> None:
        self._tell(Kind.NODE, wire.NODE.pack(nodeid, mode, flags, block_bytes, block_count), fd, now=True)

    def handle(self, nodeid: int, fh: int, cookie: bytes = b"") -> None:
        if len(cookie) > wire.COOKIE_LEN:
            raise ValueError(f"a cookie has at most {wire.COOKIE_LEN} bytes, this one {len(cookie)}")
        self._tell(Kind.HANDLE, wire.HANDLE.pack(nodeid, fh, cookie), now=True)

    def blocks(self, nodeid: int, first: int, count: int) -> None:
        self._tell(Kind.BLOCKS, wire.RANGE.pack(nodeid, first, count))

    def coming(self, nodeid: int, first: int, count: int) -> None:
        self._tell(Kind.COMING, wire.RANGE.pack(nodeid, first, count))

    async def clear(self, nodeid: int, first: int, count: int) -> None:
        while True:
            (flags, _), *_ = await self._ask(Kind.CLEAR, wire.RANGE.pack(nodeid, first, count))
            if not flags & wire.AGAIN:
                return

    def grant(self, nodeid: int, n: int) -> None:
        self._tell(Kind.GRANT, wire.GRANT.pack(nodeid, n))

    async def collect(self, nodeid: int) -> Written:
        written, budget, untracked, again = 0, 0, False, True
        ranges: list[tuple[int, int]] = []
        while again:
            again = False
            for flags, body in await self._ask(Kind.COLLECT, wire.NODEID.pack(nodeid)):
                _, more, budget, count = wire.WRITTEN.unpack_from(body)
                written += more
                untracked |= bool(flags & wire.UNTRACKED)
                again |= bool(flags & wire.AGAIN)
                pairs = struct.unpack_from(f"<{2 * count}Q", body, wire.WRITTEN.size)
                ranges.extend(zip(pairs[::2], pairs[1::2], strict=True))
        return Written(written, budget, tuple(ranges), untracked)

    def drop(self, nodeid: int) -> None:
        self._killed.discard(nodeid)
        self._tell(Kind.DROP, wire.NODEID.pack(nodeid))

    def caps(self, nodeid: int, on: bool) -> None:
        self._tell(Kind.CAPS, wire.CAPS.pack(nodeid, int(on)))

    def killed(self, nodeid: int) -> bool:
        self._receive()
        found = nodeid in self._killed
        self._killed.discard(nodeid)
        return found

    def told_opens(self, nodeid: int) -> list[tuple[int, int]]:
        self._receive()
        return self._opened.pop(nodeid, [])

    def told_open_of(self, fh: int) -> int:
        self._receive()
        return next((ino for ino, some in self._opened.items() if any(fh == number for number, _ in some)), 0)

    def hand_over(self, fh: int, offset: int, data: bytes) -> int:
        slot, self._slot = self._slot, (self._slot + 1) % wire.SLOTS
        try:
            fd = sealed_memory(data)
            try:
                self._tell(Kind.BYTES, wire.BYTES.pack(fh, offset, slot, len(data)), fd, now=True)
            finally:
                os.close(fd)
        except (OSError, ChannelError) as e:
            log.warning("a long answer could not be handed over", extra={"bytes": len(data), "error": str(e)})
            return errno.EIO
        self.handed_over += 1
        return wire.HELD + slot

    async def caught_up(self) -> None:
        with contextlib.suppress(ChannelError):
            await self._ask(Kind.CLEAR, wire.RANGE.pack(0, 0, 0))

    async def probe(self, fd: int) -> int:
        (_, body), *_ = await self._ask(Kind.PROBE, b"", fd)
        return int.from_bytes(body[:4], "little")

    async def dump(self) -> list[KnownHandle]:
        """Every handle in the table, with the cookie it was given."""
        answers = await self._ask(Kind.DUMP, b"")
        return [KnownHandle(*row) for _, body in answers for row in wire.HANDLE.iter_unpack(body)]

    # -- the brake ---------------------------------------------------------------------------------------------

    async def brake(self, fd: int, block_bytes: int) -> int:
        (_, body), *_ = await self._ask(Kind.BRAKE, wire.RANGE.pack(os.getpid(), block_bytes, 0), fd)
        return int.from_bytes(body[:4], "little")

    def watch(self, nodeid: int, *, append: bool) -> None:
        flags = wire.WATCH_APPEND if append else 0
        self._tell(Kind.WATCH, wire.CAPS.pack(nodeid, flags), now=True)

    def room(self, stream_id: int, more_bytes: int) -> None:
        self._tell(Kind.ROOM, wire.GRANT.pack(stream_id, more_bytes & 0xFFFF_FFFF_FFFF_FFFF))

    async def grown(self, stream_id: int, *, take: bool = False) -> Grown:
        files: list[tuple[int, int]] = []
        left = waiting = 0
        for _, body in await self._ask(Kind.GROWN, wire.NODEID.pack(stream_id), flags=wire.TAKE if take else 0):
            _, left, waiting, count = wire.GROWN.unpack_from(body)
            pairs = struct.unpack_from(f"<{2 * count}Q", body, wire.GROWN.size)
            files.extend(zip(pairs[::2], pairs[1::2], strict=True))
        return Grown(left, waiting, tuple(files))

    def expect(self, nodeid: int, more_bytes: int) -> None:
        self._tell(Kind.EXPECT, wire.GRANT.pack(nodeid, more_bytes), now=True)

    def deny(self, stream_id: int, code: int) -> None:
        self._tell(Kind.DENY, wire.CAPS.pack(stream_id, code))

    def stop_silent(self, stream_id: int) -> None:
        self._tell(Kind.DENY, wire.CAPS.pack(stream_id, errno.ENOSPC), flags=wire.SILENT)

    async def claim(self, nodeid: int, first: int, count: int) -> bool:
        (flags, _), *_ = await self._ask(Kind.CLAIM, wire.RANGE.pack(nodeid, first, count))
        return not flags & wire.AGAIN

    def unclaim(self, nodeid: int, first: int, count: int) -> None:
        self._tell(Kind.UNCLAIM, wire.RANGE.pack(nodeid, first, count))

    def pass_on(self, number: int, code: int = 0) -> None:
        self._tell(Kind.PASS, wire.CAPS.pack(number, code))

    # -- births ------------------------------------------------------------------------------------------------

    def birth_page(self, fd: int) -> None:
        self._tell(Kind.BIRTH_PAGE, b"", fd)

    def birth_dir(self, stream_id: int, slot: int, fd: int) -> None:
        self._tell(Kind.BIRTH_DIR, wire.CAPS.pack(stream_id, slot), fd)

    def birth_log(self, stream_id: int, fd: int) -> None:
        self._tell(Kind.BIRTH_LOG, wire.GRANT.pack(stream_id, 0), fd)

    def birth_inos(self, stream_id: int, first: int, count: int, *, bears: bool = True) -> None:
        self._tell(Kind.BIRTH_INOS, wire.RANGE.pack(stream_id, first, count), flags=0 if bears else wire.BARREN)

    async def nest(self, ino: int, action: NestAction, gid: int | None = None) -> bool:
        body = wire.NEST.pack(ino, action, 0 if gid is None else 1, gid or 0)
        (flags, _), *_ = await self._ask(Kind.NEST, body)
        return not flags & wire.AGAIN

    def names(self, ino: int, packed: bytes) -> None:
        self._tell(Kind.NAMES, wire.NODEID.pack(ino) + packed)

    # -- streams -----------------------------------------------------------------------------------------------

    def append_give(
        self,
        state: AppendState,
        fd: int,
        *,
        stream_ino: int,
        base_record_count: int,
        room_end: int,
        ext_id: int,
        max_size: int,
        framing: Framing,
        record_max: int,
    ) -> None:
        body = wire.APPEND.pack(
            *(state.nodeid, state.segment_id, stream_ino, base_record_count),
            *(state.end, state.next_logical, state.record_count, state.crc64, state.last_ts_ms),
            *(room_end, ext_id, max_size, framing, record_max),
        )
        self._tell(Kind.APPEND, body, fd, now=True)

    def append_room(self, nodeid: int, room_end: int) -> None:
        self._tell(Kind.APPEND_ROOM, wire.GRANT.pack(nodeid, room_end))

    async def append_take(self, nodeid: int) -> AppendState | None:
        return await self._ask_appended(Kind.APPEND_TAKE, nodeid)

    async def append_state(self, nodeid: int) -> AppendState | None:
        return await self._ask_appended(Kind.APPEND_STATE, nodeid)

    async def _ask_appended(self, kind: Kind, nodeid: int) -> AppendState | None:
        (_, body), *_ = await self._ask(kind, wire.NODEID.pack(nodeid))
        state = AppendState(*wire.APPENDED.unpack_from(body))
        return state if state.segment_id else None

    def append_handle(self, nodeid: int, fh: int, *, ext_id: int = 0, forwards: bool = False) -> None:
        flags = wire.FORWARDS if forwards else 0
        self._tell(Kind.APPEND_HANDLE, wire.APPEND_HANDLE.pack(nodeid, fh, ext_id, flags), now=True)

    def append_partial(self, nodeid: int, fh: int, data: bytes) -> None:
        if len(data) > PARTIAL_BYTES_MAX:
            raise ValueError(f"the channel keeps at most {PARTIAL_BYTES_MAX} bytes of a line, not {len(data)}")
        self._tell(Kind.APPEND_PARTIAL, wire.GRANT.pack(nodeid, fh) + data, now=True)

    def hear(self) -> None:
        self._receive()

    # -- names -------------------------------------------------------------------------------------------------

    async def read_names(
        self,
        catalog: Path,
        answers: Mapping[int, int],
        *,
        uid: int | None,
        gid: int | None,
        umask: int | None,
        follows: bool = False,
    ) -> bool:
        """The channel answers what it may (`Answers`, by stream) from the catalog, as all is to look; False where
        it cannot read that: the daemon answers. `follows`: another machine changes the rows."""
        flags = (0 if uid is None else wire.LOOKS_UID) | (0 if gid is None else wire.LOOKS_GID)
        flags |= wire.FOLLOWS if follows else 0
        body = wire.CATALOG.pack(flags, uid or 0, gid or 0, umask or 0) + os.fsencode(catalog)
        (_, code), *_ = await self._ask(Kind.CATALOG, body)
        if int.from_bytes(code[:4], "little"):
            return False
        for stream_id, what in answers.items():
            if what:
                self._tell(Kind.TREE, wire.CAPS.pack(stream_id, what))
        return True

    # -- what the kernel is told -------------------------------------------------------------------------------

    def invalidate_inode(self, nodeid: int, offset: int = 0, length: int = 0) -> None:
        self._tell_kernel(wire.inval_inode(nodeid, offset, length))

    def invalidate_attr(self, nodeid: int) -> None:
        self._tell_kernel(wire.inval_inode(nodeid, -1, 0))

    def invalidate_entry(self, parent: int, name: bytes, child: int = 0) -> None:
        """The kernel forgets a name; with `child`, that it is gone (watchers are told). The channel, too."""
        self._tell(Kind.NEST, wire.NEST.pack(parent, NestAction.END, 0, 0))
        self._tell_kernel(wire.delete(parent, name, child) if child else wire.inval_entry(parent, name))

    def _tell_kernel(self, message: bytes) -> None:
        if not self._closed:
            self._notify.send(message)

    # -- the end -----------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the daemon ended it: who asks it something from then on gets ChannelError."""
        return self._closed

    async def unmount(self) -> None:
        """Takes the name away now, the mount once nothing on it is open: then `run` returns."""
        await trio.to_thread.run_sync(detach, self._mountpoint, self.device, abandon_on_cancel=True)

    async def close(self) -> None:
        """Ends channel and mount, if they have not ended yet. Files still open there answer ENOTCONN.

        After a crash of the channel the mount stays, for the user to see: the folder below must not take their files.
        """
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            self._receive()
            if self._ended and not self.gone:
                await end_process(self._process)
            if not self.gone and not self._process.returncode:
                with trio.move_on_after(_END_MAX_S):
                    await self.unmount()
            self._end()
            self._control.close()
            self._notify.close()
            await end_process(self._process)


@contextlib.asynccontextmanager
async def open_channel(
    mountpoint: Path,
    options: MountOptions,
    *,
    names: bool = False,
    uring: bool = False,
    arguments: tuple[str, ...] = (),
) -> AsyncIterator[Channel]:
    """Starts the channel and mounts; ChannelError says why it could not. The mount answers once pyfuse3 runs on
    `fuse_fd_path`, and is taken away at the end. With `names`, LOOKUP, GETATTR and READDIRPLUS are upcalls; with
    `uring`, requests come over io_uring where the kernel can. `arguments` are further ones of the executable, for
    tests."""
    mountpoint = Path(os.path.realpath(mountpoint))
    fuse, fuse_theirs, reply_room = socket_pair()
    control, control_theirs, _ = socket_pair()
    notify, notify_theirs, _ = socket_pair()
    theirs = (fuse_theirs, control_theirs, notify_theirs)
    process: trio.Process | None = None
    try:
        process = await trio.lowlevel.open_process(
            [
                str(channel_path()),
                *(f"--{name}={s.fileno()}" for name, s in zip(("fuse", "control", "notify"), theirs, strict=True)),
                f"--mountpoint={mountpoint}",
                f"--reply-room={reply_room}",
                *options.arguments(),
                *(["--upcall-names"] if names else []),
                *(["--uring"] if uring else []),
                *arguments,
            ],
            pass_fds=[s.fileno() for s in theirs],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
        for s in theirs:
            s.close()
        device = await mounted(control, process, mountpoint)
    except BaseException:
        for s in (fuse, control, notify, *theirs):
            s.close()
        if process is not None:
            await end_process(process)
        raise
    channel = Channel(process, mountpoint, fuse.detach(), control, notify)
    channel.device = device
    try:
        yield channel
    finally:
        await channel.close()
