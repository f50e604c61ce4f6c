"""The sending side of a socket to the channel: at once, or in order later when it is full. Never awaited.

Invariants: messages leave in the order they were given; the queue is bounded; a queued descriptor is a duplicate,
closed once sent. Owner: the trio thread.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
from collections import deque
from typing import Final

import trio

from aof2.engine.errors import os_error
from aof2.fs.channel_wire import ChannelError

_SO_SNDBUFFORCE: Final = 32
_SOCKET_ROOM: Final = 32 << 20
_QUEUE_MAX: Final = 65536
_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_BLOCKED_MAX_MS: Final = 1000
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Outbox:
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
        try:
            if fd is None:
                self.sock.send(data, _FLAGS)
            else:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
                self.sock.sendmsg([data], [rights], _FLAGS)
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


def sealed_memory(data: bytes) -> int:
    """A descriptor of a file in memory that no process can change any more."""
    fd = os.memfd_create("aof2-answer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if os.write(fd, data) != len(data):
            raise os_error(errno.ENOMEM)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def socket_pair() -> tuple[socket.socket, socket.socket, int]:
    """Our end, the channel's, and the bytes one message of ours may have."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SOCKET_ROOM)
    except PermissionError:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_ROOM)
    return ours, theirs, ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
