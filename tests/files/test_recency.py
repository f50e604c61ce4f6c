"""What makes way, where files are opened and closed meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import trio

from aof2.engine.env import Env
from aof2.engine.env import Files as DiskFiles
from aof2.engine.files import Files, stream_of
from aof2.engine.tiering import settle
from tests.engine.helpers import KIB, small_settings
from tests.files.helpers import FakeKernel, make, publish, run_files

SIZE = 64 * KIB


def data_of(n: int) -> bytes:
    return bytes([n + 1]) * SIZE


class SlowSync(DiskFiles):
    """An fsync that waits in the middle, when told to."""

    def __init__(self) -> None:
        self.slow = False
        self.syncing, self.go = threading.Event(), threading.Event()

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        if self.slow and threading.current_thread().name.startswith("_sync_file"):
            self.syncing.set()
            assert self.go.wait(30)


def test_opened_whole_while_what_came_in_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor that is synced stays open, though the kernel needs none of ours for a file it passes through."""
    disk = SlowSync()
    monkeypatch.setattr(settle, "SETTLE_PERIOD_S", 1000.0)  # by hand alone

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", data_of(1))
        await publish(files)
        key = (stream_of(ino), ino, 1)
        await files.volume.evict([key])
        fh = await files.open(ino, os.O_RDONLY)
        assert await files.handle(fh).read_bytes(0, SIZE) == data_of(1)
        await files.release(fh)
        disk.slow = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.volume.hydrator.settle_object, key)
            assert await trio.to_thread.run_sync(disk.syncing.wait, 30)
            disk.slow = False
            fh = await files.open(ino, os.O_RDONLY)
            disk.go.set()
        await files.release(fh)
        assert files.volume.evictor.hot_bytes_of(key)

    run_files(small_settings(tmp_path, compression="none"), body, env=Env(files=disk))


def test_a_fast_scan_pushes_out_nothing_that_was_used_twice(tmp_path: Path) -> None:
    """Also where what it fetched is not recorded yet: that is recorded, and goes."""

    async def read(files: Files, ino: int, n: int) -> None:
        fh = await files.open(ino, os.O_RDONLY)
        assert await files.handle(fh).read_bytes(0, SIZE) == data_of(n)
        await files.release(fh)

    async def body(files: Files, kernel: FakeKernel) -> None:
        inos = []
        for n in range(60):
            inos.append(await make(files, b"f%d" % n, data_of(n)))
            await publish(files)
        for _ in range(2):
            for n in range(6):
                await read(files, inos[n], n)
        for n in range(6, 60):
            await read(files, inos[n], n)
        await files.volume.hydrator.settle()
        keys = [(stream_of(ino), ino, 1) for ino in inos]
        here = [n for n, key in enumerate(keys) if files.volume.evictor.hot_bytes_of(key)]
        assert here[:6] == list(range(6))
        assert files.volume.quota.usage.used_bytes <= files.volume.settings.cache.hot_bytes

    run_files(small_settings(tmp_path, hot_bytes=16 * SIZE, compression="none"), body)


def test_making_a_file_is_no_use_of_it(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", data_of(1))
        await publish(files)
        counts = files.volume.recent.hot.imager()().counts
        assert counts == (1, 0, 0)
        other = await make(files, b"b", data_of(2))
        for expected in ((2, 0, 0), (0, 2, 0)):
            for one in (ino, other):
                fh = await files.open(one, os.O_RDONLY)
                await files.release(fh)
            assert files.volume.recent.hot.imager()().counts == expected

    run_files(small_settings(tmp_path, compression="none"), body)
