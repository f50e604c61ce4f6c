"""The daemon's side of births, whatever the channel left behind when it was killed and whoever stops waiting."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aof2.engine import namespace
from aof2.engine.errors import LimitError
from aof2.engine.files import Files, birthlog
from aof2.engine.files.births import Births
from tests.engine.helpers import small_settings
from tests.files.helpers import FakeKernel, run_files, top
from tests.files.test_birthlog import FH, record

TOTAL_AT, END_AT = 8, 16


class FakeChannel:
    """Writes birth records and counts them in the page, as the channel does."""

    def __init__(self) -> None:
        self.births_wanted: Any = None
        self.first = self.end = 0
        self.granted: list[int] = []

    def birth_page(self, fd: int) -> None:
        self.page = mmap.mmap(fd, mmap.PAGESIZE)

    def birth_dir(self, stream_id: int, slot: int, fd: int) -> None:
        pass

    def birth_log(self, stream_id: int, offset: int, fd: int) -> None:
        self.log = os.dup(fd)

    def birth_inos(self, stream_id: int, first: int, count: int) -> None:
        self.first = self.first or first
        self.granted.append(count)

    def drop(self, nodeid: int) -> None:
        pass

    def bear(self, files: Files, name: bytes, *, counted: bool = True) -> int:
        """A file made and closed; not `counted`: killed right before that."""
        ino, self.first = self.first, self.first + 1
        files.volume.hot.path("default", ino, 1).write_bytes(name)
        data = record(birthlog.BORN, ino, parent=top(files.volume), name=name, fh=FH | ino)
        data += record(birthlog.RELEASED, ino, fh=FH | ino, flags=birthlog.DROPPED)
        os.pwrite(self.log, data, self.end)
        self.end += len(data)
        struct.pack_into("<Q", self.page, END_AT, self.end)
        if counted:
            struct.pack_into("<Q", self.page, TOTAL_AT, self.end)
        return ino


def run_births(tmp_path: Path, body: Any) -> None:
    async def main(files: Files, _: FakeKernel) -> None:
        channel = FakeChannel()
        births = Births(files, channel)  # type: ignore[arg-type]
        await births.start([files.volume.tenant("default").tenant_id])
        try:
            await body(files, channel, births)
        finally:
            os.close(channel.log)

    run_files(small_settings(tmp_path), main)


def names(files: Files) -> list[bytes]:
    stream_id = files.volume.tenant("default").tenant_id
    with files.volume.catalog.view() as view:
        return [name for name, _ in namespace.list_dir(view, stream_id, top(files.volume), None, 100)]


@pytest.mark.timeout(20)  # without an end it takes the loop, and every deadline, with it
def test_a_channel_killed_before_it_counted_a_record(tmp_path: Path) -> None:
    async def body(files: Files, channel: FakeChannel, births: Births) -> None:
        channel.bear(files, b"a")
        channel.bear(files, b"b", counted=False)
        await births.catch_up()
        await births.catch_up()
        assert names(files) == [b"a", b"b"]

    run_births(tmp_path, body)


@pytest.mark.timeout(20)
def test_a_fold_whose_asker_is_cancelled_is_done_all_the_same(tmp_path: Path) -> None:
    async def body(files: Files, channel: FakeChannel, births: Births) -> None:
        ino, gate = channel.bear(files, b"a"), threading.Event()
        files.volume.writer.submit(files.volume.tenant("default").tenant_id, lambda _: gate.wait())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(births.catch_up)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            gate.set()
        await births.catch_up()
        assert names(files) == [b"a"]
        assert files.file(ino) is not None  # the sealer knows it

    run_births(tmp_path, body)


@pytest.mark.timeout(20)
@pytest.mark.expects_warnings
def test_what_cannot_be_folded_is_left_to_recovery(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(files: Files, channel: FakeChannel, births: Births) -> None:
        channel.bear(files, b"a")

        def refuse(*_: Any, **__: Any) -> None:
            raise LimitError("full")

        real, files.volume.writer.submit = files.volume.writer.submit, refuse  # type: ignore[assignment, method-assign]
        with pytest.raises(LimitError):
            await births.catch_up()
        files.volume.writer.submit = real  # type: ignore[method-assign]
        assert channel.granted[-1] == 0  # nothing more is born
        await births.catch_up()
        births.close()
        assert list((files.volume.state_dir / "births").iterdir())

    run_births(tmp_path, body)
    assert "not in the catalog yet" in caplog.text

    async def after(files: Files, _: FakeKernel) -> None:
        assert names(files) == [b"a"]

    run_files(small_settings(tmp_path), after)
