"""Many files are synced at once where that is cheaper, one by one elsewhere; power loss takes none of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from aof2.engine import env, synced
from aof2.engine.errors import FatalIOError
from tests.support.loop import loop_disk
from tests.support.mount import until


class Counting(env.Files):
    def __init__(self) -> None:
        self.synced: list[int] = []

    def fsync(self, fd: int) -> None:
        self.synced.append(fd)
        super().fsync(fd)


def written(folder: Path, count: int) -> list[int]:
    fds = []
    for n in range(count):
        fds.append(os.open(folder / f"f{n}", os.O_RDWR | os.O_CREAT))
        os.write(fds[-1], b"%d" % n * (n * 61 % 9000))
    return fds


@pytest.mark.parametrize(
    ("count", "dirty", "journal", "syncs"),
    [
        (3, 0, True, 3),
        (40, 0, False, 0),
        (40, 0, True, 0),
        (40, 1 << 40, False, 40),
        (40, 1 << 40, True, 1),
        (8, 0, True, 1),
    ],
)
def test_which_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, dirty: int, journal: bool, syncs: int
) -> None:
    monkeypatch.setattr(synced, "dirty_bytes", lambda: dirty)
    monkeypatch.setattr(synced, "has_journal", lambda device: journal)
    fds, files = written(tmp_path, count), Counting()
    files.fsync_all(fds)
    assert len(files.synced) == syncs
    assert syncs != count or files.synced == fds
    assert set(os.listdir(tmp_path)) == {f"f{n}" for n in range(count)}
    for fd in fds:
        os.close(fd)


def test_without_an_inode_they_are_synced_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_inode(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(synced, "has_journal", lambda device: True)
    fds, files = written(tmp_path, 9), Counting()
    with monkeypatch.context() as m:
        m.setattr(os, "open", no_inode)
        files.fsync_all(fds)
    assert files.synced == fds


def test_what_the_disk_fails_to_take_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synced, "has_journal", lambda device: True)
    fds = written(tmp_path, 8)
    os.close(fds[5])
    with pytest.raises(FatalIOError, match="Bad file descriptor"):
        env.Files().fsync_all(fds)


@pytest.mark.parametrize("way", ["syncfs", "journal"])
def test_power_loss_takes_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """What came after, and was not synced, shows that the power was gone."""
    monkeypatch.setattr(synced, "dirty_bytes", lambda: 0 if way == "syncfs" else 1 << 40)
    with loop_disk(tmp_path, size_bytes=128 << 20) as disk:
        assert synced.has_journal(disk.path.stat().st_dev)
        folder = disk.path / "d"
        folder.mkdir()
        files = Counting()
        fds = written(folder, 200)
        files.fsync_all(fds)
        assert len(files.synced) == (way == "journal")
        expected = {path.name: path.read_bytes() for path in folder.iterdir()}
        (folder / "later").mkdir()
        fds += written(folder / "later", 3)
        disk.cut()
        for fd in fds:
            os.close(fd)
        until(disk.let_go, "the disk is in use")
        disk.power_up()
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == expected
        assert not (folder / "later").exists()


def test_what_is_to_be_written_out_is_known() -> None:
    assert synced.dirty_bytes() >= 0
