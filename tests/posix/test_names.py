"""Names: every byte string of up to 255 bytes without a slash is one, at any depth."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.posix.helpers import code, names, opened

ODD = [
    b"a" * 255,
    "ü".encode() * 127,
    bytes(range(1, 47)),
    bytes(range(48, 256)),
    b"\xff\xfe\x80",
    b"new\nline\r\ttab",
    b" leading and trailing ",
    b"-rf",
    b"*?[]{}$HOME`x`",
    b"...",
    b". ",
    b".aof2",
    b"_append",
    b".fuse_hidden0001",
    b"\\",
    b"\xed\xa0\x80",
]


def test_odd_names_come_back_as_they_were(folder: Path) -> None:
    top = os.fsencode(folder)
    for number, name in enumerate(ODD):
        with opened(top + b"/" + name) as fd:
            os.write(fd, b"%d" % number)
    assert sorted(os.listdir(top)) == sorted(ODD)
    for number, name in enumerate(ODD):
        with opened(top + b"/" + name, os.O_RDONLY) as fd:
            assert os.read(fd, 10) == b"%d" % number
        os.rename(top + b"/" + name, top + b"/moved")
        os.rename(top + b"/moved", top + b"/" + name)
        os.unlink(top + b"/" + name)
    assert os.listdir(top) == []


def test_every_single_byte_is_a_name(folder: Path) -> None:
    top = os.fsencode(folder)
    wanted = [bytes([b]) for b in range(1, 256) if b not in b"/."]
    for name in wanted:
        os.mkdir(top + b"/" + name)
    assert sorted(os.listdir(top)) == wanted


def test_case_and_normal_forms_are_different_names(folder: Path) -> None:
    for name in ("a", "A", "\u00e9", "e\u0301"):
        (folder / name).write_text(name)
    assert [(folder / name).read_text() for name in ("a", "A", "\u00e9", "e\u0301")] == ["a", "A", "\u00e9", "e\u0301"]


@pytest.mark.parametrize("make", ["file", "mkdir", "symlink", "link", "mkfifo", "rename"])
def test_256_bytes_are_too_long(folder: Path, make: str) -> None:
    (folder / "source").touch()
    long = folder / ("x" * 256)
    calls = {
        "file": lambda: long.touch(),
        "mkdir": lambda: os.mkdir(long),
        "symlink": lambda: os.symlink("target", long),
        "link": lambda: os.link(folder / "source", long),
        "mkfifo": lambda: os.mkfifo(long),
        "rename": lambda: os.rename(folder / "source", long),
    }
    assert code(calls[make]) == "ENAMETOOLONG"
    assert code(os.lstat, long) == "ENAMETOOLONG"
    assert names(folder) == ["source"]


def test_dots(folder: Path) -> None:
    (folder / "d" / "e").mkdir(parents=True)
    (folder / "f").write_text("f")
    assert (folder / "d" / ".." / "f").read_text() == "f"
    assert os.stat(f"{folder}/d/e/../../d/./.").st_ino == os.stat(folder / "d").st_ino
    assert code(os.mkdir, f"{folder}/.") == code(os.mkdir, f"{folder}/..") == "EEXIST"
    assert code(os.rmdir, f"{folder}/d/.") == "EINVAL"
    assert code(os.rmdir, f"{folder}/d/e/..") == "ENOTEMPTY"
    assert code(os.rename, f"{folder}/d/.", f"{folder}/g") in ("EBUSY", "EINVAL")
    assert code(os.unlink, f"{folder}/f/") == "ENOTDIR"
    assert code(os.stat, f"{folder}/f/.") == "ENOTDIR"
    assert code(os.stat, f"{folder}/nothing/../f") == "ENOENT"


def test_deeper_than_a_path_can_say(folder: Path) -> None:
    """Forty levels of 200 bytes: 8,000 bytes, reached step by step."""
    name, depth = "d" * 200, 40
    fds = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        for _ in range(depth):
            os.mkdir(name, dir_fd=fds[-1])
            fds.append(os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fds[-1]))
        with opened_at("bottom", fds[-1]) as fd:
            os.write(fd, b"deep")
        assert code(os.stat, str(folder / "/".join([name] * depth))) == "ENAMETOOLONG"
        up = os.open("/".join([".."] * depth), os.O_RDONLY | os.O_DIRECTORY, dir_fd=fds[-1])
        assert os.fstat(up).st_ino == os.stat(folder).st_ino
        os.close(up)
        os.rename("bottom", "top", src_dir_fd=fds[-1], dst_dir_fd=fds[0])
        assert (folder / "top").read_bytes() == b"deep"
        for level in range(depth - 1, -1, -1):
            os.rmdir(name, dir_fd=fds[level])
    finally:
        for fd in fds:
            os.close(fd)
    assert names(folder) == ["top"]


def opened_at(name: str, dir_fd: int) -> AbstractContextManager[int]:
    return opened(f"/proc/self/fd/{dir_fd}/{name}")


def test_a_file_is_no_directory(folder: Path) -> None:
    (folder / "f").touch()
    assert code(os.stat, folder / "f" / "x") == "ENOTDIR"
    assert code((folder / "f" / "x").touch) == "ENOTDIR"
    assert code(os.mkdir, folder / "f" / "x") == "ENOTDIR"
    assert code(os.listdir, folder / "f") == "ENOTDIR"
    assert code(os.rmdir, folder / "f") == "ENOTDIR"
    assert code(os.unlink, folder) in ("EISDIR", "EPERM")


def test_a_missing_name_appears_and_goes(folder: Path) -> None:
    """What the kernel remembers about names that are not there does not outlive them."""
    path = folder / "x"
    for _ in range(20):
        assert not path.exists()
        path.touch()
        assert path.exists()
        path.unlink()
    os.mkdir(path)
    assert path.is_dir()
