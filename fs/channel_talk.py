"""What is said between the daemon and `aof2-channel`, and heard: messages, questions with their answers, events.

Invariants
- Events are taken in the order in which they came. Callers of ours run as tasks, never from inside a look for events.
- A question is answered, or fails with ChannelError once the mount is gone: no caller waits for a channel that ended.

Owner: the trio thread; `run` is the one task that waits for events. A crash leaves nothing of this.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import trio

from aof2.engine.kinds.kernel import AppendState, Short, Touched
from aof2.fs import channel_wire as wire
from aof2.fs.channel_outbox import Outbox
from aof2.fs.channel_wire import ChannelError, Kind, Upcall

log = logging.getLogger(__name__)

_EVENTS_A_TURN: Final = 64  # upcalls answered at once must not keep other tasks waiting


class Told(Protocol):
    """What the channel tells that is no request."""

    def refused(self, ino: int, code: int) -> None:
        """The node got no passthrough, or no place in the table: its requests are answered by preads, or come here."""

    def changes_waiting(self) -> None:
        """It acknowledged something by itself."""

    def used(self, inos: Sequence[int]) -> None:
        """It opened these by itself."""

    def room_short(self, short: Short) -> None: ...

    def touched(self, touched: Touched) -> None: ...

    def appended(self, state: AppendState) -> None: ...

    def partial(self, nodeid: int, fh: int, data: bytes) -> None: ...


def _more_follow(kind: int, flags: int) -> bool:
    """Whether an event is not the last one of its question's answers."""
    return kind == Kind.EV_HANDLE or (kind in (Kind.EV_WRITTEN, Kind.EV_GROWN) and bool(flags & wire.MORE))


class _Waiter:
    """Answers to one question, by seq."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answers: list[tuple[int, bytes]] = []
        self.lost = False


class Talk:
    """The sockets to and from one channel. `Channel` is its words."""

    def __init__(self, process: trio.Process, control: socket.socket, notify: socket.socket) -> None:
        self.passthrough_offered = False
        """Whether the mount may pass files through: known once `initialised`."""
        self.max_write = 0
        self.transport = ""
        """How requests come: "io_uring, 2 queues", or "read: " and why; known once `initialised`."""
        self.gone = False
        self._process = process
        self._control = Outbox(control)
        self._notify = Outbox(notify)
        self._inited = trio.Event()
        self._ended = False
        self._closed = False
        self._seq = 0
        self._waiters: dict[int, _Waiter] = {}
        self._killed: set[int] = set()
        self._opened: dict[int, list[tuple[int, int]]] = {}  # by inode: (handle, flags) that it gave by itself
        self._nursery: trio.Nursery | None = None
        self._early: list[tuple[int, int, int, bytes]] = []
        self._upcall: Callable[[Upcall], Awaitable[bytes]] | None = None
        self._told: Told | None = None
        self._at_once: Callable[[int, int, bytes], bytes | None] | None = None

    async def run(
        self,
        upcall: Callable[[Upcall], Awaitable[bytes]],
        told: Told,
        *,
        at_once: Callable[[int, int, bytes], bytes | None] | None = None,
    ) -> None:
        """Reads events until the mount is gone.

        `upcall` answers a request with the reply's payload, or raises OSError. `told` hears what is no request.
        `at_once(opcode, nodeid, body)` is asked first, and answers the same way, or None: `upcall` is to answer.
        """
        async with trio.open_nursery() as nursery:
            self._nursery, self._upcall, self._told = nursery, upcall, told
            self._at_once = at_once
            for event in self._early:
                self._take(*event)
            self._early.clear()
            nursery.start_soon(self._control.flush)
            nursery.start_soon(self._notify.flush)
            nursery.start_soon(self._log_lines)
            try:
                while not self._ended:
                    await trio.lowlevel.wait_readable(self._control.sock)
                    self._answer_some()
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

    def _answer_some(self) -> None:
        """Takes events that have arrived, and answers those that can be answered at once."""
        for _ in range(_EVENTS_A_TURN):
            data = self._next_event()
            if not data:
                return
            kind, flags, seq = wire.HEADER.unpack_from(data)
            if kind != Kind.EV_UPCALL or not self._answered_at_once(data):
                self._take(kind, flags, seq, data[wire.HEADER.size :])

    def _answered_at_once(self, data: bytes) -> bool:
        if self._at_once is None:
            return False
        unique, opcode, nodeid, _, _, _ = wire.UPCALL.unpack_from(data, wire.HEADER.size)
        error, body = 0, data[wire.HEADER.size + wire.UPCALL.size :]
        try:
            payload = self._at_once(opcode, nodeid, body)
        except OSError as e:
            error, payload = -(e.errno or errno.EIO), b""
        if payload is None:
            return False
        self._tell(Kind.REPLY, wire.REPLY.pack(unique, error) + payload)
        return True

    def _receive(self) -> None:
        """Takes every event that has arrived. Callers of ours are not called from here: they run as tasks."""
        while data := self._next_event():
            kind, flags, seq = wire.HEADER.unpack_from(data)
            self._take(kind, flags, seq, data[wire.HEADER.size :])

    def _next_event(self) -> bytes:
        """b"": none has arrived, or none will any more."""
        if self._ended:
            return b""
        try:
            data = self._control.sock.recv(wire.MESSAGE_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self._end()
        return data

    def _take(self, kind: int, flags: int, seq: int, body: bytes) -> None:
        match kind:
            case (
                Kind.EV_UPCALL
                | Kind.EV_REFUSED
                | Kind.EV_BIRTHS
                | Kind.EV_SHORT
                | Kind.EV_TOUCHED
                | Kind.EV_APPENDED
                | Kind.EV_PARTIAL
                | Kind.EV_USED
            ) if not seq:
                if self._nursery is None or self._told is None:
                    self._early.append((kind, flags, seq, body))
                elif kind == Kind.EV_UPCALL:
                    self._nursery.start_soon(self._answer, body)
                elif kind == Kind.EV_REFUSED:
                    self._nursery.start_soon(self._tell_refused, self._told, body)
                else:
                    self._tell_of(self._told, kind, body)
            case Kind.EV_INIT:
                _, _, _, self.max_write, offered = wire.INIT.unpack_from(body)
                self.passthrough_offered = bool(offered)
                self._inited.set()
            case Kind.EV_TRANSPORT:
                self._take_transport(body)
            case Kind.EV_KILL:
                self._killed.add(wire.NODEID.unpack_from(body)[0])
            case Kind.EV_OPENED:
                for ino, fh, flags in wire.OPENED.iter_unpack(body):
                    self._opened.setdefault(ino, []).append((fh, flags))
            case Kind.EV_GONE:
                self.gone = True
                self._end()
            case _:
                waiter = self._waiters.get(seq)
                if waiter is not None:
                    if kind != Kind.EV_DUMPED:
                        waiter.answers.append((flags, body))
                    if not _more_follow(kind, flags):
                        waiter.done.set()

    def _take_transport(self, body: bytes) -> None:
        queues, enabled = wire.TRANSPORT.unpack_from(body)
        why = body[wire.TRANSPORT.size :].decode(errors="replace")
        self.transport = f"io_uring, {queues} queues" if queues else f"read: {why}"
        if enabled:
            log.info("FUSE over io_uring was off in this kernel: /sys/module/fuse/parameters/enable_uring is Y now")
        log.info("requests come by %s", self.transport)

    def _end(self) -> None:
        self._ended = True
        self._inited.set()
        self._lose_waiters()

    def _lose_waiters(self) -> None:
        for waiter in self._waiters.values():
            waiter.lost = not waiter.done.is_set()
            waiter.done.set()

    async def _answer(self, body: bytes) -> None:
        unique, opcode, nodeid, uid, gid, pid = wire.UPCALL.unpack_from(body)
        call = Upcall(unique, opcode, nodeid, uid, gid, pid, body[wire.UPCALL.size :])
        error, payload = 0, b""
        try:
            assert self._upcall is not None  # noqa: S101
            payload = await self._upcall(call)
        except OSError as e:
            error = -(e.errno or errno.EIO)
        except Exception:
            log.exception("request %d of inode %d", call.opcode, call.nodeid)
            error = -errno.EIO
        self._tell(Kind.REPLY, wire.REPLY.pack(call.unique, error) + payload)

    @staticmethod
    async def _tell_refused(told: Told, body: bytes) -> None:
        told.refused(*struct.unpack_from("<QI", body))

    @staticmethod
    def _tell_of(told: Told, kind: int, body: bytes) -> None:
        if kind == Kind.EV_BIRTHS:
            told.changes_waiting()
        elif kind == Kind.EV_USED:
            told.used([ino for (ino,) in wire.NODEID.iter_unpack(body)])
        elif kind == Kind.EV_SHORT:
            told.room_short(Short(*wire.SHORT.unpack_from(body)))
        elif kind == Kind.EV_TOUCHED:
            told.touched(Touched(*wire.TOUCHED.unpack_from(body)))
        elif kind == Kind.EV_APPENDED:
            told.appended(AppendState(*wire.APPENDED.unpack_from(body)))
        else:
            nodeid, fh = wire.GRANT.unpack_from(body)
            told.partial(nodeid, fh, body[wire.GRANT.size :])

    async def _log_lines(self) -> None:
        """What the channel has to say, one line each; none in a normal life."""
        assert self._process.stderr is not None  # noqa: S101
        buffered = b""
        async for data in self._process.stderr:
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                log.warning("%s", line.decode(errors="replace"))

    def _tell(self, kind: Kind, body: bytes, fd: int | None = None, *, now: bool = False, flags: int = 0) -> None:
        if not self._closed:
            self._control.send(wire.HEADER.pack(kind, flags, 0) + body, fd, now=now)

    async def _ask(self, kind: Kind, body: bytes, fd: int | None = None, *, flags: int = 0) -> list[tuple[int, bytes]]:
        if self._ended or self._closed:
            raise ChannelError("the mount is gone")
        self._seq = self._seq % 0xFFFFFFFF + 1
        seq, waiter = self._seq, _Waiter()
        self._waiters[seq] = waiter
        try:
            self._control.send(wire.HEADER.pack(kind, flags, seq) + body, fd)
            await waiter.done.wait()
        finally:
            del self._waiters[seq]
        if waiter.lost:
            raise ChannelError("the mount is gone")
        return waiter.answers
