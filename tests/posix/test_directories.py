"""Directories: making, removing, link counts, and listing them while they change."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.posix.helpers import code, libc, names


def test_make_and_remove(folder: Path) -> None:
    os.mkdir(folder / "d")
    assert code(os.mkdir, folder / "d") == "EEXIST"
    (folder / "d" / "f").touch()
    assert code(os.rmdir, folder / "d") == "ENOTEMPTY"
    os.unlink(folder / "d" / "f")
    os.rmdir(folder / "d")
    assert code(os.rmdir, folder / "d") == "ENOENT"
    (folder / "f").touch()
    assert code(os.mkdir, folder / "f") == "EEXIST"
    os.symlink("nowhere", folder / "link")
    assert code(os.mkdir, folder / "link") == "EEXIST"
    assert code(os.rmdir, folder / "link") == "ENOTDIR"
    assert code(os.mkdir, folder / "nothing" / "d") == "ENOENT"


def test_links_count_subdirectories(folder: Path) -> None:
    assert folder.stat().st_nlink == 2
    for i in range(5):
        (folder / f"d{i}").mkdir()
    (folder / "f").touch()
    assert folder.stat().st_nlink == 7
    (folder / "d0" / "e").mkdir()
    os.rename(folder / "d1", folder / "d0" / "d1")
    assert ((folder / "d0").stat().st_nlink, folder.stat().st_nlink) == (4, 6)
    os.rmdir(folder / "d2")
    assert folder.stat().st_nlink == 5


def test_types_in_a_listing(folder: Path) -> None:
    (folder / "f").touch()
    (folder / "d").mkdir()
    os.symlink("f", folder / "l")
    os.mkfifo(folder / "p")
    with os.scandir(folder) as entries:
        found = {e.name: (e.is_file(follow_symlinks=False), e.is_dir(), e.is_symlink(), e.inode()) for e in entries}
    assert found == {
        "f": (True, False, False, (folder / "f").stat().st_ino),
        "d": (False, True, False, (folder / "d").stat().st_ino),
        "l": (False, False, True, (folder / "l").lstat().st_ino),
        "p": (False, False, False, (folder / "p").stat().st_ino),
    }


class Dir:
    """opendir(3) and its friends, which Python keeps to itself."""

    class Entry(ctypes.Structure):
        _fields_ = (
            ("ino", ctypes.c_uint64),
            ("off", ctypes.c_int64),
            ("reclen", ctypes.c_uint16),
            ("type", ctypes.c_uint8),
            ("name", ctypes.c_char * 256),
        )

    def __init__(self, path: Path) -> None:
        for function in ("opendir", "fdopendir"):
            getattr(libc, function).restype = ctypes.c_void_p
        libc.readdir.restype = ctypes.POINTER(Dir.Entry)
        libc.telldir.restype = ctypes.c_long
        libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
        for function in ("readdir", "telldir", "rewinddir", "closedir"):
            getattr(libc, function).argtypes = [ctypes.c_void_p]
        self.handle = libc.opendir(os.fsencode(path))
        assert self.handle

    def next(self) -> bytes | None:
        entry = libc.readdir(self.handle)
        return entry.contents.name if entry else None

    def rest(self) -> Iterator[bytes]:
        while (name := self.next()) is not None:
            yield name

    def tell(self) -> int:
        return libc.telldir(self.handle)

    def seek(self, position: int) -> None:
        libc.seekdir(self.handle, position)

    def rewind(self) -> None:
        libc.rewinddir(self.handle)

    def close(self) -> None:
        libc.closedir(self.handle)


def test_seek_and_rewind(folder: Path) -> None:
    for i in range(500):
        (folder / f"name-{i:03}").touch()
    listing = Dir(folder)
    first = []
    marks = []
    while (name := listing.next()) is not None:
        first.append(name)
        marks.append(listing.tell())
    assert sorted(first) == sorted([b".", b"..", *(b"name-%03d" % i for i in range(500))])
    for at in (400, 3, 499, 250, 0, 1):
        listing.seek(marks[at])
        assert list(listing.rest()) == first[at + 1 :]
    listing.rewind()
    assert list(listing.rest()) == first
    (folder / "later").touch()
    os.unlink(folder / "name-000")
    listing.rewind()
    now = set(listing.rest())
    assert b"later" in now
    assert b"name-000" not in now
    listing.close()


def test_parent_entries(folder: Path) -> None:
    (folder / "d").mkdir()
    listing = Dir(folder / "d")
    found = {}
    while entry := libc.readdir(listing.handle):
        found[entry.contents.name] = entry.contents.ino
    listing.close()
    assert found == {b".": (folder / "d").stat().st_ino, b"..": folder.stat().st_ino}


@pytest.mark.timeout(120)
def test_ten_thousand_names_while_they_change(here: Path) -> None:
    """What stays is told once, whatever comes and goes meanwhile; what is told was there at some time."""
    made = subprocess.run(
        [
            "python3",
            "-c",
            "import os, sys\nos.chdir(sys.argv[1])\nfor i in range(10000): os.symlink('x', f's{i:05}')",
            here,
        ],
        timeout=100,
        check=False,
    )
    assert made.returncode == 0
    listing = Dir(here)
    seen = []
    for step in range(100_000):
        name = listing.next()
        if name is None:
            break
        seen.append(name)
        if step % 100 == 0:
            (here / f"new{step:05}").touch()
            if step % 200 == 0 and step >= 200:
                os.unlink(here / f"new{step - 200:05}")
            os.rename(here / f"s{9999 - step // 100:05}", here / f"r{step // 100:05}")
    listing.close()
    stayed = {b"s%05d" % i for i in range(9000)}
    assert [n for n in sorted(seen) if n in stayed] == sorted(stayed)
    assert len(seen) == len(set(seen))
    now = names(here)
    assert len(now) == len(set(now))
    assert stayed <= set(map(os.fsencode, now))


def test_listing_and_removing(folder: Path) -> None:
    """`rm -r` reads and unlinks in turn."""
    for i in range(300):
        (folder / f"f{i}").touch()
    with os.scandir(folder) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert names(folder) == []
    os.rmdir(folder)


def test_sizes(each_here: Path) -> None:
    """Nobody has to count a million names to answer a stat."""
    before = each_here.stat()
    for i in range(100):
        os.symlink("x", each_here / str(i))
    assert each_here.stat().st_size == before.st_size == 4096
    assert each_here.stat().st_blocks == 8
