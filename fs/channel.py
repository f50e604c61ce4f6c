"""The daemon's side of `aof2-channel`, the process that owns /dev/fuse (`native/channel/`, `PROTOCOL.md` there).

Invariants
- What is said about a node or handle before a reply goes out through pyfuse3 has effect before that reply: `node` and
  `handle` are on the socket when they return, and the channel looks there first.
- Only `async` methods wait for the channel: it may be waiting for us to read events.
- The channel ends with the mount, and within a second after this process: it needs no looking after.
- Nobody here opens anything on the mount.

Owner: the trio thread; `run` is the one task that reads events. A crash leaves a mount that answers ENOTCONN.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import logging
import os
import select
import socket
import struct
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

import trio

from aof2.native.channel_path import channel_path

log = logging.getLogger(__name__)

_SO_SNDBUFFORCE: Final = 32
_SOCKET_ROOM: Final = 32 << 20
_MESSAGE_MAX: Final = 64 * 1024 + 64
_QUEUE_MAX: Final = 65536
_MOUNT_MAX_S: Final = 30.0
_END_MAX_S: Final = 5.0
_BLOCKED_MAX_MS: Final = 1000
_COOKIE_LEN: Final = 16
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8

_HEADER: Final = struct.Struct("<HHI")
_NODE: Final = struct.Struct("<QIIQQ")
_HANDLE: Final = struct.Struct("<QQ16s")
_RANGE: Final = struct.Struct("<QQQ")
_GRANT: Final = struct.Struct("<QQ")
_NODEID: Final = struct.Struct("<Q")
_CAPS: Final = struct.Struct("<QI")
_REPLY: Final = struct.Struct("<Qi")
_WRITTEN: Final = struct.Struct("<QQQI")
_UPCALL: Final = struct.Struct("<QIQIII")
_INIT: Final = struct.Struct("<IIIII")
_NOTIFY: Final = struct.Struct("=IiQ")
_INVAL_INODE: Final = struct.Struct("=Qqq")
_INVAL_ENTRY: Final = struct.Struct("=QII")
_DELETE: Final = struct.Struct("=QQII")


class Mode(IntEnum):
    """How the opens of an inode are served. Spoken on the socket: never renumber."""

    PASSTHROUGH = 1
    RANGED = 2


class NodeFlag(IntEnum):
    """Spoken on the socket: never renumber."""

    ALL_PRESENT = 1
    """Every block is in the backing file."""
    SUID = 2
    """A write by another user comes here, where suid, sgid and capabilities are cleared."""


class _Kind(IntEnum):
    """Messages, ours and the channel's. Spoken on the socket: never renumber."""

    NODE = 1
    HANDLE = 2
    BLOCKS = 3
    CLEAR = 4
    GRANT = 5
    COLLECT = 6
    DROP = 7
    CAPS = 8
    REPLY = 9
    DUMP = 10
    PROBE = 11
    EV_MOUNTED = 128
    EV_FAILED = 129
    EV_INIT = 130
    EV_GONE = 131
    EV_REFUSED = 132
    EV_CLEARED = 133
    EV_WRITTEN = 134
    EV_HANDLE = 135
    EV_DUMPED = 136
    EV_PROBED = 137
    EV_UPCALL = 138
    EV_KILL = 139


class _Notify(IntEnum):
    """The kernel's numbers."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    DELETE = 6


_MORE: Final = 1
_AGAIN: Final = 2
_UNTRACKED: Final = 4


class ChannelError(Exception):
    """The channel could not mount, or ended by itself. The message is for the user; there is nothing to retry."""


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


@dataclass(frozen=True, slots=True)
class Upcall:
    """A request libfuse cannot pass on: `body` is what follows the kernel's header."""

    unique: int
    opcode: int
    nodeid: int
    uid: int
    gid: int
    pid: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """What the channel wrote by itself since it was last asked."""

    bytes_written: int
    budget_left: int
    ranges: tuple[tuple[int, int], ...]
    """(first block, count), ascending."""
    untracked: bool
    """Something was written that no range tells: the node has no block size."""


@dataclass(frozen=True, slots=True)
class KnownHandle:
    """A handle in the channel's table."""

    nodeid: int
    fh: int
    cookie: bytes


class _Outbox:
    """A socket's sending side: at once, or in order later when it is full. Not awaited."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._queue: deque[tuple[bytes, int | None]] = deque()
        self._filled = trio.Event()

    def send(self, data: bytes, fd: int | None = None, *, now: bool = False) -> None:
        """With `now` the message is in the socket on return: a reply must not overtake it."""
        if now and self._queue:
            self._flush_blocking()
        if not self._queue and self._put(data, fd):
            return
        if len(self._queue) >= _QUEUE_MAX:
            raise ChannelError("the channel does not take messages any more")
        self._queue.append((data, None if fd is None else os.dup(fd)))
        if now:
            self._flush_blocking()
        self._filled.set()

    def _put(self, data: bytes, fd: int | None) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        try:
            self.sock.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as e:
            if e.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF):
                return True  # the channel is gone: run() says so
            if e.errno == errno.ETOOMANYREFS:
                return False  # descriptors in flight: the channel takes them soon
            raise
        return True

    def _drain(self) -> bool:
        while self._queue:
            data, fd = self._queue[0]
            if not self._put(data, fd):
                return False
            self._queue.popleft()
            if fd is not None:
                os.close(fd)
        return True

    def _flush_blocking(self) -> None:
        """The socket holds thousands of messages and the channel reads at once: this is not seen to happen."""
        while not self._drain():
            _, writable, _ = select.select([], [self.sock], [], _BLOCKED_MAX_MS / 1000)
            if not writable:
                raise ChannelError("the channel does not take messages any more")

    async def flush(self) -> None:
        """Sends what was queued, for ever."""
        while True:
            await self._filled.wait()
            self._filled = trio.Event()
            while not self._drain():
                await trio.lowlevel.wait_writable(self.sock)

    def close(self) -> None:
        for _, fd in self._queue:
            if fd is not None:
                os.close(fd)
        self._queue.clear()
        self.sock.close()


class _Waiter:
    """Answers to one question, by seq."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answers: list[tuple[int, bytes]] = []
        self.lost = False


class Channel:
    """The channel of one mount. Made by `open_channel`."""

    def __init__(
        self, process: trio.Process, mountpoint: Path, fuse_fd: int, control: socket.socket, notify: socket.socket
    ):
        self.fuse_fd_path = f"/dev/fd/{fuse_fd}"
        """For `pyfuse3.init`; its session closes the descriptor."""
        self.pid = process.pid
        self.passthrough_offered = False
        """Whether the mount may pass files through: known once `initialised`."""
        self.max_write = 0
        self.device = (0, 0)
        self.gone = False
        self._process = process
        self._mountpoint = mountpoint
        self._control = _Outbox(control)
        self._notify = _Outbox(notify)
        self._inited = trio.Event()
        self._ended = False
        self._closed = False
        self._seq = 0
        self._waiters: dict[int, _Waiter] = {}
        self._killed: set[int] = set()
        self._nursery: trio.Nursery | None = None
        self._early: list[tuple[int, int, int, bytes]] = []
        self._upcall: Callable[[Upcall], Awaitable[bytes]] | None = None
        self._refused: Callable[[int, int], None] | None = None

    # -- what the channel is told ------------------------------------------------------------------------------

    def node(
        self, nodeid: int, fd: int, *, mode: int, flags: int = 0, block_bytes: int = 0, block_count: int = 0
    ) -> None:
        """The backing file of an inode; another one when it had one. `fd` stays the caller's."""
        self._tell(_Kind.NODE, _NODE.pack(nodeid, mode, flags, block_bytes, block_count), fd, now=True)

    def handle(self, nodeid: int, fh: int, cookie: bytes = b"") -> None:
        """The OPEN or CREATE reply that carries `fh` is about to be sent: it becomes what the node's mode says."""
        if len(cookie) > _COOKIE_LEN:
            raise ValueError(f"a cookie has at most {_COOKIE_LEN} bytes, this one {len(cookie)}")
        self._tell(_Kind.HANDLE, _HANDLE.pack(nodeid, fh, cookie), now=True)

    def blocks(self, nodeid: int, first: int, count: int) -> None:
        """These blocks are in the backing file: the channel answers for them."""
        self._tell(_Kind.BLOCKS, _RANGE.pack(nodeid, first, count))

    async def clear(self, nodeid: int, first: int, count: int) -> None:
        """These blocks are not to be relied on; returns when no request that did is still in progress."""
        while True:
            (flags, _), *_ = await self._ask(_Kind.CLEAR, _RANGE.pack(nodeid, first, count))
            if not flags & _AGAIN:
                return

    def grant(self, nodeid: int, n: int) -> None:
        """So many more bytes may be written without asking."""
        self._tell(_Kind.GRANT, _GRANT.pack(nodeid, n))

    async def collect(self, nodeid: int) -> Written:
        """What was written without asking since the last time."""
        written, budget, untracked, again = 0, 0, False, True
        ranges: list[tuple[int, int]] = []
        while again:
            again = False
            for flags, body in await self._ask(_Kind.COLLECT, _NODEID.pack(nodeid)):
                _, more, budget, count = _WRITTEN.unpack_from(body)
                written += more
                untracked |= bool(flags & _UNTRACKED)
                again |= bool(flags & _AGAIN)
                pairs = struct.unpack_from(f"<{2 * count}Q", body, _WRITTEN.size)
                ranges.extend(zip(pairs[::2], pairs[1::2], strict=True))
        return Written(written, budget, tuple(ranges), untracked)

    def drop(self, nodeid: int) -> None:
        """Nobody has it open any more: the channel lets go of its backing file."""
        self._killed.discard(nodeid)
        self._tell(_Kind.DROP, _NODEID.pack(nodeid))

    def caps(self, nodeid: int, on: bool) -> None:
        """Whether the inode has `security.capability`: for the others the channel says no by itself."""
        self._tell(_Kind.CAPS, _CAPS.pack(nodeid, int(on)))

    def killed(self, nodeid: int) -> bool:
        """Whether a write that must clear suid, sgid and capabilities (flag SUID) was forwarded; tells it once."""
        self._receive()
        found = nodeid in self._killed
        self._killed.discard(nodeid)
        return found

    async def settled(self) -> None:
        """Returns when all that was told before has had effect: after `drop`, the channel's descriptor is closed."""
        await self._ask(_Kind.CLEAR, _RANGE.pack(0, 0, 0))

    async def probe(self, fd: int) -> int:
        """0 when the kernel would pass this file through, else the errno."""
        (_, body), *_ = await self._ask(_Kind.PROBE, b"", fd)
        return int.from_bytes(body[:4], "little")

    async def dump(self) -> list[KnownHandle]:
        """Every handle in the table, with the cookie it was given."""
        answers = await self._ask(_Kind.DUMP, b"")
        return [KnownHandle(*row) for _, body in answers for row in _HANDLE.iter_unpack(body)]

    # -- what the kernel is told -------------------------------------------------------------------------------

    def invalidate_inode(self, nodeid: int, offset: int = 0, length: int = 0) -> None:
        """The kernel forgets attributes and cached bytes of the range (0: to the end)."""
        self._tell_kernel(_Notify.INVAL_INODE, _INVAL_INODE.pack(nodeid, offset, length))

    def invalidate_attr(self, nodeid: int) -> None:
        """The kernel forgets attributes alone."""
        self._tell_kernel(_Notify.INVAL_INODE, _INVAL_INODE.pack(nodeid, -1, 0))

    def invalidate_entry(self, parent: int, name: bytes, child: int = 0) -> None:
        """The kernel forgets a name; with `child`, that it is gone (watchers are told)."""
        if child:
            body = _DELETE.pack(parent, child, len(name), 0)
            self._tell_kernel(_Notify.DELETE, body + name + b"\0")
        else:
            self._tell_kernel(_Notify.INVAL_ENTRY, _INVAL_ENTRY.pack(parent, len(name), 0) + name + b"\0")

    def _tell_kernel(self, code: _Notify, body: bytes) -> None:
        if not self._closed:
            self._notify.send(_NOTIFY.pack(_NOTIFY.size + len(body), code, 0) + body)

    # -- events ------------------------------------------------------------------------------------------------

    async def run(self, upcall: Callable[[Upcall], Awaitable[bytes]], refused: Callable[[int, int], None]) -> None:
        """Reads events until the mount is gone.

        `upcall` answers a request with the reply's payload, or raises OSError. `refused(nodeid, errno)`: the node got
        no passthrough, or no place in the table: its requests are answered by preads, or come here.
        """
        async with trio.open_nursery() as nursery:
            self._nursery, self._upcall, self._refused = nursery, upcall, refused
            for event in self._early:
                self._take(*event)
            self._early.clear()
            nursery.start_soon(self._control.flush)
            nursery.start_soon(self._notify.flush)
            nursery.start_soon(self._log_lines)
            try:
                while not self._ended:
                    await trio.lowlevel.wait_readable(self._control.sock)
                    self._receive()
            finally:
                self._nursery = None
                self._lose_waiters()
            nursery.cancel_scope.cancel()
        if not self.gone:
            raise ChannelError(
                "the channel ended by itself: the mount answers ENOTCONN now; unmount it and mount again"
            )

    async def initialised(self) -> None:
        """Returns once kernel and libfuse have agreed: `passthrough_offered` and `max_write` are known."""
        await self._inited.wait()
        if not self.max_write:
            raise ChannelError("the mount went away before it answered")

    def _receive(self) -> None:
        """Takes every event that has arrived. Callers of ours are not called from here: they run as tasks."""
        while not self._ended:
            try:
                data = self._control.sock.recv(_MESSAGE_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end()
                return
            kind, flags, seq = _HEADER.unpack_from(data)
            self._take(kind, flags, seq, data[_HEADER.size :])

    def _take(self, kind: int, flags: int, seq: int, body: bytes) -> None:
        match kind:
            case _Kind.EV_UPCALL | _Kind.EV_REFUSED:
                if self._nursery is None:
                    self._early.append((kind, flags, seq, body))
                else:
                    self._nursery.start_soon(self._answer if kind == _Kind.EV_UPCALL else self._tell_refused, body)
            case _Kind.EV_INIT:
                _, _, _, self.max_write, offered = _INIT.unpack_from(body)
                self.passthrough_offered = bool(offered)
                self._inited.set()
            case _Kind.EV_KILL:
                self._killed.add(_NODEID.unpack_from(body)[0])
            case _Kind.EV_GONE:
                self.gone = True
                self._end()
            case _:
                waiter = self._waiters.get(seq)
                if waiter is not None:
                    if kind != _Kind.EV_DUMPED:
                        waiter.answers.append((flags, body))
                    if kind != _Kind.EV_HANDLE and not flags & _MORE:
                        waiter.done.set()

    def _end(self) -> None:
        self._ended = True
        self._inited.set()
        self._lose_waiters()

    def _lose_waiters(self) -> None:
        for waiter in self._waiters.values():
            waiter.lost = not waiter.done.is_set()
            waiter.done.set()

    async def _answer(self, body: bytes) -> None:
        unique, opcode, nodeid, uid, gid, pid = _UPCALL.unpack_from(body)
        call = Upcall(unique, opcode, nodeid, uid, gid, pid, body[_UPCALL.size :])
        error, payload = 0, b""
        try:
            assert self._upcall is not None  # noqa: S101
            payload = await self._upcall(call)
        except OSError as e:
            error = -(e.errno or errno.EIO)
        self._tell(_Kind.REPLY, _REPLY.pack(call.unique, error) + payload)

    async def _tell_refused(self, body: bytes) -> None:
        nodeid, code = struct.unpack_from("<QI", body)
        assert self._refused is not None  # noqa: S101
        self._refused(nodeid, code)

    async def _log_lines(self) -> None:
        """What the channel has to say, one line each; none in a normal life."""
        assert self._process.stderr is not None  # noqa: S101
        buffered = b""
        async for data in self._process.stderr:
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                log.warning("%s", line.decode(errors="replace"))

    def _tell(self, kind: _Kind, body: bytes, fd: int | None = None, *, now: bool = False) -> None:
        if not self._closed:
            self._control.send(_HEADER.pack(kind, 0, 0) + body, fd, now=now)

    async def _ask(self, kind: _Kind, body: bytes, fd: int | None = None) -> list[tuple[int, bytes]]:
        if self._ended or self._closed:
            raise ChannelError("the mount is gone")
        self._seq = self._seq % 0xFFFFFFFF + 1
        seq, waiter = self._seq, _Waiter()
        self._waiters[seq] = waiter
        try:
            self._control.send(_HEADER.pack(kind, 0, seq) + body, fd)
            await waiter.done.wait()
        finally:
            del self._waiters[seq]
        if waiter.lost:
            raise ChannelError("the mount is gone")
        return waiter.answers

    # -- the end -----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends channel and mount, if they have not ended yet. Files still open there answer ENOTCONN."""
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            if not self._ended:
                with trio.move_on_after(_END_MAX_S):
                    await trio.to_thread.run_sync(_detach, self._mountpoint, self.device, abandon_on_cancel=True)
            self._end()
            self._control.close()
            self._notify.close()
            await _end_process(self._process)


async def _end_process(process: trio.Process) -> None:
    """It was hung up on, so it ends; killed where it does not."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(_END_MAX_S):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        if process.stderr is not None:
            await process.stderr.aclose()


def _detach(mountpoint: Path, device: tuple[int, int]) -> None:
    """Takes the mount away, if the topmost mount there is ours."""
    if _mounted_device(mountpoint) != device:
        return
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(mountpoint), _MNT_DETACH | _UMOUNT_NOFOLLOW):
            log.warning("umount %s: %s", mountpoint, os.strerror(ctypes.get_errno()))
    else:
        subprocess.run(["fusermount3", "-u", "-z", "--", mountpoint], check=False)


def _mounted_device(mountpoint: Path) -> tuple[int, int] | None:
    """The device of what is mounted there, without asking the filesystem."""
    device = None
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields = line.split()
        path = fields[4].decode("unicode_escape").encode("latin-1")
        if path == os.fsencode(mountpoint):
            major, _, minor = fields[2].partition(b":")
            device = (int(major), int(minor))
    return device


def _pair() -> tuple[socket.socket, socket.socket, int]:
    """Our end, the channel's, and the bytes one message of ours may have."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SOCKET_ROOM)
    except PermissionError:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_ROOM)
    return ours, theirs, ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


async def _mounted(control: socket.socket, mountpoint: Path) -> tuple[int, int]:
    with trio.move_on_after(_MOUNT_MAX_S):
        await trio.lowlevel.wait_readable(control)
        data = control.recv(_MESSAGE_MAX)
        if not data:
            raise ChannelError(f"{mountpoint}: not mounted: the channel ended before it answered")
        kind, _, _ = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        if kind == _Kind.EV_MOUNTED:
            major, minor = struct.unpack("<II", body)
            return major, minor
        code = int.from_bytes(body[:4], "little")
        raise ChannelError(f"{mountpoint}: not mounted: {body[4:].decode(errors='replace')}: {os.strerror(code)}")
    raise ChannelError(f"{mountpoint}: not mounted: no answer in {_MOUNT_MAX_S:.0f} s")


@contextlib.asynccontextmanager
async def open_channel(
    mountpoint: Path, options: MountOptions, *, arguments: tuple[str, ...] = ()
) -> AsyncIterator[Channel]:
    """Starts the channel and mounts; ChannelError says why it could not. The mount answers once pyfuse3 runs on
    `fuse_fd_path`, and is taken away at the end. `arguments` are further ones of the executable, for tests."""
    mountpoint = Path(os.path.realpath(mountpoint))
    fuse, fuse_theirs, reply_room = _pair()
    control, control_theirs, _ = _pair()
    notify, notify_theirs, _ = _pair()
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
        device = await _mounted(control, mountpoint)
    except BaseException:
        for s in (fuse, control, notify, *theirs):
            s.close()
        if process is not None:
            await _end_process(process)
        raise
    channel = Channel(process, mountpoint, fuse.detach(), control, notify)
    channel.device = device
    try:
        yield channel
    finally:
        await channel.close()
