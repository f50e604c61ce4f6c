"""The daemon's side of births, whatever the channel left behind when it was killed and whoever stops waiting."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import writer as catalog_writer
from aof2.engine.errors import LimitError
from aof2.engine.files import Files
from aof2.engine.files.births import INOS_GRANTED
from aof2.engine.files.kind import FilesKind
from aof2.engine.intents import fold
from aof2.engine.intents.format import DROPPED, IntentKind, pack
from aof2.engine.intents.log import FOLDER
from aof2.engine.kinds.kind import Asked
from aof2.engine.kinds.mounted import Kinds
from aof2.engine.kinds.opens import Opens
from aof2.engine.kinds.registry import MountWish, Surroundings
from tests.engine.helpers import small_settings
from tests.files.helpers import FakeKernel, run_files, top
from tests.intents.test_recover import FH, birth

TOTAL_AT, END_AT = 8, 16


class FakeChannel:
    """Writes birth records and counts them in the page, as the channel does."""

    def __init__(self) -> None:
        self.births_wanted: Any = None
        self.first = self.end = 0
        self.granted: list[int] = []
        self.bears = False

    def birth_page(self, fd: int) -> None:
        self.page = mmap.mmap(fd, mmap.PAGESIZE)

    def birth_dir(self, stream_id: int, slot: int, fd: int) -> None:
        pass

    def birth_log(self, stream_id: int, fd: int) -> None:
        self.log = os.dup(fd)

    def birth_inos(self, stream_id: int, first: int, count: int, *, bears: bool = True) -> None:
        self.first = self.first or first
        self.granted.append(count)
        self.bears = bears

    def drop(self, nodeid: int) -> None:
        pass

    def bear(self, files: Files, name: bytes, *, counted: bool = True) -> int:
        """A file made and closed; not `counted`: killed right before that."""
        ino, self.first = self.first, self.first + 1
        files.volume.hot.path("default", ino, 1).write_bytes(name)
        data = birth(ino, top(files.volume), name, FH | ino)
        data += pack(IntentKind.CLOSED, ino, fh=FH | ino, flags=DROPPED)
        os.pwrite(self.log, data, self.end)
        self.end += len(data)
        struct.pack_into("<Q", self.page, END_AT, self.end)
        if counted:
            struct.pack_into("<Q", self.page, TOTAL_AT, self.end)
        return ino


def kind_of(files: Files, channel: Any) -> FilesKind:
    volume = files.volume
    return FilesKind(Surroundings(volume, channel, Opens(), MountWish(), volume.tenant_names()), files)


def run_births(tmp_path: Path, body: Any) -> None:
    async def main(files: Files, _: FakeKernel) -> None:
        channel = FakeChannel()
        kind = kind_of(files, channel)
        await kind.intents.start([files.volume.tenants.named("default").tenant_id])
        await kind.births.start()
        try:
            await body(files, channel, kind)
        finally:
            os.close(channel.log)

    run_files(small_settings(tmp_path), main)


def names(files: Files) -> list[bytes]:
    stream_id = files.volume.tenants.named("default").tenant_id
    with files.volume.catalog.view() as view:
        return [name for name, _ in namespace.list_dir(view, stream_id, top(files.volume), None, 100)]


@pytest.mark.timeout(20)  # without an end it takes the loop, and every deadline, with it
def test_a_channel_killed_before_it_counted_a_record(tmp_path: Path) -> None:
    async def body(files: Files, channel: FakeChannel, kind: FilesKind) -> None:
        channel.bear(files, b"a")
        channel.bear(files, b"b", counted=False)
        await kind.fold()
        await kind.fold()
        assert names(files) == [b"a", b"b"]

    run_births(tmp_path, body)


@pytest.mark.timeout(20)
def test_a_fold_whose_asker_is_cancelled_is_done_all_the_same(tmp_path: Path) -> None:
    async def body(files: Files, channel: FakeChannel, kind: FilesKind) -> None:
        ino, gate = channel.bear(files, b"a"), threading.Event()
        files.volume.writer.submit(files.volume.tenants.named("default").tenant_id, lambda _: gate.wait())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kind.fold)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            gate.set()
        await kind.fold()
        assert names(files) == [b"a"]
        assert files.known.get(ino) is not None  # the sealer knows it

    run_births(tmp_path, body)


@pytest.mark.timeout(20)
@pytest.mark.expects_warnings
def test_what_cannot_be_folded_is_left_to_recovery(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(files: Files, channel: FakeChannel, kind: FilesKind) -> None:
        channel.bear(files, b"a")

        def refuse(*_: Any, **__: Any) -> None:
            raise LimitError("full")

        real, files.volume.writer.submit = files.volume.writer.submit, refuse  # type: ignore[assignment, method-assign]
        with pytest.raises(LimitError):
            await kind.fold()
        files.volume.writer.submit = real  # type: ignore[method-assign]
        assert channel.granted[-1] == 0  # nothing more is born
        await kind.fold()
        kind.intents.close()
        assert list((files.volume.state_dir / FOLDER).iterdir())

    run_births(tmp_path, body)
    assert "not in the catalog yet" in caplog.text

    async def after(files: Files, _: FakeKernel) -> None:
        assert names(files) == [b"a"]

    run_files(small_settings(tmp_path), after)


def test_where_nothing_is_passed_through_names_change_all_the_same(tmp_path: Path) -> None:
    async def main(files: Files, _: FakeKernel) -> None:
        channel = FakeChannel()
        kind = kind_of(files, channel)
        await kind.intents.start([files.volume.tenants.named("default").tenant_id])
        await kind.births.start(bears=False)
        os.close(channel.log)
        assert channel.granted == [INOS_GRANTED] and not channel.bears

    run_files(small_settings(tmp_path), main)


@pytest.mark.timeout(20)
def test_want_of_room_for_bytes_stops_births_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(files: Files, channel: FakeChannel, kind: FilesKind) -> None:
        assert channel.bears
        monkeypatch.setattr(files.room, "lets_pass", lambda _: False)
        channel.bear(files, b"a")
        await kind.fold()
        assert (channel.granted[-1], channel.bears) == (0, False)
        kind.births.pause()
        assert (channel.granted[-1], channel.bears) == (0, True)  # changes of names, too

    run_births(tmp_path, body)


@pytest.mark.timeout(20)
def test_a_change_meets_what_was_born_whoever_asks_for_it(tmp_path: Path) -> None:
    """The catalog thread folds before any change of the tenant: no caller has to ask for it."""

    async def body(files: Files, channel: FakeChannel, kind: FilesKind) -> None:
        volume = files.volume
        ino, above = channel.bear(files, b"a"), top(files.volume)
        work = partial(namespace.rename, parent=above, name=b"a", new_parent=above, new_name=b"b")
        await result_of(volume.writer.submit(volume.tenants.named("default").tenant_id, work))
        assert names(files) == [b"b"] and kind.intents.is_folded()
        assert files.known.get(ino) is not None  # adopted before the one who asked went on

    run_births(tmp_path, body)


@pytest.mark.timeout(20)
def test_a_reader_of_the_mount_cannot_see_an_old_tree(tmp_path: Path) -> None:
    async def body(files: Files, channel: FakeChannel, kind: FilesKind) -> None:
        kinds = Kinds(dict.fromkeys(files.volume.tenant_names(), kind), Opens())
        ino, above = channel.bear(files, b"a"), top(files.volume)
        row = (await kinds.folded(above, Asked.LOOK_UP)).find(above, b"a")
        assert row is not None and row.ino == ino
        assert kind.unlinks.take(above, b"a") is not None
        assert (await kinds.folded(above, Asked.LOOK_UP)).find(above, b"a") is None
        assert not kind.intents.is_folded()  # which minds it without a fold
        assert (await kinds.folded(above, Asked.LIST)).entries(above, None, 10) == []
        assert kind.intents.is_folded()

    run_births(tmp_path, body)


@pytest.mark.timeout(60)
def test_a_long_log_is_folded_in_many_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within what a full disk has room for; the change that asked comes after all of them."""
    monkeypatch.setattr(catalog_writer, "GROUP_BYTES_MAX", 4096)

    async def body(files: Files, channel: FakeChannel, kind: FilesKind) -> None:
        volume, count = files.volume, 3 * fold.STEP + 7
        for n in range(count):
            channel.bear(files, b"%04d" % n)
        before = volume.writer.groups
        stream_id, above = volume.tenants.named("default").tenant_id, top(volume)
        found = await result_of(
            volume.writer.submit(stream_id, lambda b: len(namespace.list_dir(b.view, stream_id, above, None, 5000)))
        )
        assert found == count and volume.writer.groups - before >= 2 * count // fold.STEP
        assert kind.intents.is_folded() and kind.intents.folded == 2 * count

    run_births(tmp_path, body)
