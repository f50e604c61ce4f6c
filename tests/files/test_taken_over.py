"""A writer takes a file over while what came of it is being recorded: the old generation claims nothing of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import trio

from aof2.engine.catalog import tables as t
from aof2.engine.env import Env
from aof2.engine.env import Files as EnvFiles
from aof2.engine.files import Files, stream_of
from tests.engine.helpers import KIB, backing_path, object_row, small_settings
from tests.files.helpers import FakeKernel, content, make, publish, run_files
from tests.files.test_table import data_of


class GatedFiles(EnvFiles):
    """Syncs of one file wait."""

    def __init__(self) -> None:
        self.name = ""
        self.arrived, self.gate = threading.Event(), threading.Event()

    def fsync(self, fd: int) -> None:
        if self.name and os.readlink(f"/proc/self/fd/{fd}").endswith(self.name):
            self.arrived.set()
            assert self.gate.wait(30)
        super().fsync(fd)


def test_written_to_while_its_blocks_are_synced(tmp_path: Path) -> None:
    gated = GatedFiles()

    async def body(files: Files, _: FakeKernel) -> None:
        volume = files.volume
        ino = await make(files, b"a", data_of(300 * KIB))
        key = (stream_of(ino), ino, 1)
        await publish(files)
        await volume.evict([key])
        gated.name = f"/{ino}.1"
        assert await content(files, ino) == data_of(300 * KIB)
        chunks = object_row(volume, key).data_chunks
        assert await trio.to_thread.run_sync(gated.arrived.wait, 20)  # what came is about to be recorded
        async with trio.open_nursery() as nursery:
            fhs: list[int] = []

            async def write() -> None:
                fhs.append(await files.open(ino, os.O_RDWR))

            nursery.start_soon(write)
            with trio.move_on_after(2):
                while not fhs:
                    await trio.sleep(0.01)
            gated.gate.set()
        gated.name = ""
        await volume.hydrator.settle()
        await files.release(fhs[0])
        assert not backing_path(volume, key).exists()
        with volume.catalog.view() as view:
            rows = [view.get(key[0], t.RESIDENCY, chunk) for chunk in chunks]
        assert not any(row.mask for row in rows if row is not None)

    run_files(small_settings(tmp_path), body, env=Env(files=gated))
