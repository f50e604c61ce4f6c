"""What asks about names is answered by the channel alone, from the catalog and what is not folded yet: the daemon stands still
meanwhile, so whatever needed it would hang."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.posix.conftest import IS_ROOT
from tests.posix.helpers import code
from tests.support.mount import MountedVolume

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="the kernel's names are dropped")


@contextmanager
def standing_still(volume: MountedVolume, here: Path) -> Iterator[None]:
    """No answer comes from the daemon. The kernel knows the way to the directory, and none of its names."""
    pid, way = volume.daemon_pid(), os.open(here, os.O_PATH)
    os.kill(pid, signal.SIGSTOP)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("2")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        os.close(way)


def test_attributes_and_targets(each_volume: MountedVolume, each_here: Path) -> None:
    file, link, fifo = each_here / "file", each_here / "link", each_here / "fifo"
    file.write_bytes(b"x" * 5000)
    link.symlink_to("a target")
    os.mkfifo(fifo, 0o640)
    os.setxattr(file, "user.colour", b"green")
    os.setxattr(file, "user.shape", b"")
    os.utime(fifo, ns=(-1_500_000_001, 1 << 63))
    before = {p: os.lstat(p) for p in (file, link, fifo, each_here)}
    with standing_still(each_volume, each_here):
        for path, was in before.items():
            now = os.lstat(path)
            fields = (
                "st_ino",
                "st_mode",
                "st_nlink",
                "st_uid",
                "st_gid",
                "st_size",
                "st_blocks",
                "st_mtime_ns",
                "st_atime_ns",
            )
            assert [getattr(now, f) for f in fields] == [getattr(was, f) for f in fields], path
        assert os.readlink(link) == "a target"
        assert os.getxattr(file, "user.colour") == b"green"
        assert os.getxattr(file, "user.shape") == b""
        assert sorted(os.listxattr(file)) == ["user.colour", "user.shape"]
        assert code(os.getxattr, file, "user.none") == "ENODATA"
        assert code(os.stat, each_here / "none") == "ENOENT"
        assert code(os.stat, each_here / ("n" * 255)) == "ENOENT"


def test_listings(each_volume: MountedVolume, each_here: Path) -> None:
    names = {f"name-{i:04}" + "x" * (i % 200) for i in range(1500)}
    for name in names:
        (each_here / name).touch()
    below = each_here / "below"
    below.mkdir()
    with standing_still(each_volume, each_here):
        assert set(os.listdir(each_here)) == names | {"below"}
        assert os.listdir(below) == []
        with os.scandir(each_here) as entries:
            assert all(entry.stat().st_ino == entry.inode() for entry in entries)


def test_what_is_not_folded_is_seen(each_volume: MountedVolume, each_here: Path) -> None:
    """Files that were made, and others that were removed, a moment ago."""
    old = [each_here / f"old-{i}" for i in range(40)]
    for path in old:
        path.write_bytes(b"old")
    os.listdir(each_here)
    for i, path in enumerate(old):
        if i % 2:
            path.unlink()
        else:
            (each_here / f"new-{i}").write_bytes(b"new" * i)
    with standing_still(each_volume, each_here):
        left = {f"old-{i}" for i in range(0, 40, 2)} | {f"new-{i}" for i in range(0, 40, 2)}
        assert set(os.listdir(each_here)) == left
        assert {i for i in range(40) if code(os.stat, old[i]) == ""} == set(range(0, 40, 2))
        assert [os.stat(each_here / f"new-{i}").st_size for i in range(0, 40, 2)] == [3 * i for i in range(0, 40, 2)]
        assert stat.S_ISDIR(os.stat(each_here).st_mode)


def test_a_listing_goes_on_where_it_was(each_volume: MountedVolume, each_here: Path) -> None:
    """Positions of a directory, also those of long ago; and what is there all the time is told once, whatever changes."""
    names = [f"{i:05}" for i in range(3000)]
    for name in names:
        (each_here / name).touch()
    seen = []
    with os.scandir(each_here) as entries:
        for i, entry in enumerate(entries):
            seen.append(entry.name)
            if i % 100 == 0:
                (each_here / f"{i:05}-more").touch()
                (each_here / f"{2999 - i:05}").unlink(missing_ok=True)
    gone = {f"{2999 - i:05}" for i in range(0, 3000, 100)}
    assert len(seen) == len(set(seen))
    assert set(names) - gone <= set(seen) <= set(names) | {f"{i:05}-more" for i in range(0, 3100, 100)}
