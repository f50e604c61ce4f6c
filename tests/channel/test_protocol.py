"""PROTOCOL.md's worked example, as `aof2.fs.channel` writes and reads it; its numbers, as proto.h has them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from aof2.engine.files import Mode
from aof2.engine.kinds.kernel import AppendState, Framing, Short, Touched, Written
from aof2.fs.channel import Channel
from aof2.fs.channel_wire import HELD, SLOTS, Kind

CHANNEL = Path(__file__).resolve().parents[2] / "native" / "channel"


def example() -> dict[str, bytes]:
    text = (CHANNEL / "PROTOCOL.md").read_text()
    block = text.partition("### Worked example")[2].partition("```\n")[2].partition("```")[0]
    return {line.split()[0]: bytes.fromhex("".join(line.split()[1:])) for line in block.splitlines()}


class Quiet:
    """In the place of the process: only what Channel touches."""

    pid = 1
    stderr = None
    returncode = 0

    async def wait(self) -> int:
        return 0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    notify, notify_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield Channel(cast(Any, Quiet()), Path("/nowhere"), 0, ours, notify), theirs
    for s in (ours, theirs, notify, notify_theirs):
        s.close()


def test_what_is_told_is_as_written(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    want = example()

    async def main() -> None:
        with open("/dev/null") as null:
            channel.node(42, null.fileno(), mode=Mode.RANGED, block_bytes=1 << 20, block_count=3)
        data, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 4)
        assert data == want["NODE"]
        assert len(fds) == 1
        socket.close(fds[0])
        channel.blocks(42, 0, 2)
        assert theirs.recv(1 << 16) == want["BLOCKS"]
        channel.handle(42, 7, b"cookie")
        assert theirs.recv(1 << 16) == want["HANDLE"]

    trio.run(main)


def test_a_long_answer_is_as_written(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    data = os.urandom(128 << 10)

    async def main() -> None:
        for turn in range(SLOTS + 1):
            slot = turn % SLOTS
            assert channel.hand_over(7, 2 << 20, data) == HELD + slot < 1000, "libfuse passes no others on"
            message, (fd,), _, _ = socket.recv_fds(theirs, 1 << 16, 4)
            assert slot != 5 or message == example()["BYTES"]
            assert os.pread(fd, 1 << 20, 0) == data
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"other", 0)
            os.close(fd)

    open_before = len(os.listdir("/proc/self/fd"))
    trio.run(main)
    assert channel.handed_over == SLOTS + 1
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.expects_warnings
def test_a_long_answer_that_finds_no_memory_is_an_error(
    ends: tuple[Channel, socket.socket], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, _ = ends

    def none_left(*_: object, **__: object) -> int:
        raise OSError(errno.ENOMEM, "")

    async def main() -> None:
        for module, name in ((os, "memfd_create"), (os, "write"), (fcntl, "fcntl")):
            with monkeypatch.context() as m:
                m.setattr(module, name, none_left)
                assert channel.hand_over(7, 0, b"x") == errno.EIO
        with monkeypatch.context() as m:
            m.setattr(channel._control, "send", none_left)
            assert channel.hand_over(7, 0, b"x") == errno.EIO

    open_before = len(os.listdir("/proc/self/fd"))
    trio.run(main)
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert channel.handed_over == 0
    assert len(caplog.records) == 4


def test_what_is_asked_and_answered_is_as_written(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    want = example()
    written: list[Written] = []

    async def asking(scope: trio.CancelScope) -> None:
        await channel.clear(42, 0, 2)
        written.append(await channel.collect(42))
        scope.cancel()

    async def answering() -> None:
        for question, answer in (("CLEAR", "CLEARED"), ("COLLECT", "WRITTEN")):
            await trio.lowlevel.wait_readable(theirs)
            assert theirs.recv(1 << 16) == want[question]
            theirs.send(want[answer])
            while not written and question == "COLLECT":
                channel._receive()
                await trio.lowlevel.checkpoint()
            channel._receive()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asking, nursery.cancel_scope)
            nursery.start_soon(answering)

    trio.run(main)
    assert written == [Written(4096, 0xFF000, ((2, 1),), False)]


class Heard:
    """Remembers what is told of streams."""

    def __init__(self) -> None:
        self.partials: list[tuple[int, int, bytes]] = []
        self.states: list[AppendState] = []

    def refused(self, ino: int, code: int) -> None: ...

    def changes_waiting(self) -> None: ...

    def room_short(self, short: Short) -> None: ...

    def touched(self, touched: Touched) -> None: ...

    def appended(self, state: AppendState) -> None:
        self.states.append(state)

    def partial(self, nodeid: int, fh: int, data: bytes) -> None:
        self.partials.append((nodeid, fh, data))


def test_what_is_said_of_a_stream_is_as_written(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    want = example()
    heard = Heard()
    taken: list[AppendState | None] = []

    async def taking(scope: trio.CancelScope) -> None:
        taken.append(await channel.append_take(43))
        scope.cancel()

    async def main() -> None:
        channel.append_handle(43, 8, ext_id=5)
        assert theirs.recv(1 << 16) == want["APPEND_HANDLE"]
        with open("/dev/null") as null:
            channel.append_give(
                AppendState(43, 6, 0, 9000, 0, 0, 0),
                null.fileno(),
                stream_ino=40,
                base_record_count=100,
                room_end=4 << 20,
                ext_id=0,
                max_size=64 << 20,
                framing=Framing.LINE,
                record_max=16 << 20,
            )
        data, (fd,), _, _ = socket.recv_fds(theirs, 1 << 16, 4)
        os.close(fd)
        assert data == want["APPEND"]
        theirs.send(want["PARTIAL"])
        channel._seq = 2
        async with trio.open_nursery() as nursery:
            channel._nursery, channel._told = nursery, heard
            nursery.start_soon(taking, nursery.cancel_scope)
            await trio.lowlevel.wait_readable(theirs)
            assert theirs.recv(1 << 16) == want["APPEND_TAKE"]
            theirs.send(want["APPENDED"])
            channel.hear()
        channel.append_partial(43, 8, b"tw")
        assert theirs.recv(1 << 16) == want["APPEND_PARTIAL"]
        with pytest.raises(ValueError, match="60000"):
            channel.append_partial(43, 8, bytes(60_001))

    trio.run(main)
    assert heard.partials == [(43, 8, b"tw")]
    assert taken == [AppendState(43, 6, 0x88, 9004, 1, 0x1122334455667788, 1_790_000_000_000)]
    assert heard.states == [], "an answer is no news"


def test_numbers_agree() -> None:
    """proto.h, PROTOCOL.md and the Python side."""
    header = (CHANNEL / "proto.h").read_text()
    c = {m[1]: int(m[2]) for m in re.finditer(r"^  (?:PROTO_)?((?:EV_)?[A-Z_]+) = (\d+),", header, re.MULTILINE)}
    page = (CHANNEL / "PROTOCOL.md").read_text()
    md = {m[2]: int(m[1]) for m in re.finditer(r"^\| (\d+) \| ([A-Z_]+) \|", page, re.MULTILINE)}
    python = {kind.name: int(kind) for kind in Kind}
    assert c == md == python
