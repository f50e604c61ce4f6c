"""Unlinks that are answered before the catalog has them: folded in bulk, and after a crash by recovery, once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.errors import LimitError
from aof2.engine.files import Files, unlinklog
from aof2.engine.files.unlinks import Unlinks
from aof2.engine.volume import Volume
from tests.engine.helpers import run_volume, small_settings
from tests.files.helpers import FakeKernel, make, run_files, top
from tests.files.test_births import names


def run_unlinks(tmp_path: Path, body: Any, *, ends: bool = True) -> None:
    """`ends`: as an unmount does; else as a kill."""

    async def main(files: Files, _: FakeKernel) -> None:
        unlinks = Unlinks(files)
        await unlinks.start(files.volume.writable_tenants())
        await body(files, unlinks)
        if ends:
            await unlinks.catch_up()
            unlinks.close()

    run_files(small_settings(tmp_path), main)


def logs(volume: Volume) -> list[Path]:
    return sorted((volume.state_dir / "births").glob("*.unlinks"))


@given(st.lists(st.binary(min_size=1, max_size=255), max_size=8), st.data())
def test_a_cut_or_damaged_log_ends_at_a_whole_record(found: list[bytes], data: st.DataObject) -> None:
    records = [unlinklog.pack(1, name, i, 5) for i, name in enumerate(found)]
    whole = b"".join(records)
    cut = data.draw(st.integers(0, len(whole)))
    ends = [sum(map(len, records[: i + 1])) for i in range(len(records))]
    assert [r.end for r in unlinklog.parse(whole[:cut])] == [end for end in ends if end <= cut]
    if whole:
        at = data.draw(st.integers(0, len(whole) - 1))
        bad = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
        assert [r.end for r in unlinklog.parse(bad)] == [end for end in ends if end <= at]


def test_what_is_unlinked_is_gone_with_its_bytes_after_the_fold(tmp_path: Path) -> None:
    async def body(files: Files, unlinks: Unlinks) -> None:
        inos = {name: await make(files, name, b"x" * 5000) for name in (b"a", b"b", b"c")}
        used = files.volume.quota.usage.used_bytes
        for name in (b"a", b"b"):
            row = unlinks.take(top(files.volume), name)
            assert row is not None and (row.ino, row.nlink) == (inos[name], 0)
            with pytest.raises(FileNotFoundError):
                unlinks.take(top(files.volume), name)
        assert unlinks.behind() and names(files) == [b"a", b"b", b"c"]
        told = unlinks.as_told(_row(files, top(files.volume)))
        await unlinks.catch_up()
        assert not unlinks.behind() and names(files) == [b"c"]
        assert _row(files, top(files.volume)) == told  # nobody saw the fold
        await files.volume.evictor.doomed.settle()
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
    async def body(files: Files, unlinks: Unlinks) -> None:
        for name in (b"a", b"b", b"c"):
            await make(files, name, name)
        assert unlinks.take(top(files.volume), b"a") is not None
        await unlinks.catch_up()
        assert unlinks.take(top(files.volume), b"b") is not None
        path = logs(files.volume)[0]
        with path.open("ab") as f:
            f.write(unlinklog.pack(top(files.volume), b"c", 1, 1)[:-1])  # torn: it was never answered

    run_unlinks(tmp_path, body, ends=False)

    async def after(files: Files, _: FakeKernel) -> None:
        assert names(files) == [b"c"]
        assert logs(files.volume) == []

    run_files(small_settings(tmp_path), after)


def test_a_log_is_never_folded_twice(tmp_path: Path) -> None:
    """An undeleted file has its old inode and name again."""

    async def body(files: Files, unlinks: Unlinks) -> None:
        volume = files.volume
        ino = (await volume.put("default", b"a", b"bytes"))[1]
        await volume.checkpoint("default")
        assert unlinks.take(top(volume), b"a") is not None
        await unlinks.catch_up()
        await result_of(volume.writer.submit(1, lambda b: namespace.undelete(b, ino)))
        shutil.copy(logs(volume)[0], volume.state_dir / "kept")

    run_unlinks(tmp_path, body)
    state = small_settings(tmp_path).volume.state_dir
    shutil.copy(state / "kept", state / "births" / unlinklog.log_name(1, 1))

    async def after(files: Files, _: FakeKernel) -> None:
        assert names(files) == [b"a"]

    run_files(small_settings(tmp_path), after)


def test_what_others_may_see_goes_the_usual_way(tmp_path: Path) -> None:
    async def body(files: Files, unlinks: Unlinks) -> None:
        volume = files.volume
        above = top(volume)
        opened = await make(files, b"open", b"x")
        fh = await files.open(opened, os.O_RDONLY)
        linked = await make(files, b"linked", b"x")
        await result_of(volume.writer.submit(1, lambda b: namespace.link(b, linked, above, b"too")))
        await result_of(volume.writer.submit(1, lambda b: namespace.mkdir(b, above, b"dir")))
        assert [unlinks.take(above, n) for n in (b"open", b"linked", b"too", b"dir", b"absent")] == [None] * 5
        await files.release(fh)
        assert not unlinks.behind()

    run_unlinks(tmp_path, body)


@pytest.mark.expects_warnings
def test_what_cannot_be_folded_is_left_to_recovery(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(files: Files, unlinks: Unlinks) -> None:
        await make(files, b"a", b"x")
        assert unlinks.take(top(files.volume), b"a") is not None

        def refuse(*_: Any, **__: Any) -> None:
            raise LimitError("full")

        real, files.volume.writer.submit = files.volume.writer.submit, refuse  # type: ignore[assignment, method-assign]
        with pytest.raises(LimitError):
            await unlinks.catch_up()
        files.volume.writer.submit = real  # type: ignore[method-assign]
        assert unlinks.take(top(files.volume), b"a") is None

    run_unlinks(tmp_path, body)
    assert "still in the catalog" in caplog.text

    async def after(files: Files, _: FakeKernel) -> None:
        assert names(files) == []

    run_files(small_settings(tmp_path), after)
