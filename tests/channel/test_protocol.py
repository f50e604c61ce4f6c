"""PROTOCOL.md's worked example, as `aof2.fs.channel` writes and reads it; its numbers, as proto.h has them."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from aof2.engine.files import Mode
from aof2.fs.channel import Channel, Written
from aof2.fs.channel_wire import Kind

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


def test_numbers_agree() -> None:
    """proto.h, PROTOCOL.md and the Python side."""
    header = (CHANNEL / "proto.h").read_text()
    c = {m[1]: int(m[2]) for m in re.finditer(r"^  (?:PROTO_)?((?:EV_)?[A-Z_]+) = (\d+),", header, re.MULTILINE)}
    page = (CHANNEL / "PROTOCOL.md").read_text()
    md = {m[2]: int(m[1]) for m in re.finditer(r"^\| (\d+) \| ([A-Z_]+) \|", page, re.MULTILINE)}
    python = {kind.name: int(kind) for kind in Kind}
    assert c == md == python
