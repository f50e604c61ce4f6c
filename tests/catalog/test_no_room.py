"""A disk without room, or one that fails, under the catalog: an error with its errno, rows that stay right, no bug."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import lmdb
import pytest

from aof2.engine.catalog.lmdb_errors import translated
from aof2.engine.catalog.recovery import replay_stream
from aof2.engine.catalog.store import Catalog
from aof2.engine.env import Env, Files
from aof2.engine.errors import CorruptError, FatalIOError, LimitError
from aof2.engine.local.reserve import Reserve
from aof2.engine.manifest.format import chunk_name
from tests.catalog.helpers import Volume, every_row, open_volume
from tests.catalog.test_catalog import make_file

UNIT = 256 << 10


class FullFiles(Files):
    """A disk with so many files and allocations left; a unit of the reserve that goes is one more of each."""

    left: int | None = None

    def create(self, path: Path, mode: int = 0o600) -> int:
        self._use(path)
        return super().create(path, mode)

    def preallocate(self, fd: int, offset: int, length: int) -> None:
        self._use(None)
        super().preallocate(fd, offset, length)

    def allocate_ahead(self, fd: int, offset: int, length: int) -> None:
        self._use(None)
        super().allocate_ahead(fd, offset, length)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if self.left is not None and path.parent.name == "reserve":
            self.left += 1

    def _use(self, path: Path | None) -> None:
        if self.left is None:
            return
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.left -= 1


class FullOnce:
    """A transaction that meets a full disk when it is committed."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def commit(self) -> None:
        self._txn.abort()
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")


def with_reserve(tmp_path: Path, files: Files, units: int = 4) -> tuple[Volume, Reserve]:
    env = Env(files=files)
    reserve = env.reserve = Reserve(files, tmp_path / "reserve", UNIT)
    reserve.open()
    reserve.units_wanted = units
    assert reserve.fill(keep_bytes=0, keep_inodes=0)
    v = open_volume(tmp_path, env=env)
    v.target.replay = lambda stream_id: replay_stream(env, v.catalog, v.directory(stream_id), stream_id)
    return v, reserve


def rows(v: Volume) -> object:
    with v.catalog.view() as view:
        return every_row(view)


def test_the_log_goes_on_in_a_file_of_the_reserve(tmp_path: Path) -> None:
    files = FullFiles()
    v, reserve = with_reserve(tmp_path, files)
    files.left = 0
    for n in range(3):
        v.writer.call(1, make_file(b"f%d" % n), sync=True)
    assert reserve.units == 3
    assert (v.directory(1) / chunk_name(0)).stat().st_size == UNIT
    before = rows(v)
    files.left = None
    v.close()
    again = open_volume(tmp_path)
    assert rows(again) == before
    again.close()


def test_without_a_reserve_it_is_an_error_and_nothing_happened(tmp_path: Path) -> None:
    files = FullFiles()
    v, reserve = with_reserve(tmp_path, files, units=1)
    assert reserve.give()
    files.left = 0
    before = rows(v)
    for _ in range(2):
        with pytest.raises(OSError) as e:
            v.writer.call(1, make_file(b"x"))
        assert e.value.errno == errno.ENOSPC
    assert rows(v) == before
    files.left = None
    v.writer.call(1, make_file(b"x"))  # by itself, once there is room
    v.close()


def test_rows_that_found_no_room_come_from_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v, reserve = with_reserve(tmp_path, FullFiles())
    v.writer.call(1, make_file(b"before"))
    begin = v.catalog.begin_write
    monkeypatch.setattr(v.catalog, "begin_write", lambda: FullOnce(begin()))
    assert v.writer.call(1, make_file(b"meets it")) == 2
    monkeypatch.undo()
    assert v.writer.call(1, make_file(b"after")) == 3
    assert reserve.units == 3
    before = rows(v)
    v.close()
    again = open_volume(tmp_path)
    assert rows(again) == before
    again.close()


@pytest.mark.expects_warnings
def test_with_no_reserve_left_they_come_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v, reserve = with_reserve(tmp_path, FullFiles(), units=1)
    assert reserve.give()
    begin = v.catalog.begin_write
    monkeypatch.setattr(v.catalog, "begin_write", lambda: FullOnce(begin()))
    with pytest.raises(FatalIOError, match="already in its log"):
        v.writer.call(1, make_file(b"logged"))
    v.close()
    again = open_volume(tmp_path)
    with again.catalog.view() as view:
        assert any(b"logged" in str(row).encode() for row in every_row(view).items())
    again.close()


def test_a_reserve_is_found_again_and_what_was_cut_short_is_not(tmp_path: Path) -> None:
    reserve = Reserve(Files(), tmp_path / "reserve", UNIT)
    reserve.open()
    reserve.units_wanted = 3
    assert reserve.fill(keep_bytes=0, keep_inodes=0)
    (tmp_path / "reserve" / "77").write_bytes(b"short")
    again = Reserve(Files(), tmp_path / "reserve", UNIT)
    again.open()
    assert again.units == 3
    assert sorted(os.listdir(tmp_path / "reserve")) == ["0", "1", "2"]
    assert not again.fill(keep_bytes=1 << 60, keep_inodes=0)  # never the last room
    again.loosen(inodes=0, size_bytes=0)  # there is enough
    assert again.units == 3
    again.loosen(inodes=1 << 62, size_bytes=0)
    assert again.units == 3  # it is less than half of what there should be
    taken = tmp_path / "taken"
    assert again.take(taken)
    assert taken.read_bytes() == bytes(UNIT)
    assert (again.give(), again.give(), again.give()) == (True, True, False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (lmdb.DiskError("mdb_put: No space left on device"), errno.ENOSPC),
        (lmdb.Error("mdb_txn_commit: Input/output error"), errno.EIO),
        (lmdb.Error(f"mdb_env_open: {os.strerror(errno.EDQUOT)}"), errno.EDQUOT),
        (lmdb.MapFullError("mdb_put: full"), LimitError),
        (lmdb.ReadersFullError("mdb_txn_begin: readers"), LimitError),
        (lmdb.CorruptedError("mdb_get: corrupted"), CorruptError),
    ],
)
def test_what_lmdb_raises(error: lmdb.Error, expected: object) -> None:
    ours = translated(error, Path("/x/catalog"))
    assert ours.errno == expected if isinstance(ours, OSError) else type(ours) is expected


def test_a_full_disk_at_the_start_throws_no_rows_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v = open_volume(tmp_path)
    v.writer.call(1, make_file(b"kept"))
    v.close()

    def full(*_: object, **__: object) -> Any:
        raise lmdb.DiskError(f"{tmp_path}: No space left on device")

    data = (tmp_path / "catalog" / "data.mdb").read_bytes()
    monkeypatch.setattr(lmdb, "open", full)
    with pytest.raises(OSError) as e:
        open_volume(tmp_path)
    assert e.value.errno == errno.ENOSPC
    assert (tmp_path / "catalog" / "data.mdb").read_bytes() == data
    monkeypatch.undo()
    again = open_volume(tmp_path)
    assert not again.opened.rebuilt
    again.close()


def test_room_is_taken_ahead_of_the_rows(tmp_path: Path) -> None:
    """The data file's blocks are there before its pages are: other users of the disk cannot take them."""
    catalog = Catalog.open(Env(), tmp_path / "catalog")
    try:
        info = (tmp_path / "catalog" / "data.mdb").stat()
        assert info.st_blocks * 512 >= info.st_size + (3 << 20)
        lock = (tmp_path / "catalog" / "lock.mdb").stat()
        assert lock.st_blocks * 512 >= lock.st_size
    finally:
        catalog.close()
