"""A kernel that remembers what it was told, and files on a small volume."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectRow
from aof2.engine.env import Env
from aof2.engine.files import Files, stream_of
from aof2.engine.files.kind import FilesKind
from aof2.engine.files.state import Mode, NodeFlags
from aof2.engine.kinds.mounted import Kinds
from aof2.engine.kinds.opens import Opens
from aof2.engine.kinds.registry import MountWish, Surroundings
from aof2.engine.namespace import root_ino
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume, open_volume
from aof2.fs.control import verbs


class Written(NamedTuple):
    bytes_written: int = 0
    budget_left: int = 0
    ranges: tuple[tuple[int, int], ...] = ()


class FakeKernel:
    """Keeps a descriptor of each backing file and answers ranged requests where it may, as the channel does."""

    def __init__(self) -> None:
        self.fds: dict[int, int] = {}
        self.modes: dict[int, int] = {}
        self.flags: dict[int, int] = {}
        self.present: dict[int, set[int]] = {}
        self.budget: dict[int, int] = {}
        self.written: dict[int, set[int]] = {}
        self.written_bytes: dict[int, int] = {}
        self.block_bytes = 0
        self.answered = 0  # writes that nobody was asked for

    def node(self, nodeid: int, fd: int, *, mode: int, flags: int, block_bytes: int, block_count: int) -> None:
        assert nodeid not in self.fds
        self.fds[nodeid] = os.dup(fd)
        self.block_bytes, self.budget[nodeid] = block_bytes, 0
        self.modes[nodeid], self.flags[nodeid], self.present[nodeid] = mode, flags, set()

    def handle(self, nodeid: int, fh: int, cookie: bytes) -> None:
        assert nodeid in self.fds and len(cookie) == 16

    def told_opens(self, nodeid: int) -> list[tuple[int, int]]:
        return []

    def told_open_of(self, fh: int) -> int:
        return 0

    def coming(self, nodeid: int, first: int, count: int) -> None:
        """Nobody waits here."""

    def blocks(self, nodeid: int, first: int, count: int) -> None:
        self.present[nodeid].update(range(first, first + count))

    async def clear(self, nodeid: int, first: int, count: int) -> None:
        await trio.lowlevel.checkpoint()
        self.flags[nodeid] &= ~NodeFlags.STILL
        self.present[nodeid] = {b for b in self.present[nodeid] if not first <= b < first + count}

    def grant(self, nodeid: int, budget_bytes: int) -> None:
        self.budget[nodeid] += budget_bytes

    async def collect(self, nodeid: int) -> Written:
        await trio.lowlevel.checkpoint()
        ranges = tuple((block, 1) for block in sorted(self.written.pop(nodeid, ())))
        return Written(self.written_bytes.pop(nodeid, 0), self.budget.get(nodeid, 0), ranges)

    def drop(self, nodeid: int) -> None:
        os.close(self.fds.pop(nodeid))
        del self.budget[nodeid]

    def _has(self, nodeid: int, offset: int, length: int) -> bool:
        if self.modes[nodeid] != Mode.RANGED:
            return False
        touched = range(offset // self.block_bytes, (offset + length - 1) // self.block_bytes + 1)
        return bool(self.flags[nodeid] & NodeFlags.ALL_PRESENT) or self.present[nodeid].issuperset(touched)

    def write(self, nodeid: int, offset: int, data: bytes) -> bool:
        """Whether it was answered here: within the budget, where every block is."""
        if self.budget[nodeid] < len(data) or not self._has(nodeid, offset, len(data)):
            return False
        self.budget[nodeid] -= len(data)
        assert os.pwrite(self.fds[nodeid], data, offset) == len(data)
        touched = range(offset // self.block_bytes, (offset + len(data) - 1) // self.block_bytes + 1)
        self.written.setdefault(nodeid, set()).update(touched)
        self.written_bytes[nodeid] = self.written_bytes.get(nodeid, 0) + len(data)
        self.answered += 1
        return True

    def read(self, nodeid: int, offset: int, length: int) -> bytes | None:
        """The bytes where every block is, else None: to be asked for."""
        return os.pread(self.fds[nodeid], length, offset) if self._has(nodeid, offset, length) else None

    async def caught_up(self) -> None:
        pass

    def caps(self, nodeid: int, on: bool) -> None:
        pass

    def killed(self, nodeid: int) -> bool:
        return False

    def hand_over(self, fh: int, offset: int, data: bytes) -> int:
        raise AssertionError("there is no READ here")

    def invalidate_attr(self, nodeid: int) -> None:
        pass

    def invalidate_inode(self, nodeid: int, offset: int = 0, length: int = 0) -> None:
        pass

    def close(self) -> None:
        for nodeid in list(self.fds):
            self.drop(nodeid)


HANGS_AFTER_S = 180.0  # some bodies take seconds of processor time, of which a loaded machine gives little
Body = Callable[[Files, FakeKernel], Awaitable[None]]


def run_files(
    settings: Settings,
    body: Body,
    *,
    env: Env | None = None,
    passthrough: bool = True,
    kernel: FakeKernel | None = None,
) -> None:
    kernel = kernel or FakeKernel()

    async def main() -> None:
        async with open_volume(settings, env=env) as volume:
            files = Files(volume, kernel)
            files.modes.passthrough = passthrough
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(files.run)
                    for ino in volume.dirty_inos:
                        await files.adopt(ino)
                    with trio.fail_after(HANGS_AFTER_S):
                        await body(files, kernel)
                    nursery.cancel_scope.cancel()
            finally:
                kernel.close()

    trio.run(main)


def kinds_of(files: Files) -> Kinds:
    """The kinds of a mount whose file table this is."""
    volume, opens = files.volume, Opens()
    kind = FilesKind(Surroundings(volume, files.kernel, opens, MountWish(), volume.tenant_names()), files)
    return Kinds(dict.fromkeys(volume.tenant_names(), kind), opens)


def top(volume: Volume) -> int:
    return root_ino(volume.tenants.named("default").tenant_id)


async def make(files: Files, name: bytes, data: bytes) -> int:
    """A file written through its backing file, as a passthrough writer does, and closed."""
    row, fh = await files.create(top(files.volume), name, os.O_RDWR, mode=0o644, uid=0, gid=0)
    scribble(files, row.ino, data)
    await files.release(fh)
    return row.ino


def scribble(files: Files, ino: int, data: bytes, offset: int = 0) -> None:
    file = files.known.get(ino)
    assert file is not None
    fd = os.open(file.path, os.O_RDWR)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


async def write(files: Files, kernel: FakeKernel, fh: int, offset: int, data: bytes) -> None:
    """A write() of a ranged file: answered by the channel where it may, else here."""
    if not kernel.write(files.handle(fh).file.ino, offset, data):
        assert await files.handle(fh).write(offset, data) == len(data)


async def read(files: Files, kernel: FakeKernel, fh: int, offset: int, length: int) -> bytes:
    data = kernel.read(files.handle(fh).file.ino, offset, length)
    return await files.handle(fh).read_bytes(offset, length) if data is None else data


async def publish(files: Files) -> None:
    await files.sealer.seal_now()
    await files.volume.checkpoint("default")


async def waited_for(files: Files, *names: str) -> None:
    """What `aof2 wait` does for these."""

    async def tell(_: object) -> None: ...

    mounted: Any = SimpleNamespace(
        volume=files.volume, kinds=kinds_of(files), mountpoint=Path("/nowhere"), channel=files.kernel
    )
    await verbs.dispatch(mounted, {"verb": "wait", "paths": [f"default/{name}" for name in names]}, tell)


def on_disk(volume: Volume) -> int:
    """What hot_cache takes."""
    return sum(p.stat().st_blocks * 512 for p in volume.hot.root.rglob("*") if p.is_file())


def row_of(files: Files, ino: int) -> ObjectRow:
    stream_id = stream_of(ino)
    with files.volume.catalog.view() as view:
        inode = view.get(stream_id, t.INODES, ino)
        assert inode is not None
        row = view.get(stream_id, t.OBJECTS, (ino, inode.generation))
    assert row is not None
    return row


async def content(files: Files, ino: int) -> bytes:
    """What a reader sees, by whichever way the mode gives."""
    fh = await files.open(ino, os.O_RDONLY)
    try:
        file = files.known.get(ino)
        assert file is not None
        if file.channel.mode is Mode.PASSTHROUGH:
            return Path(file.path).read_bytes()
        out = b""
        while part := await files.handle(fh).read_bytes(len(out), 10_000):
            out += part
        return out
    finally:
        await files.release(fh)
