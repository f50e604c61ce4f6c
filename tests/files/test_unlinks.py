"""Unlinks that are answered before the catalog has them: folded in bulk, and after a crash by recovery, once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.errors import LimitError
from aof2.engine.files import Files
from aof2.engine.files.kind import FilesKind
from aof2.engine.intents.format import IntentKind, pack
from aof2.engine.intents.log import FOLDER, log_name
from aof2.engine.volume import Volume
from tests.engine.helpers import put_object, run_volume, small_settings
from tests.files.helpers import FakeKernel, make, run_files, top
from tests.files.test_births import kind_of, names


def run_unlinks(tmp_path: Path, body: Any, *, ends: bool = True) -> None:
    """`ends`: as an unmount does; else as a kill."""

    async def main(files: Files, _: FakeKernel) -> None:
        kind = kind_of(files, files.kernel)
        await kind.intents.start(files.volume.writable_tenants())
        await body(files, kind)
        if ends:
            await kind.fold()
            kind.intents.close()

    run_files(small_settings(tmp_path), main)


def logs(volume: Volume) -> list[Path]:
    return sorted((volume.state_dir / FOLDER).glob("*.log"))


def test_what_is_unlinked_before_the_fold_of_its_open_can_be_opened(tmp_path: Path) -> None:
    """It was looked up before: on a local disk it would be open, too."""

    async def body(files: Files, kind: FilesKind) -> None:
        ino = await make(files, b"a", b"x" * 5000)
        assert kind.unlinks.take(top(files.volume), b"a") is not None
        with kind.opening(ino):
            await kind.fold()
            assert names(files) == []
            fh = await files.open(ino, os.O_RDONLY)
        assert await files.handle(fh).read_bytes(0, 10) == b"x" * 10
        await files.release(fh)
        await files.volume.evictor.doomed.delete_all()
        assert not files.volume.hot.path("default", ino, 1).exists()

    run_unlinks(tmp_path, body)


def test_an_open_that_comes_too_late_leaves_nothing_behind(tmp_path: Path) -> None:
    """The fold was told that the inode may go; an open that waits for it meanwhile keeps no bytes."""

    async def body(files: Files, kind: FilesKind) -> None:
        used = files.volume.quota.usage.used_bytes
        ino = await make(files, b"a", b"x" * 5000)
        assert kind.unlinks.take(top(files.volume), b"a") is not None
        stays = files.known.must_stay

        def told_to_go(ino: int) -> bool:
            gone = not stays(ino)
            if gone:
                trio.from_thread.run_sync(late.set, trio_token=token)
            return not gone

        async def open_late() -> None:
            await late.wait()
            with pytest.raises(OSError, match="Stale"):
                await files.open(ino, os.O_RDONLY)

        token, late = trio.lowlevel.current_trio_token(), trio.Event()
        files.known.must_stay = told_to_go  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_late)
            await kind.fold()
        await files.volume.evictor.doomed.delete_all()
        assert files.known.get(ino) is None
        assert not files.volume.hot.path("default", ino, 1).exists()
        assert files.volume.quota.usage.used_bytes == used

    run_unlinks(tmp_path, body)


def test_what_is_unlinked_is_gone_with_its_bytes_after_the_fold(tmp_path: Path) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        inos = {name: await make(files, name, b"x" * 5000) for name in (b"a", b"b", b"c")}
        used = files.volume.quota.usage.used_bytes
        for name in (b"a", b"b"):
            row = kind.unlinks.take(top(files.volume), name)
            assert row is not None and (row.ino, row.nlink) == (inos[name], 0)
            with pytest.raises(FileNotFoundError):
                kind.unlinks.take(top(files.volume), name)
        assert not kind.intents.is_folded() and names(files) == [b"a", b"b", b"c"]
        told = kind.unlinks.as_told(_row(files, top(files.volume)))
        await kind.fold()
        assert kind.intents.is_folded() and names(files) == [b"c"]
        assert _row(files, top(files.volume)) == told  # nobody saw the fold
        await files.volume.evictor.doomed.delete_all()
        assert not files.volume.hot.path("default", inos[b"a"], 1).exists()
        assert files.volume.quota.usage.used_bytes == used // 3

    run_unlinks(tmp_path, body)

    async def after(v: Volume) -> None:
        assert logs(v) == []

    run_volume(small_settings(tmp_path), after, parts=())


def _row(files: Files, ino: int) -> Any:
    with files.volume.catalog.view() as view:
        return view.get(ino >> 40, t.INODES, ino)


def test_after_a_crash_recovery_folds_what_was_answered(tmp_path: Path) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        for name in (b"a", b"b", b"c"):
            await make(files, name, name)
        assert kind.unlinks.take(top(files.volume), b"a") is not None
        await kind.fold()
        assert kind.unlinks.take(top(files.volume), b"b") is not None
        path = logs(files.volume)[0]
        with path.open("ab") as f:
            f.write(
                pack(IntentKind.UNLINKED, 1, parent=top(files.volume), name=b"c", time_ns=1)[:-1]
            )  # torn: it was never answered

    run_unlinks(tmp_path, body, ends=False)

    async def after(files: Files, _: FakeKernel) -> None:
        assert names(files) == [b"c"]
        assert logs(files.volume) == []

    run_files(small_settings(tmp_path), after)


def test_a_log_is_never_folded_twice(tmp_path: Path) -> None:
    """An undeleted file has its old inode and name again."""

    async def body(files: Files, kind: FilesKind) -> None:
        volume = files.volume
        ino = (await put_object(volume, "default", b"a", b"bytes"))[1]
        await volume.checkpoint("default")
        assert kind.unlinks.take(top(volume), b"a") is not None
        await kind.fold()
        await result_of(volume.writer.submit(1, lambda b: namespace.undelete(b, ino)))
        shutil.copy(logs(volume)[0], volume.state_dir / "kept")

    run_unlinks(tmp_path, body)
    state = small_settings(tmp_path).volume.state_dir
    shutil.copy(state / "kept", state / FOLDER / log_name(1, 1))

    async def after(files: Files, _: FakeKernel) -> None:
        assert names(files) == [b"a"]

    run_files(small_settings(tmp_path), after)


def test_what_others_may_see_goes_the_usual_way(tmp_path: Path) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        volume = files.volume
        above = top(volume)
        opened = await make(files, b"open", b"x")
        fh = await files.open(opened, os.O_RDONLY)
        linked = await make(files, b"linked", b"x")
        await result_of(volume.writer.submit(1, lambda b: namespace.link(b, linked, above, b"too")))
        await result_of(volume.writer.submit(1, lambda b: namespace.mkdir(b, above, b"dir")))
        assert [kind.unlinks.take(above, n) for n in (b"open", b"linked", b"too", b"dir", b"absent")] == [None] * 5
        await files.release(fh)
        assert kind.intents.is_folded()

    run_unlinks(tmp_path, body)


@pytest.mark.expects_warnings
def test_what_cannot_be_folded_is_left_to_recovery(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(files: Files, kind: FilesKind) -> None:
        await make(files, b"a", b"x")
        assert kind.unlinks.take(top(files.volume), b"a") is not None

        def refuse(*_: Any, **__: Any) -> None:
            raise LimitError("full")

        real, files.volume.writer.submit = files.volume.writer.submit, refuse  # type: ignore[assignment, method-assign]
        with pytest.raises(LimitError):
            await kind.fold()
        files.volume.writer.submit = real  # type: ignore[method-assign]
        with pytest.raises(FileNotFoundError):  # it stays gone
            kind.unlinks.take(top(files.volume), b"a")

    run_unlinks(tmp_path, body)
    assert "not in the catalog yet" in caplog.text

    async def after(files: Files, _: FakeKernel) -> None:
        assert names(files) == []

    run_files(small_settings(tmp_path), after)


def test_what_is_opened_before_the_fold_stays_until_it_is_closed(tmp_path: Path) -> None:
    """An open that had looked the name up a moment ago: its bytes go with its close."""

    async def body(files: Files, kind: FilesKind) -> None:
        ino = await make(files, b"a", b"bytes")
        await files.sealer.seal_now()
        assert kind.unlinks.take(top(files.volume), b"a") is not None
        fh = await files.open(ino, os.O_RDONLY)
        await kind.fold()
        with files.volume.catalog.view() as view:
            assert namespace.nameless(view, 1) == [ino]
        await files.release(fh)
        assert _row(files, ino) is None
        await files.volume.evictor.doomed.delete_all()
        assert not files.volume.hot.path("default", ino, 1).exists()

    run_unlinks(tmp_path, body)
