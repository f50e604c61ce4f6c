"""Inodes of files that left, for those that come."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aof2.engine.catalog.rows import ObjectState
from aof2.engine.env import Env
from aof2.engine.local.hot import HotCache
from aof2.engine.local.spares import FOLDER, Spares
from aof2.engine.verify.findings import Kind
from aof2.engine.verify.run import verify
from aof2.engine.volume import Volume
from tests.engine.helpers import object_row, put_object, read_object, run_volume, small_settings
from tests.engine.weather import until


@pytest.fixture
def hot(tmp_path: Path) -> HotCache:
    made = HotCache(Env(), tmp_path / "hot")
    made.spares.load()
    return made


def make(hot: HotCache, ino: int, data: bytes = b"bytes") -> Path:
    path = hot.path("default", ino, 1)
    fd = hot.create(path, len(data))
    os.pwrite(fd, data, 0)
    os.close(fd)
    return path


def test_what_left_comes_back_as_another(hot: HotCache) -> None:
    path = make(hot, 1)
    inode = path.stat().st_ino
    hot.retire(path)
    assert not path.exists() and len(hot.spares) == 1
    (spare,) = (hot.root / FOLDER).iterdir()
    assert (spare.stat().st_size, spare.stat().st_blocks) == (0, 0)
    other = hot.path("default", 2, 1)
    other.write_bytes(b"left by a crash")
    assert make(hot, 2, b"other bytes") == other
    assert (other.stat().st_ino, other.read_bytes()) == (inode, b"other bytes")
    assert not len(hot.spares)


def test_a_new_file_without_bytes_has_a_time_of_its_own(hot: HotCache) -> None:
    path = make(hot, 1)
    os.utime(path, ns=(1, 1))
    hot.retire(path)
    os.close(hot.create(hot.path("default", 2, 1)))
    assert hot.path("default", 2, 1).stat().st_mtime_ns > 1 << 60
    assert len(hot.spares) == 1


def test_no_more_than_so_many_and_they_are_taken_over(tmp_path: Path) -> None:
    spares = Spares(Env(), tmp_path, most=3)
    files = [tmp_path / f"f{i}" for i in range(6)]
    for path in files:
        path.write_bytes(b"x")
    assert not spares.keep(files[5])  # not before `load`
    spares.load()
    assert [spares.keep(path) for path in files[:4]] == [True, True, True, False]
    assert files[3].read_bytes() == b"x"
    (tmp_path / FOLDER / "1000").write_bytes(b"of before power was lost")
    again = Spares(Env(), tmp_path, most=4)
    again.load()
    assert len(again) == len(list((tmp_path / FOLDER).iterdir())) == 3
    assert again.keep(files[3])
    assert len(list((tmp_path / FOLDER).iterdir())) == 4
    assert (again.drop(3), again.drop(3)) == (3, 1)
    assert not list((tmp_path / FOLDER).iterdir())


def test_verify_knows_them(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def body(v: Volume) -> None:
        keys = [await put_object(v, "default", b"f%d" % i, bytes([i]) * 5000) for i in range(6)]
        await v.jobs.checkpoint(1)
        await until(lambda: all(object_row(v, key).state == ObjectState.PUBLISHED for key in keys))
        await v.evict(keys)
        assert len(v.hot.spares) == 6
        assert await read_object(v, keys[0], 0, 5000) == bytes(5000)
        assert len(v.hot.spares) == 5

    run_volume(settings, body, parts=("jobs",))
    folder = tmp_path / "state" / "hot_cache" / FOLDER
    assert len(list(folder.iterdir())) == 5
    assert not [f for f in verify(settings).findings if f.kind is Kind.LOCAL_ORPHAN]
    (folder / "77").write_bytes(b"bytes")
    strays = [f for f in verify(settings).findings if f.kind is Kind.LOCAL_ORPHAN]
    assert [Path(f.path).name for f in strays] == ["77"]


def test_one_that_is_gone(hot: HotCache) -> None:
    hot.retire(hot.path("default", 1, 1))
    with pytest.raises(FileNotFoundError):
        hot.spares.keep(hot.path("default", 1, 1))
    path = make(hot, 3)
    hot.retire(path)
    for spare in (hot.root / FOLDER).iterdir():
        spare.unlink()
    assert make(hot, 4, b"made anew").read_bytes() == b"made anew"
